"""The gap before a step counts as time that the step takes; without gaps nothing changes."""

from __future__ import annotations

from random import Random

import pytest

from relume.events import vocabulary as v
from relume.policies.state.fleet import Worker, dump
from relume.policies.state.step_times import FIRST_STEPS
from tests.policies.story import Story, engine_step

BATCH, CONTEXT = 8, 2000


def step(number: int, us: int, gap_us: int = 0, prompt: int = 0) -> v.EngineStep:
    changes = (v.PrefillChunkDone("q1", 1, prompt, prompt),) if prompt else ()
    return v.EngineStep(
        incarnation=1,
        step=number,
        duration_us=us,
        batch=BATCH,
        sum_context=CONTEXT,
        prefill_tokens=prompt,
        waiting=0,
        kv_used=8,
        changes=changes,
        gap_us=gap_us,
    )


def folded(*steps: v.EngineStep) -> Worker:
    """A worker that reported these, each in a revision of its own but the last two."""
    story = Story()
    worker = story.worker()
    for one in steps[:-2]:
        story.tell("w.w0", one)
    story.tell("w.w0", *steps[-2:])
    return worker


def mixed(gap_us: int, more_us: int) -> list[v.EngineStep]:
    rng = Random(7)
    return [
        step(n, rng.randrange(4000, 6000) + more_us, gap_us, 64 if n % 5 == 0 else 0)
        for n in range(1, 161)  # all are in the sample
    ]


def test_a_gap_counts_as_a_longer_step_would() -> None:
    """In step times, prefill rate, stall bound and the time that a report covers."""
    gaps, longer, none = folded(*mixed(3000, 0)), folded(*mixed(0, 3000)), folded(*mixed(0, 0))
    assert dump(gaps) == dump(longer)
    assert gaps.step_us_high > none.step_us_high and gaps.reported_us > none.reported_us
    assert gaps.decode_us > none.decode_us + 2000
    assert gaps.prefill_us == none.prefill_us, "decode steps have the same gap: no prompt causes it"


def test_an_absurd_gap_is_not_taken() -> None:
    story = Story()
    worker = story.worker()
    for number, gap_us in enumerate((-1, 1 << 40), 1):
        story.tell("w.w0", step(1, 5000, gap_us))
        assert (worker.absurd, worker.step, worker.step_us_high) == (number, 0, 0)
    story.tell("w.w0", step(1, 5000, 100))
    assert (worker.absurd, worker.step_us_high) == (2, 5100)


def test_a_gap_between_records_is_no_step() -> None:
    story = Story()
    worker = story.worker()
    story.tell("w.w0", engine_step(us=0))
    assert worker.step_us_high == 0


class TwoWorkers:
    """Two workers of a class whose first steps are over. A healthy step takes 20 ms."""

    def __init__(self) -> None:
        self.story = Story()
        self.workers = [self.story.worker(name) for name in ("w0", "w1")]
        self._rng = Random(3)
        self._number = 0
        for _ in range(FIRST_STEPS + 32):
            self.steps(20_000)
        assert all(w.eager == 0 and 0.9 < w.slowness < 1.1 for w in self.workers)

    def steps(self, us: int, gap_us: int = 0) -> None:
        """One step of each worker; the other one's has no gap and is healthy."""
        self._number += 1
        jitter = self._rng.randrange(-500, 500)
        self.story.tell("w.w0", step(self._number, us + jitter, gap_us))
        self.story.tell("w.w1", step(self._number, 20_000 + jitter))


def test_a_worker_that_idles_before_its_steps_is_known_as_slow_after_some_steps() -> None:
    """60 ms before steps of 20 ms: a quarter of the speed. 2.5 is where a worker is a suspect."""
    fleet = TwoWorkers()
    slow, healthy = fleet.workers
    seconds = 0.0
    while slow.slowness < 2.5:
        fleet.steps(20_000, 60_000)
        seconds += 0.08
        assert seconds < 3
    for _ in range(1000):
        fleet.steps(20_000, 60_000)
    assert 3 < slow.slowness < 4.5, "its steps do not become those of its class"
    assert 0.8 < healthy.slowness < 1.2


def test_gaps_shorter_than_steps_are_learnt_by_the_sample_alone() -> None:
    fleet = TwoWorkers()
    (model,) = fleet.story.fleet.steptimes.values()
    samples, slowness = model.samples, fleet.workers[0].slowness
    for _ in range(32):
        fleet.steps(20_000, 19_000)
    used = model.samples - samples
    assert used <= 2
    assert fleet.workers[0].slowness == pytest.approx(slowness, rel=0.02 * used + 1e-9)
