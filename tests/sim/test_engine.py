"""The simulated engine schedules as vLLM does, and its runs are steps taken together."""

from __future__ import annotations

from random import Random

import pytest

from relume.chaos.sim.engine.engine_model import EngineConfig, Job, JobEvent, SimEngine
from relume.chaos.sim.engine.speed import PausedStepCost
from relume.chaos.sim.engine.step_cost import StepCost, load
from relume.chaos.sim.world.virtual_clock import Clock

COST = load("qwen3-32b_rtxpro6000x2")


class StepByStep(SimEngine):
    """The same engine without runs: each step is scheduled by itself."""

    def _run_length(self) -> int:
        super()._run_length()
        return 1


def jobs(seed: int, count: int, shared: bool = True) -> list[tuple[int, Job]]:
    """Jobs with their times, some of a common prefix."""
    rng, at, found = Random(f"jobs:{seed}"), 0, []
    for index in range(count):
        at += rng.randrange(0, 400_000_000)
        prompt, output = rng.randrange(1, 900), rng.randrange(1, 120)
        group = (rng.randrange(3), 10 + rng.randrange(3)) if shared and rng.random() < 0.6 else ()
        found.append(
            (
                at,
                Job(
                    name=f"j{index}",
                    prompt_tokens=prompt,
                    output_tokens=output,
                    prefix=group,
                    prefix_block=128,
                ),
            )
        )
    return found


def serve(engine: SimEngine, arrivals: list[tuple[int, Job]]) -> list[JobEvent]:
    events: list[JobEvent] = []
    for at, job in arrivals:
        events += engine.advance(at)
        events += engine.submit(job, at)
    while engine.next_ns is not None:
        events += engine.advance(engine.next_ns)
    return events


def times(events: list[JobEvent], what: str) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in events:
        if one.what == what:
            found.setdefault(one.name, one.at_ns)
    return found


def assert_empty(engine: SimEngine) -> None:
    assert not engine.running and not engine.waiting and engine.load == 0
    assert engine.kv.available == engine.kv.total
    assert engine._context == engine._decoding == 0 and not any(engine._begin_block)


@pytest.mark.parametrize("seed", range(12))
def test_runs_are_the_steps_they_stand_for(seed: int) -> None:
    # From ample blocks to so few that jobs are preempted again and again.
    config = EngineConfig(kv_blocks=(4000, 300, 150, 80)[seed % 4], max_seqs=16, max_tokens=256)
    arrivals = jobs(seed, 80)
    runs, steps = SimEngine(config, COST), StepByStep(config, COST)
    fast, slow = serve(runs, arrivals), serve(steps, arrivals)
    assert [(t.what, t.name, t.tokens) for t in fast] == [(t.what, t.name, t.tokens) for t in slow]
    # A run's increment is rounded to nanoseconds once, steps one by one.
    assert all(abs(a.at_ns - b.at_ns) < 1e-6 * b.at_ns for a, b in zip(fast, slow, strict=True))
    assert runs.steps == steps.steps and runs.preemptions == steps.preemptions
    assert (runs.preemptions > 0) == (config.kv_blocks < 4000), runs.preemptions
    assert len(times(fast, "finished")) == len(arrivals)
    assert_empty(runs)
    assert_empty(steps)


def test_the_same_jobs_give_the_same_history() -> None:
    config = EngineConfig(kv_blocks=120, max_seqs=16, max_tokens=256)
    one, other = SimEngine(config, COST), SimEngine(config, COST)
    assert serve(one, jobs(5, 60)) == serve(other, jobs(5, 60))


def test_a_pause_before_each_step_delays_it_and_is_no_part_of_it() -> None:
    config = EngineConfig(kv_blocks=4000)
    engine, plain = SimEngine(config, PausedStepCost(COST, 60_000_000)), SimEngine(config, COST)
    job = Job(name="j", prompt_tokens=100, output_tokens=5)
    steps = []
    engine.submit(job, 0)
    while engine.next_ns is not None:
        engine.advance(engine.next_ns)
        steps.append(engine.last)
    events = serve(plain, [(0, job)])
    assert [s.gap_ns for s in steps] == [0] + [60_000_000] * 4, "the first follows no other"
    assert steps[-1].took_ns == plain.last.took_ns
    assert engine.busy_ns == plain.busy_ns == times(events, "finished")["j"]
    assert engine.runs.over_ns == plain.runs.over_ns + 5 * 60_000_000


def test_looking_often_changes_nothing() -> None:
    config = EngineConfig(kv_blocks=120, max_seqs=16, max_tokens=256)
    seldom, often = SimEngine(config, COST), SimEngine(config, COST)
    arrivals = jobs(6, 40)
    expected = serve(seldom, arrivals)
    events: list[JobEvent] = []
    for at in range(0, arrivals[-1][0] + 60_000_000_000, 7_777_777):
        while arrivals and arrivals[0][0] <= at:
            due, job = arrivals.pop(0)
            events += often.advance(due)
            events += often.submit(job, due)
        events += often.advance(at)
    assert events == expected


def test_a_long_prompt_is_computed_in_chunks_while_others_decode() -> None:
    engine = SimEngine(EngineConfig(kv_blocks=4000, max_seqs=8, max_tokens=512), COST)
    engine.submit(Job(name="short", prompt_tokens=16, output_tokens=1000), 0)
    engine.advance(3_000_000_000)
    before = engine.steps
    events = engine.submit(Job(name="long", prompt_tokens=5000, output_tokens=10), 3_000_000_000)
    while "long" not in times(events, "first"):
        events += engine.advance(engine.next_ns or 0)
    assert engine.steps - before >= 10  # 511 tokens a step beside the one that decodes
    assert engine.running["short"].generated + engine._decoded - engine.running["short"].joined > 10


def test_no_more_run_at_once_than_places() -> None:
    engine = SimEngine(EngineConfig(kv_blocks=4000, max_seqs=2, max_tokens=512), COST)
    events = serve(
        engine, [(0, Job(name=f"j{i}", prompt_tokens=10, output_tokens=50)) for i in range(4)]
    )
    admitted, finished = times(events, "admitted"), times(events, "finished")
    assert admitted["j2"] >= min(finished["j0"], finished["j1"])
    assert list(admitted) == ["j0", "j1", "j2", "j3"]


def test_a_shared_prefix_is_computed_once() -> None:
    config = EngineConfig(kv_blocks=4000, max_seqs=8, max_tokens=2048)
    second = Job(name="b", prompt_tokens=1600, output_tokens=5, prefix=(7, 8, 9), prefix_block=512)
    arrivals = [
        (0, Job(name="a", prompt_tokens=1600, output_tokens=5, prefix=(7, 8, 9), prefix_block=512)),
        (10**10, second),
    ]
    ttft = {}
    for cached in (True, False):
        engine = SimEngine(EngineConfig(**{**_plain(config), "prefix_cache": cached}), COST)
        first = times(serve(engine, arrivals), "first")
        ttft[cached] = first["b"] - 10**10
        assert first["a"] == ttft[False] if not cached else True
    assert ttft[True] < ttft[False] / 4  # 64 tokens of 1,600


def _plain(config: EngineConfig) -> dict[str, int]:
    return {name: getattr(config, name) for name in config.__struct_fields__}


def test_unused_prefixes_make_room() -> None:
    engine = SimEngine(EngineConfig(kv_blocks=100, max_seqs=8, max_tokens=2048), COST)
    for turn in range(6):
        job = Job(
            name=f"j{turn}", prompt_tokens=1000, output_tokens=5, prefix=(turn,), prefix_block=960
        )
        serve(engine, [(turn * 10**10, job)])
    assert engine.kv.held((5,)) == 1 and engine.kv.held((0,)) == 0
    assert_empty(engine)


def test_the_last_admitted_is_preempted_and_computed_again() -> None:
    engine = SimEngine(EngineConfig(kv_blocks=20, max_seqs=8, max_tokens=512), COST)
    events = serve(
        engine,
        [
            (0, Job(name="old", prompt_tokens=100, output_tokens=150)),
            (1, Job(name="young", prompt_tokens=100, output_tokens=150)),
        ],
    )
    preempted = [t for t in events if t.what == "preempted"]
    assert [t.name for t in preempted] == ["young"] and 1 < preempted[0].tokens < 150
    finished = times(events, "finished")
    assert finished["old"] < finished["young"]
    again = [t for t in events if t.name == "young" and t.what == "first"]
    assert again[1].tokens == preempted[0].tokens + 1


def test_prompts_that_fill_all_blocks_are_served_in_their_order() -> None:
    engine = SimEngine(EngineConfig(kv_blocks=20, max_seqs=4, max_tokens=64), COST)
    events = serve(
        engine, [(0, Job(name=f"j{i}", prompt_tokens=300, output_tokens=5)) for i in range(3)]
    )
    assert list(times(events, "finished")) == ["j0", "j1", "j2"]
    assert_empty(engine)


def test_a_job_waits_in_its_place_however_late_it_comes() -> None:
    engine = SimEngine(EngineConfig(kv_blocks=4000, max_seqs=1, max_tokens=512), COST)
    came = {"first": 1, "third": 3, "fourth": 4, "second": 2}
    events = serve(
        engine,
        [
            (at, Job(name=name, prompt_tokens=10, output_tokens=50, place=place))
            for at, (name, place) in enumerate(came.items())
        ],
    )
    assert list(times(events, "admitted")) == ["first", "second", "third", "fourth"]


def test_a_job_continues_after_what_it_has() -> None:
    engine = SimEngine(EngineConfig(kv_blocks=400), COST)
    events = serve(
        engine, [(0, Job(name="moved", prompt_tokens=100, output_tokens=50, generated=49))]
    )
    assert [(t.what, t.tokens) for t in events if t.what != "chunk"] == [
        ("admitted", 49),
        ("first", 50),
        ("finished", 50),
    ]


def test_death_tells_what_streams_have() -> None:
    config = EngineConfig(kv_blocks=4000, max_seqs=16, max_tokens=256)
    arrivals = jobs(3, 30)
    for at in range(500_000_000, 9_000_000_000, 650_000_001):
        found = []
        for kind in (SimEngine, StepByStep):
            engine = kind(config, COST)
            for due, job in arrivals:
                if due <= at:
                    engine.advance(due)
                    engine.submit(job, due)
            engine.advance(at)
            found.append(engine.kill(at))
            assert engine.next_ns is None and engine.load == 0
            assert engine.kv.available == engine.kv.total
        assert found[0] == found[1] and found[0]


def test_a_job_that_comes_as_a_step_ends_waits_for_the_next_one() -> None:
    """As in an engine stepped one by one, in which that next step is on its way by then."""
    engine = SimEngine(EngineConfig(kv_blocks=4000), COST)
    engine.submit(Job(name="old", prompt_tokens=100, output_tokens=60), 0)
    engine.advance(engine.next_ns or 0)
    ends = [engine._began + engine._took(steps) for steps in (20, 21)]
    events = engine.advance(ends[0]) + engine.submit(
        Job(name="new", prompt_tokens=100, output_tokens=5), ends[0]
    )
    events += engine.advance(ends[1])
    assert times(events, "admitted") == {"new": ends[1]}


@pytest.mark.parametrize("at", [1, 100_000_000, 900_000_000])
def test_an_aborted_job_leaves_nothing(at: int) -> None:
    engine = SimEngine(EngineConfig(kv_blocks=60, max_seqs=2, max_tokens=64), COST)
    for index in range(3):
        engine.submit(Job(name=f"j{index}", prompt_tokens=100, output_tokens=100), 0)
    events = engine.advance(at)
    assert all(engine.abort(f"j{index}", at) for index in (0, 2))
    assert not engine.abort("unknown", at)
    while engine.next_ns is not None:
        events += engine.advance(engine.next_ns)
    assert list(times(events, "finished")) == ["j1"]
    assert_empty(engine)


def test_what_can_never_fit_is_refused() -> None:
    engine = SimEngine(EngineConfig(kv_blocks=10), COST)
    for job in (
        Job(name="a", prompt_tokens=150, output_tokens=20),
        Job(name="b", prompt_tokens=0, output_tokens=5),
        Job(name="c", prompt_tokens=5, output_tokens=5, generated=5),
    ):
        with pytest.raises(ValueError, match=job.name):
            engine.submit(job, 0)
    with pytest.raises(ValueError, match="max_tokens"):
        SimEngine(EngineConfig(kv_blocks=10, max_seqs=64, max_tokens=32), COST)


def test_the_clock_takes_the_earliest_and_what_was_set_first() -> None:
    clock: Clock[str] = Clock()
    for who, at in (("a", 5), ("b", 3), ("c", 3), ("d", 1)):
        clock.set(who, at)
    clock.set("a", 2)
    clock.set("d", None)
    assert [clock.next() for _ in range(4)] == ["a", "b", "c", None] and clock.now_ns == 3
    with pytest.raises(ValueError, match="before"):
        clock.set("e", 1)


def test_work_grows_with_events_not_with_workers_or_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    for output in (100, 10_000):
        calls = 0

        class Counting(StepCost):
            def decode(self, sequences: int, context: int) -> tuple[int, int]:
                nonlocal calls
                calls += 1
                return super().decode(sequences, context)

        engine = SimEngine(EngineConfig(kv_blocks=40_000), Counting(COST.formula))
        serve(
            engine,
            [
                (0, Job(name=f"j{i}", prompt_tokens=100, output_tokens=output + i))
                for i in range(20)
            ],
        )
        asked.append(calls)
    assert asked[0] == asked[1] <= 21
