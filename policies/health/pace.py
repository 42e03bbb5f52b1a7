"""Which workers are slow, by the pace of their decode steps beside that of their peers.

Theory of operation. At each tick the mean time of a worker's decode steps since it was measured last
(`Worker.pace`), with the gaps before them and without waits for a CPU, is divided by what such steps
take in its class by the fitted weights, for their batches and contexts. What remains is compared with
the lower median of the workers of the class: so a busy host, or weights that do not fit, slow all of
them and make none a suspect. A worker that makes no steps now is a peer by its last measure: the
requests of a closed loop gather at the slow one. A worker that is slow in SLOW_TICKS measures in a row
is slow, until one in which it is well below the limit, or none came for a while.
"""

from __future__ import annotations

from msgspec import UnsetType

from relume.events.vocabulary.enums import EnginePhase
from relume.policies.health.health_settings import HealthConfig
from relume.policies.health.health_state import StepPace, WorkerHealth
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.step_times import ENOUGH_SAMPLES, SCALES

Slow = tuple[int, int, int]
"""In how many measures in a row a worker was slow, tick of the last, and its time in percent of that
of its peers."""

SLOW_TICKS = 3
FEWEST_STEPS = 3
"""Steps of a measure; with fewer it is left to the next tick."""
AGAIN_PERCENT = 80
"""A slow worker is slow until its pace is below this part of the limit."""


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


def note(health: WorkerHealth, percent: int, tick: int, config: HealthConfig) -> None:
    """The worker was measured at this tick."""
    health.slow = counted(health.slow, SLOW_TICKS, percent, tick, config)


def counted(
    slow: Slow | UnsetType, most: int, percent: int, tick: int, config: HealthConfig
) -> Slow | UnsetType:
    """`slow` after another measure. From `most` slow ones in a row on, only one well below the limit
    ends it."""
    count = 0 if isinstance(slow, UnsetType) else slow[0]
    if percent >= config.slow_percent > 0:
        return count + 1, tick, percent
    if count >= most and percent * 100 >= config.slow_percent * AGAIN_PERCENT:
        return count, tick, percent
    return (0, tick, percent) if count else slow


def is_slow(health: WorkerHealth, tick: int, config: HealthConfig) -> bool:
    """Whether the worker is slow."""
    slow = health.slow
    if isinstance(slow, UnsetType) or slow[0] < SLOW_TICKS or config.slow_percent == 0:
        return False
    return tick - slow[1] <= config.window_ticks


def in_words(health: WorkerHealth) -> str:
    """The evidence, of a worker that is slow."""
    assert not isinstance(health.slow, UnsetType)
    return f"its decode steps take {times(health.slow[2])} times those of its peers"


def times(percent: int) -> str:
    """A percentage as a factor."""
    tenths = (percent + 5) // 10
    return f"{tenths // 10}.{tenths % 10}"
