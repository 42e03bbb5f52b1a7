"""The agent's canaries: which, when, and what the log gets of them."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relume.engine_shim.agent.agent_config import AgentConfig
from relume.engine_shim.agent.canaries import canary_watch
from relume.engine_shim.agent.canaries.canary_schedule import CanarySchedule
from relume.engine_shim.agent.canaries.canary_watch import CanaryWatch, NoCanaries
from relume.engine_shim.agent.canaries.weights_digest import weights_digest
from relume.engine_shim.canary_prompts import COUNT, LENGTHS, TOKENS, prompt_of
from relume.events.vocabulary import CanaryReported
from relume.events.wire.worker_calls import CanaryAnswered


class Journal:
    """What would go into the log."""

    def __init__(self) -> None:
        self.told: list[CanaryReported] = []
        self.watch: Any = None
        self.news = asyncio.Event()

    def record(self, event: CanaryReported) -> None:
        self.told.append(event)
        self.news.set()

    async def until(self, count: int) -> list[CanaryReported]:
        async with asyncio.timeout(10):
            while len(self.told) < count:
                self.news.clear()
                await self.news.wait()
        return self.told


class Quiet:
    def info(self, event: str, **fields: Any) -> None: ...
    def error(self, event: str, **fields: Any) -> None: ...


Answer = Callable[[int, int], CanaryAnswered | str]


class Engine:
    """Answers the n-th question about a canary by `answer(canary, n)`."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.asked: list[int] = []
        self.busy = False
        self.looks = 0
        self.looked = asyncio.Event()

    async def until_looked(self, count: int) -> None:
        """Somebody read its counters so often."""
        while self.looks < count:
            self.looked.clear()
            await self.looked.wait()

    def read(self) -> dict[str, int]:
        self.looks += 1
        self.looked.set()
        return {"running": int(self.busy), "waiting": 0}

    async def weights(self) -> str:
        return "w"

    async def canary(self, number: int) -> CanaryAnswered | str:
        self.asked.append(number)
        return self.answer(number, self.asked.count(number))


def right(number: int, time: int) -> CanaryAnswered:
    return CanaryAnswered(tokens=(number,), logprobs=(-0.5,), took_us=10, alone=True, wait_us=4)


@asynccontextmanager
async def watched(
    answer: Answer, interval_s: float = 0.001, busy: bool = False
) -> AsyncIterator[tuple[Engine, Journal]]:
    engine, journal = Engine(answer), Journal()
    engine.busy = busy
    config = AgentConfig(
        worker="w0", run_dir="/nowhere", model="/nowhere", canary_interval_s=interval_s,
        canary_budget_ppm=1_000_000,
    )  # fmt: skip
    watch: Any = CanaryWatch(engine, 3, config, journal, Quiet())  # type: ignore[arg-type]
    task, journal.watch = asyncio.create_task(watch.run()), watch
    try:
        yield engine, journal
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_an_engine_answers_all_canaries_first_and_then_one_after_another() -> None:
    async with watched(right) as (engine, journal):
        told = await journal.until(2 * COUNT)
    assert engine.asked[: 2 * COUNT] == [*range(COUNT)] * 2, "alone, and together"
    assert [event.canary for event in told[: 2 * COUNT]] == [*range(COUNT)] * 2
    assert {(e.took_us, e.wait_us) for e in told} == {(10, 4)}
    assert {(e.worker, e.incarnation, e.exact, e.confirms) for e in told} == {
        ("w0", 3, True, False)
    }
    assert told[0].tokens == (0,) and told[0].logprobs == (-0.5,)


async def test_an_engine_that_differs_in_a_batch_is_not_exact() -> None:
    def answer(number: int, time: int) -> CanaryAnswered:
        drift = 1e-6 if (number, time) == (2, 2) else 0.0
        return CanaryAnswered(tokens=(number,), logprobs=(-0.5 + drift,))

    async with watched(answer) as (_, journal):
        told = await journal.until(2 * COUNT)
    assert not any(event.exact or event.confirms for event in told)


async def test_a_canary_without_an_answer_does_not_make_an_engine_inexact() -> None:
    async with watched(lambda n, time: "busy" if (n, time) == (1, 2) else right(n, time)) as (
        _,
        journal,
    ):
        told = await journal.until(COUNT)
    assert all(event.exact for event in told)


async def test_another_answer_than_the_first_is_confirmed_at_once_by_another_canary() -> None:
    """A bit of a log probability is enough."""

    def answer(number: int, time: int) -> CanaryAnswered:
        flipped = 1e-7 if time > 2 and number == 1 else 0.0
        return CanaryAnswered(tokens=(number,), logprobs=(-0.5 + flipped,), alone=True)

    async with watched(answer) as (_, journal):
        told = (await journal.until(2 * COUNT + 1))[COUNT:]
    assert [(e.canary, e.confirms) for e in told[:4]] == [
        (0, False), (1, False), (2, True), (2, False),
    ]  # fmt: skip


async def test_bits_of_busy_answers_confirm_nothing() -> None:
    """Neither those of a first answer nor those of a later one."""

    def answer(number: int, time: int) -> CanaryAnswered:
        busy = (number, time) in ((0, 1), (0, 2), (2, 4))
        drift = 1e-6 if busy else 0.0
        return CanaryAnswered(tokens=(number,), logprobs=(-0.5 + drift,), alone=not busy)

    async with watched(answer) as (_, journal):
        told = await journal.until(5 * COUNT)
    assert all(event.exact for event in told)
    assert not any(event.confirms for event in told[: 5 * COUNT])


async def test_hurried_canaries_are_sent_at_once_also_to_a_busy_engine() -> None:
    """Each of them once; then they follow one another as before."""
    async with watched(right, interval_s=3600, busy=True) as (engine, journal):
        await journal.until(COUNT)
        journal.watch.hurry()
        told = await journal.until(2 * COUNT)
        assert [event.canary for event in told[COUNT:]] == [*range(COUNT)]
        assert engine.asked.count(0) == 3
        journal.watch.hurry()
        await journal.until(3 * COUNT)
    assert len(journal.told) == 3 * COUNT


async def test_a_busy_first_answer_is_replaced_by_one_given_alone() -> None:
    def answer(number: int, time: int) -> CanaryAnswered:
        busy = time <= 2
        drift = 1e-6 if busy or (number, time) == (1, 4) else 0.0
        return CanaryAnswered(tokens=(number,), logprobs=(-0.5 + drift,), alone=not busy)

    async with watched(answer) as (_, journal):
        told = await journal.until(2 * COUNT + 3)
    assert [(e.canary, e.confirms) for e in told[2 * COUNT : 2 * COUNT + 3]] == [
        (0, False), (1, False), (2, True),
    ]  # fmt: skip


async def test_a_canary_without_an_answer_says_why_and_the_next_one_follows() -> None:
    async with watched(lambda n, time: "status 500" if time > 2 else right(n, time)) as (
        _,
        journal,
    ):
        told = await journal.until(COUNT + 2)
    assert [(e.error, e.tokens) for e in told[COUNT : COUNT + 2]] == [("status 500", ())] * 2


async def test_a_server_without_canaries_is_left_alone() -> None:
    def none(number: int, time: int) -> CanaryAnswered:
        raise NoCanaries

    engine, journal = Engine(none), Journal()
    config = AgentConfig(worker="w0", run_dir="/nowhere", model="/nowhere")
    await CanaryWatch(engine, 1, config, journal, Quiet()).run()  # type: ignore[arg-type]
    assert journal.told == [] and engine.asked == [0]


async def test_no_canary_is_due_before_the_interval_is_over() -> None:
    async with watched(right, interval_s=3600.0) as (engine, journal):
        await journal.until(COUNT)
        assert len(engine.asked) == 2 * COUNT and not engine.looked.is_set()


async def test_a_due_canary_waits_for_an_idle_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary_watch, "LOOK_S", 0.001)
    monkeypatch.setattr(CanarySchedule, "pause_s", lambda self, number: 0.0)
    async with watched(right, interval_s=3600.0, busy=True) as (engine, journal):
        async with asyncio.timeout(10):
            await engine.until_looked(5)
        assert len(engine.asked) == 2 * COUNT, "it is due, and the engine is busy"
        engine.busy = False
        await journal.until(COUNT + 1)


async def test_an_engine_that_is_never_idle_is_asked_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(canary_watch, "LOOK_S", 0.001)
    async with watched(right, interval_s=0.02, busy=True) as (engine, journal):
        await journal.until(2 * COUNT)
        assert engine.looked.is_set()


def test_canaries_keep_to_their_budget_and_interval() -> None:
    schedule = CanarySchedule(30.0, 1000, "w0:1")
    schedule.note_cost(0, 15_000)
    pauses = [schedule.pause_s(0) for _ in range(2000)]
    assert 22.5 <= min(pauses) < 23 and 37 < max(pauses) <= 37.5
    assert 29.5 < sum(pauses) / len(pauses) < 30.5
    assert schedule.patience_s == 15.0
    slow = CanarySchedule(30.0, 1000, "w0:1")
    slow.note_cost(0, 90_000)
    assert slow.pause_s(0) == 90.0, "a thousandth of the time, also for slow canaries"


def test_time_in_a_queue_is_no_cost_of_a_canary() -> None:
    schedule = CanarySchedule(30.0, 1000, "w0:1")
    for took_us in (3_000_000, 90_000, 0, 9_900_000):
        schedule.note_cost(0, took_us)
    assert schedule.pause_s(0) == 90.0, "the shortest of those that were answered"


def test_a_long_canary_has_a_longer_pause_before_it() -> None:
    """So canaries in turn take no more than the budget in any window after those of the start."""
    costs = (40_000, 55_000, 70_000, 95_000)
    schedule = CanarySchedule(30.0, 1000, "w0:1")
    for number, took_us in enumerate(costs):
        schedule.note_cost(number, took_us)
    now_s = spent_us = 0.0
    for turn in range(400):
        now_s += schedule.pause_s(turn % COUNT)
        spent_us += costs[turn % COUNT]
        assert spent_us <= 1000 * now_s
    assert schedule.pause_s(COUNT) == 95.0, "as the dearest, if it never answered"


def test_an_engine_whose_canaries_always_queue_is_checked_too() -> None:
    schedule = CanarySchedule(30.0, 1000, "w0:1")
    schedule.note_cost(0, 9_900_000)
    assert schedule.pause_s(0) == 600.0


async def test_a_slow_answer_does_not_delay_the_next_canary() -> None:
    def answer(number: int, time: int) -> CanaryAnswered:
        took_us = 10 if time == 1 else 10_000_000_000
        return CanaryAnswered(tokens=(number,), logprobs=(-0.5,), took_us=took_us, alone=True)

    async with watched(answer) as (_, journal):
        found = await journal.until(3 * COUNT)
    assert max(event.took_us for event in found[: 3 * COUNT]) == 10_000_000_000


def test_workers_that_started_together_do_not_stay_together() -> None:
    first = [CanarySchedule(30.0, 1000, f"w{n}:1").pause_s(0) for n in range(8)]
    assert len(set(first)) == 8
    again = [CanarySchedule(30.0, 1000, f"w{n}:1").pause_s(0) for n in range(8)]
    assert first == again


def test_prompts_are_fixed_different_and_within_the_vocabulary() -> None:
    prompts = [prompt_of(number, 512, 2048) for number in range(COUNT)]
    assert [len(prompt) for prompt in prompts] == list(LENGTHS)
    assert all(64 <= token < 320 for prompt in prompts for token in prompt)
    assert prompts[0][:8] == prompt_of(0, 512, 2048)[:8]
    for one, other in itertools.combinations(prompts, 2):
        assert one[:8] != other[:8]
    assert len(prompt_of(3, 512, 40)) == 40 - TOKENS


def test_other_weights_have_another_digest(tmp_path: Path) -> None:
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "model.safetensors").write_bytes(bytes(100))
    first = weights_digest(str(model))
    assert len(first) == 16 and first == weights_digest(str(model))
    (model / "model.safetensors").write_bytes(bytes(99) + b"\1")
    assert weights_digest(str(model)) != first
    assert weights_digest("some/name-on-a-hub") == ""


def test_log_probabilities_that_are_no_numbers_reach_the_log() -> None:
    """They are the surest sign of all."""
    from relume.engine_shim.agent.engine_process.watched_engine import _answered

    body = b'{"tokens": [1], "logprobs": [NaN, -Infinity], "took_us": 5, "alone": true}'
    answer = _answered(b"HTTP/1.1 200 OK\r\nx: y\r\n\r\n" + body)
    assert isinstance(answer, CanaryAnswered)
    assert str(answer.logprobs) == "(nan, -inf)"
    assert _answered(b"HTTP/1.1 500 \r\n\r\n{}") == "status 500"
    assert _answered(b"") == "no answer"
    long = b'{"tokens": [1,2,3,4,5,6,7,8,9]}'
    assert _answered(b"HTTP/1.1 200 OK\r\n\r\n" + long) == "an answer that is too long"
    assert _answered(b"HTTP/1.1 200 OK\r\n\r\n[") == "an answer that is none"
    assert msgspec.structs.asdict(answer)["alone"] is True
