"""Which workers are slow, by the pace of their decode steps beside that of their peers.

Theory of operation. At each tick the recent time of a decode step (`Worker.decode_us`, with the gap
before it) is divided by what such a step takes in its class by the fitted weights, for its batch and
context. What remains is compared with the lower median of the workers of the class: so a busy host,
or weights that do not fit, slow all of them and make none a suspect. A worker that does not decode
now counts as a peer by its last steps, but is not measured: the requests of a closed loop gather at
the slow one. A worker that is slow at SLOW_TICKS ticks in a row is slow, until a tick at which it is
well below the limit, or none was measured for a while.
"""

from __future__ import annotations

from msgspec import UnsetType

from relume.events.vocabulary.enums import EnginePhase
from relume.policies.health.health_settings import HealthConfig
from relume.policies.state.fleet import Fleet, Worker, WorkerHealth
from relume.policies.state.step_times import ENOUGH, SCALES

SLOW_TICKS = 3
AGAIN_PERCENT = 80
"""A slow worker is slow until its pace is below this part of the limit."""


def measured(fleet: Fleet) -> dict[str, int]:
    """The pace of each worker that decodes: its steps' time in percent of that of its peers."""
    shares: dict[str, dict[str, int]] = {}
    for worker in fleet.workers.values():
        if worker.engine == EnginePhase.READY and worker.decode_us > 0:
            usual = _usual_us(fleet, worker)
            if usual > 0:
                share = int(worker.decode_us * 1000 / usual)
                shares.setdefault(worker.steps_like, {})[worker.name] = share
    found: dict[str, int] = {}
    for of_class in shares.values():
        peers = sorted(of_class.values())
        median = max(peers[(len(peers) - 1) // 2], 1)
        for name, share in of_class.items():
            if fleet.workers[name].decoding > 0:
                found[name] = share * 100 // median
    return found


def _usual_us(fleet: Fleet, worker: Worker) -> float:
    """What its last decode step would take in its class; 0: unknown."""
    model = fleet.steptimes.get(worker.steps_like)
    if model is None or model.samples < ENOUGH:
        return 0.0
    w = model.weights
    return w[0] + w[3] * worker.batch * SCALES[3] + w[4] * worker.sum_context * SCALES[4]


def note(health: WorkerHealth, percent: int, tick: int, config: HealthConfig) -> None:
    """The worker was measured at this tick."""
    count = slow_ticks(health)
    if percent >= config.slow_percent > 0:
        health.pace = count + 1, tick, percent
    elif count and percent * 100 < config.slow_percent * AGAIN_PERCENT:
        health.pace = 0, tick, percent
    elif count >= SLOW_TICKS:
        health.pace = count, tick, percent
    elif count:
        health.pace = 0, tick, percent


def slow_ticks(health: WorkerHealth) -> int:
    """At how many ticks in a row it was slow."""
    return 0 if isinstance(health.pace, UnsetType) else health.pace[0]


def is_slow(health: WorkerHealth, tick: int, config: HealthConfig) -> bool:
    """Whether the worker is slow."""
    pace = health.pace
    if isinstance(pace, UnsetType) or pace[0] < SLOW_TICKS or config.slow_percent == 0:
        return False
    return tick - pace[1] <= config.window_ticks


def in_words(health: WorkerHealth) -> str:
    """The evidence, of a worker that is slow."""
    assert not isinstance(health.pace, UnsetType)
    tenths = (health.pace[2] + 5) // 10
    return f"its decode steps take {tenths // 10}.{tenths % 10} times those of its peers"
