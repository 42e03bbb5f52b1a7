"""Steps with less detail: fewer records, the same account, nothing of a request's course lost."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from relume.engine_shim.agent.step_detail import Merger, merged
from relume.events import vocabulary as v
from relume.events.log.codec import decode, encode
from relume.events.log.memory import MemoryLog
from relume.events.wire.prefix import pack
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.fold import fold
from tests.agent.stage import staged

PROGRESS = (v.KvBlocksFilled, v.PrefillChunkDone)


def steps(seed: int, count: int = 400) -> list[v.EngineStep]:
    """A run of an engine: requests come, are computed in chunks, decode and end."""
    rng = random.Random(seed)
    live: dict[str, int] = {}
    out = []
    for number in range(1, count + 1):
        changes: list[v.AnyChange] = []
        if rng.random() < 0.05:
            name = f"q{number}"
            live[name] = 0
            changes += [v.RequestQueued(name, 1, 100), v.RequestAdmitted(name, 1, 16)]
        for name in list(live):
            live[name] += 1
            done = live[name]
            if done < 4:
                changes.append(v.PrefillChunkDone(name, 1, 21, 16 + 21 * done))
            elif done == 4:
                changes.append(v.FirstToken(name, 1))
            elif done % 5 == 0:
                changes.append(v.KvBlocksFilled(name, 1, done // 5))
            if done > 60:
                del live[name]
                changes.append(v.EngineFinished(name, 1, "length", done))
        between = rng.random() < 0.1
        lost = 3 if rng.random() < 0.01 else 0
        out.append(
            v.EngineStep(
                incarnation=1,
                step=number,
                duration_us=0 if between else 1000 + number,
                batch=0 if between else len(live),
                sum_context=0 if between else 50 * len(live),
                prefill_tokens=0 if between else 7,
                waiting=2,
                kv_used=number,
                changes=tuple(changes),
                lost=lost,
                gap_us=0 if between else rng.choice((0, 0, 300, 5000)),
            )
        )
    return out


def course(records: list[v.EngineStep]) -> list[v.AnyChange]:
    return [c for r in records for c in r.changes if type(c) not in PROGRESS]


def account(records: list[v.EngineStep]) -> Worker:
    fleet = Fleet()
    fleet.workers["w0"] = Worker(name="w0", incarnation=1, engine="ready")
    for record in records:
        fold(fleet, "w.w0", 1, record)
    return fleet.workers["w0"]


@pytest.mark.parametrize("seed", range(8))
def test_merged_records_leave_the_account_as_it_was(seed: int) -> None:
    whole = steps(seed)
    merger, short = Merger(1 << 16), []
    for number, step in enumerate(whole):
        short += merger.offer(encode(step))
        if number % 50 == 49:  # as if the time had come
            short += merger.rest()
    short += merger.rest()
    records = [decode(record) for record in short]
    assert len(records) < len(whole) * 0.6 and merger.merged
    assert course(records) == course(whole)
    assert sum(r.prefill_tokens for r in records) == sum(r.prefill_tokens for r in whole)
    full, less = account(whole), account(records)
    less.step_us_high = full.step_us_high  # fades with each record
    told = ("decode_us", "prefill_us", "prefill_tokens", "reported_us")
    for name in told:  # learnt from whole steps only
        setattr(less, name, getattr(full, name))
    assert less == full


def test_a_merged_record_has_the_longest_gap_as_it_has_the_longest_duration() -> None:
    def step(number: int, duration_us: int, gap_us: int) -> v.EngineStep:
        return v.EngineStep(
            incarnation=1,
            step=number,
            duration_us=duration_us,
            batch=1,
            sum_context=10,
            prefill_tokens=0,
            waiting=0,
            kv_used=1,
            gap_us=gap_us,
        )

    for steps in (
        (step(1, 900, 60_000), step(2, 1200, 0)),
        (step(1, 1200, 0), step(2, 900, 60_000)),
    ):
        one = merged(*steps)
        assert one is not None
        assert (one.step, one.duration_us, one.gap_us) == (2, 1200, 60_000)


def test_what_tells_of_a_request_is_not_held_back() -> None:
    merger = Merger(1 << 16)

    def step(number: int, *changes: v.AnyChange) -> v.EngineStep:
        return v.EngineStep(
            incarnation=1,
            step=number,
            duration_us=900,
            batch=1,
            sum_context=10,
            prefill_tokens=0,
            waiting=0,
            kv_used=1,
            changes=changes,
        )

    assert merger.offer(encode(step(1))) == []
    filled = v.KvBlocksFilled("q", 1, 1)
    assert merger.offer(encode(step(2, filled))) == []
    ended = (v.KvBlocksFilled("q", 1, 2), v.EngineFinished("q", 1, "stop", 5))
    (record,) = merger.offer(encode(step(3, *ended)))
    assert decode(record) == step(3, *ended)
    assert merger.rest() == []


def test_other_events_keep_their_place_and_unreadable_ones_their_bytes() -> None:
    merger = Merger(1 << 16)
    step = encode(
        v.EngineStep(
            incarnation=1,
            step=1,
            duration_us=900,
            batch=1,
            sum_context=10,
            prefill_tokens=0,
            waiting=0,
            kv_used=1,
        )
    )
    for record in (
        encode(
            v.RestoreStarted(incarnation=1, request="q", child=0, attempt=1, holder="w1", tokens=64)
        ),
        b"\x91\xadengine_step/1",
    ):
        assert merger.offer(step) == []
        assert merger.offer(record) == [step, record]


def test_records_of_two_lives_or_over_a_loss_are_not_one() -> None:
    step = v.EngineStep(
        incarnation=1,
        step=1,
        duration_us=900,
        batch=1,
        sum_context=10,
        prefill_tokens=0,
        waiting=0,
        kv_used=1,
    )
    assert (
        merged(
            step,
            v.EngineStep(
                incarnation=2,
                step=1,
                duration_us=900,
                batch=1,
                sum_context=10,
                prefill_tokens=0,
                waiting=0,
                kv_used=1,
            ),
        )
        is None
    )
    assert (
        merged(
            step,
            v.EngineStep(
                incarnation=1,
                step=2,
                duration_us=900,
                batch=1,
                sum_context=10,
                prefill_tokens=0,
                waiting=0,
                kv_used=1,
                changes=(),
                lost=4,
            ),
        )
        is None
    )
    grown = v.EngineStep(
        incarnation=1,
        step=1,
        duration_us=900,
        batch=1,
        sum_context=10,
        prefill_tokens=0,
        waiting=0,
        kv_used=1,
        changes=(v.PrefillChunkDone("q" * 60, 1, 1, 1),),
    )
    merger = Merger(200)
    out = [r for _ in range(20) for r in merger.offer(encode(grown))] + merger.rest()
    assert len(out) > 1 and all(len(r) <= 200 for r in out)
    assert sum(len(decode(r).changes) for r in out) == 20


async def detail(log: MemoryLog, to: str) -> None:
    """What a leader writes."""
    async with log.writer("fleet") as leader:
        leader.append(
            v.DetailDecided(
                detail=to, was="full", database_bytes=7, quota_bytes=10, shed_percent=60
            )
        )


@pytest.mark.full
async def test_an_agent_sheds_while_told_to_and_its_death_notice_comes_last(
    tmp_path: Path,
) -> None:
    log = MemoryLog()
    async with staged(tmp_path, "--pace", "0.005", log=log) as stage:
        journal = lambda: stage.agent.describe()["log"]  # noqa: E731
        await stage.nth(v.EngineStep, 20)
        assert not journal()["shedding"]
        await detail(log, "shed")
        await stage.until(lambda: journal()["shedding"])
        begun = len(stage.events(v.EngineStep))
        await stage.nth(v.EngineStep, begun + 6)
        numbers = [e.step for e in stage.events(v.EngineStep)[begun:]]
        assert numbers[-1] - numbers[0] > 2 * len(numbers)
        await detail(log, "shed")  # again: nothing changes
        await detail(log, "full")
        await stage.until(lambda: not journal()["shedding"])
        begun = len(stage.events(v.EngineStep))
        await stage.nth(v.EngineStep, begun + 20)
        numbers = [e.step for e in stage.events(v.EngineStep)[begun:]]
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        finished = [e for e in course(stage.events(v.EngineStep)) if type(e) is v.EngineFinished]
        assert [f.output_tokens for f in finished] == list(range(1, len(finished) + 1))
        await detail(log, "shed")
        await stage.until(lambda: journal()["shedding"])
    last = [type(e) for e in stage.events(v.EngineStep, v.EngineDied)]
    assert last[-1] is v.EngineDied


def prefix_changes(seed: int, count: int = 300) -> list[v.PrefixBlocksChanged]:
    """What an engine tells of its prefix cache; it is reset now and then."""
    rng = random.Random(seed)
    held: dict[int, None] = {}
    out = [v.PrefixBlocksChanged(incarnation=1, reset=True, block_tokens=16)]
    for _ in range(count):
        if rng.random() < 0.02:
            held.clear()
            out.append(v.PrefixBlocksChanged(incarnation=1, reset=True, block_tokens=16))
        gone = [one for one in held if rng.random() < 0.3]
        new = [one for one in range(40) if one not in held and rng.random() < 0.2]
        again = [one for one in gone if rng.random() < 0.1]
        for one in gone:
            del held[one]
        held.update(dict.fromkeys([*new, *again]))
        out.append(
            v.PrefixBlocksChanged(incarnation=1, stored=pack([*new, *again]), removed=pack(gone))
        )
    return out


@pytest.mark.parametrize("seed", range(4))
def test_merged_changes_of_a_prefix_cache_leave_what_it_holds(seed: int) -> None:
    told = prefix_changes(seed)
    stop = random.Random(seed).randrange(100, 300)  # at any place
    merger = Merger(max_bytes=4096)
    records: list[v.Event] = []
    for number, change in enumerate(told[:stop]):
        written = merger.offer(encode(change))
        if number % 17 == 0:
            written += merger.offer(
                encode(
                    v.EngineStep(
                        incarnation=1,
                        step=number,
                        duration_us=9,
                        batch=1,
                        sum_context=1,
                        prefill_tokens=0,
                        waiting=0,
                        kv_used=0,
                        changes=(),
                        lost=0,
                    )
                )
            )
            written += merger.offer(
                encode(
                    v.EngineStep(
                        incarnation=1,
                        step=number,
                        duration_us=9,
                        batch=1,
                        sum_context=1,
                        prefill_tokens=0,
                        waiting=0,
                        kv_used=0,
                        changes=(FIRST,),
                        lost=0,
                    )
                )
            )
            assert type(decode(written[-1])) is v.EngineStep  # the cache is told first
        records += map(decode, written)
    records += map(decode, merger.rest())
    kinds = [type(record) for record in records]
    assert 0 < kinds.count(v.PrefixBlocksChanged) < stop // 4
    whole, less = account(told[:stop]), account(records)
    assert set(whole.cached.marks) == set(less.cached.marks)
    assert whole.prefix_marks == less.prefix_marks


FIRST = v.FirstToken("q1", 1)
