"""Which workers are slow, by the pace of their decode steps beside that of their peers.

Theory of operation. At each tick the mean time of a worker's decode steps since it was measured last
(`Worker.decode_steps`), with the gaps before them and without waits for a CPU, is divided by what such
steps take in its class. The longest step is left out: a fault of a page, or a CPU that a hypervisor took
away, is no pace. What remains is compared with the lower median of the workers of the class: so what
slows all of them, or usual times that do not fit, make none a suspect. A worker that makes no steps now
is a peer by its last measure: the requests of a closed loop gather at the slow one. A worker that is slow
in SLOW_TICKS measures in a row is slow, until one in which it is well below the limit, or none came for
a while. A measure just below the limit does not count, and does not end a row: a worker that takes three
times as long measures 2.4 to 3.7 times on a busy host.

The usual time of a class is fitted to its measures:

    us = base + c * decoding requests + d * their context,  all >= 0

Apart from the times that requests are predicted by (`step_times`), since those contain waits, and a slow
worker teaches them: it has most of the requests, so a large batch would seem to take long. Here a measure
well above those of the peers teaches nothing. The first measures differ by chance as much as by their
batches. Without a prior, a batch of seven seemed to take twice as long as one of one for some seconds, and
a worker that takes three times as long was not above the limit. So a class begins with measures that say
that batch and context cost nothing; they are forgotten as others are (Bayesian linear regression with
a Gaussian prior, which is ridge regression).
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from relume.events.vocabulary.enums import EnginePhase
from relume.policies.health.health_settings import HealthConfig
from relume.policies.health.health_state import DecodeSteps, WorkerHealth
from relume.policies.state.fleet import Fleet, StepTime, Worker
from relume.policies.state.step_times import SCALES, solved

VERSION = 15
"""The version of `health` that measures so; see `pace_v14`."""
STEADY_VERSION = 16
"""The one from which on a class begins with a prior, and a measure just below the limit ends no row of
slow ones."""
Slow = tuple[int, int, int]
"""In how many measures in a row a worker was slow, tick of the last, and its time in percent of that
of its peers."""

SLOW_TICKS = 3
FEWEST_STEPS = 2
"""Steps of a measure; with fewer it is left to the next tick."""
TRIMMED_STEPS = 4
"""From so many on, the longest does not count."""
AGAIN_PERCENT = 80
"""A slow worker is slow until its pace is below this part of the limit."""
TEACHES_PERCENT = 80
"""A measure from this part of the limit on teaches nothing."""
ENOUGH_MEASURES = 4
"""Measures from which on the usual time of a class is known."""
FORGETTING = 0.98
"""Forgetting factor, per tick: half of a measure's weight is gone after 34 s."""
PRIOR_MEASURES = 3.0
"""Weight of the prior, in measures. Of 15 first faults of fleets, nine were found after more than 5 s
without it, four with 1, three with 2, two with 3 to 6 (decision 0083)."""
PRIOR_REQUESTS = 4
"""Batch of these measures, of requests with such contexts as the first has. A larger batch is known by
what it took at once: nothing is said of it."""
HUBER = 0.3
"""Huber's threshold: relative errors beyond it count in proportion only."""

Measure = tuple[float, float, float]
"""Mean microseconds of a worker's steps, their mean batch and mean context, both scaled."""


def measured(fleet: Fleet, config: HealthConfig, prior: float) -> dict[str, int]:
    """The pace of each worker that made steps: their time in percent of that of its peers. Begins
    the next measure. `prior`: the weight of the prior of a new class, in measures."""
    shares: dict[str, list[int]] = {}
    new: list[tuple[Worker, Measure, int]] = []
    for worker in fleet.workers.values():
        if worker.engine != EnginePhase.READY:
            continue
        worker.pace = UNSET
        decoded = worker.decode_steps
        if isinstance(decoded, UnsetType):
            worker.decode_steps = DecodeSteps()
            continue
        found = _taken(decoded)
        if share := _share(fleet, worker, decoded.last):
            shares.setdefault(worker.steps_like, []).append(share)
        if found:
            new.append((worker, found, share))
    percents: dict[str, int] = {}
    taught: dict[str, list[Measure]] = {}
    for worker, found, share in new:
        percent = 100
        if share:
            peers = sorted(shares[worker.steps_like])
            percent = percents[worker.name] = share * 100 // peers[(len(peers) - 1) // 2]
        if percent * 100 < (config.slow_percent or percent + 1) * TEACHES_PERCENT:
            taught.setdefault(worker.steps_like, []).append(found)
    for kind, measures in taught.items():
        _learn(fleet, kind, measures, prior)
    return percents


def _taken(decoded: DecodeSteps) -> Measure | None:
    """The measure that these steps amount to, which are counted anew then. None: they are too few, or all
    of their time was waits for a CPU."""
    steps, us = decoded.steps, decoded.us
    if steps < FEWEST_STEPS:
        return None
    if steps >= TRIMMED_STEPS:
        us = (us - decoded.longest_us) * steps // (steps - 1)
    batch, context = decoded.requests * SCALES[3] / steps, decoded.context * SCALES[4] / steps
    decoded.steps = decoded.us = decoded.longest_us = decoded.requests = decoded.context = 0
    if us <= 0:
        return None
    decoded.last = us / steps, batch, context
    return decoded.last


def _share(fleet: Fleet, worker: Worker, measure: Measure) -> int:
    """It, in thousandths of the usual time; 0: there is none, or that is not known."""
    took, batch, context = measure
    if not took or isinstance(fleet.decode_times, UnsetType):
        return 0
    known = fleet.decode_times.get(worker.steps_like)
    if known is None or known.samples < ENOUGH_MEASURES:
        return 0
    w = known.weights
    return max(int(took * 1000 / (w[0] + w[3] * batch + w[4] * context)), 1)


def _learn(fleet: Fleet, kind: str, measures: list[Measure], prior: float) -> None:
    """The usual time of the class follows these measures of one tick: weighted least squares of
    relative errors, as in `step_times`."""
    if isinstance(fleet.decode_times, UnsetType):
        fleet.decode_times = {}
    known = fleet.decode_times.get(kind)
    if known is None:  # what the first measures do not distinguish is the base
        known = fleet.decode_times[kind] = StepTime(
            model="",
            weights=[measures[0][0], 0.0, 0.0, 0.0, 0.0, 0.0],
            products=[0.0] * 21,
            targets=[0.0] * 6,
            grounds="",
        )
        took, batch, context = measures[0]
        few = PRIOR_REQUESTS * SCALES[3]
        known.products[9] = prior * (few / took) ** 2
        known.products[14] = prior * (few * context / batch / took) ** 2
    m = [value * FORGETTING for value in known.products]
    t = [value * FORGETTING for value in known.targets]
    w = known.weights
    for took, batch, context in measures:
        usual = w[0] + w[3] * batch + w[4] * context
        error = abs(took - usual) / max(took, usual)
        weight = min(HUBER / max(error, HUBER), 1.0) / (took * took)
        m[0] += weight
        m[6] += weight * batch
        m[9] += weight * batch * batch
        m[10] += weight * context
        m[13] += weight * context * batch
        m[14] += weight * context * context
        t[0] += weight * took
        t[3] += weight * took * batch
        t[4] += weight * took * context
        known.samples += 1
    known.products, known.targets = m, t
    known.weights = solved(m, t, w)


def note(
    health: WorkerHealth, percent: int, tick: int, config: HealthConfig, *, steady: bool
) -> None:
    """The worker was measured at this tick. `steady`: as STEADY_VERSION says."""
    health.slow = counted(health.slow, 1 if steady else SLOW_TICKS, percent, tick, config)


def counted(
    slow: Slow | UnsetType, lasts_from: int, percent: int, tick: int, config: HealthConfig
) -> Slow | UnsetType:
    """`slow` after another measure. From `lasts_from` slow ones in a row on, only one well below the
    limit ends the row."""
    count = 0 if isinstance(slow, UnsetType) else slow[0]
    if percent >= config.slow_percent > 0:
        return count + 1, tick, percent
    if count >= lasts_from and percent * 100 >= config.slow_percent * AGAIN_PERCENT:
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
