"""Live runs one behind the other, and judged beside each other; the runs themselves are made up."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Self

import msgspec
import pytest

from relume.chaos.live import __main__ as command
from relume.chaos.live.judging import Judging
from relume.chaos.live.live_fleet import Turn, read
from relume.chaos.live.log_watch import Watch
from relume.chaos.live.sets import wrong_of
from relume.chaos.outcome import Outcome
from relume.chaos.runner.artifacts import outcome_in
from relume.chaos.runner.judge import judge
from relume.controlplane.replay.recorded_log import History
from relume.events.log.codec import decode_all
from relume.events.log.memory import MemoryLog
from relume.events.vocabulary import Tick
from tests.pace import turns
from tests.runner.recorded import outcome

GOOD = outcome()


class NoBed:
    def __init__(self, say: Any) -> None: ...

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None: ...


@pytest.mark.full
async def test_the_next_run_begins_when_the_one_before_has_struck(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    told: list[str] = []

    async def run(
        bed: NoBed, scenario: Any, seed: int, *, before: Turn | None, turn: Turn, **_: Any
    ) -> Outcome:
        told.append(f"{seed} comes up")
        if before is not None:
            await before.gone.wait()
        told.append(f"{seed} strikes")
        turn.struck.set()
        for _ in range(20):
            await asyncio.sleep(0)
        told.append(f"{seed} is gone")
        turn.over()
        kept = msgspec.structs.replace(GOOD.schedule, seed=seed)
        return msgspec.structs.replace(GOOD, schedule=kept)

    monkeypatch.setattr(command, "Bed", NoBed)
    monkeypatch.setattr(command, "run_in", run)
    lines = await command.run_all([("calm", 4), ("calm", 5), ("calm", 6)], tmp_path)
    assert told == [
        "4 comes up", "4 strikes", "5 comes up", "4 is gone",
        "5 strikes", "6 comes up", "5 is gone", "6 strikes", "6 is gone",
    ]  # fmt: skip
    assert [line.seed for line in lines] == [4, 5, 6]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calm-4", "calm-5", "calm-6"]


@pytest.mark.full
async def test_a_run_is_judged_elsewhere_as_it_is_here(tmp_path: Path) -> None:
    first = GOOD.histories[0]
    late = msgspec.structs.replace(first.record, gaps_ms=[99_000.0])
    bad = msgspec.structs.replace(
        GOOD, histories=(msgspec.structs.replace(first, record=late), *GOOD.histories[1:])
    )
    with Judging() as judging:
        for run in (GOOD, bad):
            verdict = judge(run)
            found = await judging.judge(run, tmp_path / "kept", "again")
            assert (found.result, found.wrong) == (verdict.result, wrong_of(run, verdict))
    assert found.result == "failed" and any("I10" in text for text in found.wrong)
    assert judge(outcome_in(tmp_path / "kept")[0]).broken == verdict.broken


async def test_a_log_that_begins_in_the_place_of_another_is_followed_by_itself() -> None:
    first, second = MemoryLog(), MemoryLog()
    watch = Watch()
    watch.make_reader = lambda: second
    following = asyncio.create_task(watch.follow(first))
    async with first.writer("fleet") as one, second.writer("fleet") as another:
        one.append(Tick(1, 0))
        await one.flush(5)
        assert await watch.until(lambda fleet: fleet.tick == 1, 20)
        watch.end_log()
        one.append(Tick(2, 0))
        await one.flush(5)
        await turns()
        watch.begin_log()
        another.append(Tick(7, 0))
        await another.flush(5)
        assert await watch.until(lambda fleet: fleet.tick == 7, 20)
        assert watch.count("Tick") == 1 and watch.landed()[-1].stream == "fleet"
        ticks = [e for g in watch.former for s in g.segments for e in decode_all(s.records)]
        assert ticks == [Tick(1, 0)] and not watch.error
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)


async def test_what_lands_while_the_log_is_read_is_not_missed() -> None:
    watch = Watch()
    watch.groups += GOOD.groups[:-1]
    seen = watch.landed()

    async def reading() -> History:
        found = History(groups=list(watch.groups), origin="here")
        watch.groups.append(GOOD.groups[-1])
        return found

    groups, landed = await read(watch, reading())
    assert groups == tuple(GOOD.groups[:-1])
    assert landed == seen != watch.landed()
