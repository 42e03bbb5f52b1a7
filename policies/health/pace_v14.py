"""The pace of decode steps as versions 2 to 14 of `health` measured it, which replay still needs.

It differs from `pace` in this: a step's usual time is that of predictions (`step_times`), which contains
waits for a CPU and is learnt from slow workers too; reports count whole, and so does their longest step.
"""

from __future__ import annotations

from msgspec import UnsetType

from relume.events.vocabulary.enums import EnginePhase
from relume.policies.health.health_state import StepPace
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.step_times import ENOUGH_SAMPLES, SCALES

FEWEST_STEPS = 3
"""Steps of a measure; with fewer it is left to the next tick."""


def measured(fleet: Fleet, by_records: bool) -> dict[str, int]:
    """The pace of each worker that made steps: their time in percent of that of its peers. Begins
    the next measure. `by_records`: see StepPace."""
    shares: dict[str, list[int]] = {}
    new: list[tuple[Worker, int]] = []
    for worker in fleet.workers.values():
        if worker.engine != EnginePhase.READY:
            continue
        pace = worker.pace
        if isinstance(pace, UnsetType):
            worker.pace = StepPace(
                step=worker.step, prompts=worker.prefill_tokens, records=0 if by_records else -1
            )
            continue
        if pace.steps >= FEWEST_STEPS:
            if usual := _usual_us(fleet, worker, pace):
                pace.share = int(pace.us * 1000 / usual)
                new.append((worker, pace.share))
            pace.steps = pace.us = pace.requests = pace.context = 0
        if pace.share:
            shares.setdefault(worker.steps_like, []).append(pace.share)
    found: dict[str, int] = {}
    for worker, share in new:
        peers = sorted(shares.get(worker.steps_like, ()))
        if not peers:  # all of their time was waits for a CPU
            continue
        found[worker.name] = share * 100 // max(peers[(len(peers) - 1) // 2], 1)
    return found


def _usual_us(fleet: Fleet, worker: Worker, pace: StepPace) -> float:
    """What its decode steps would take in its class; 0: unknown."""
    model = fleet.steptimes.get(worker.steps_like)
    if model is None or model.samples < ENOUGH_SAMPLES:
        return 0.0
    w = model.weights
    return w[0] * pace.steps + w[3] * SCALES[3] * pace.requests + w[4] * SCALES[4] * pace.context
