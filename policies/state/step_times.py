"""The cost of an engine step, fitted for each class of workers from their recorded steps.

    us = base + a * prompt tokens + b * (chunk x context before it) + c * decoding requests
         + d * their context + e, if there are prompt tokens,  all weights >= 0

What a step takes longer for having prompts at all (e) is what an engine loses by leaving the
beaten path of decoding: a new batch to lay out, no captured graph.

A class is a model on one build and hardware; another build or hardware is another class, which
begins with the weights of the newest class of its model, else with defaults of the size that is
published for one GPU (8B parameters, half precision). Weights solve normal equations whose old
parts fade. Errors are relative, so short and long steps count alike, and what lies far beyond
the usual error counts less (Huber). Each worker's slowness beside its class is a factor of its
own.

A step takes its duration and the gap before it, in which the engine did nothing for requests that
waited. An engine that idles longer than it computes is slow for reasons of its own: each such step
teaches the worker's slowness, and only those in the sample teach its class.

A fold must be cheap: after the first steps only a sample is used. Scalar float64 in fixed order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from operator import itemgetter

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EnginePhase
from relume.policies.state import dirty_set
from relume.policies.state.fleet import Fleet, Request, StepTime, Worker

SCALES = (1.0, 1 / 256, 1 / (1 << 20), 1 / 16, 1 / 4096, 1.0)
"""Of the features: one, prompt tokens, chunk x context, decoding requests, their context, any
prompt."""

DEFAULTS = (6000.0, 40.0 * 256, 180.0, 15.0 * 16, 0.05 * 4096, 500.0)
"""Microseconds a scaled feature while no step of the model was seen."""

PUBLISHED_CHANGE = 1 / 8
"""Weights are published if they change a step's predicted length by this much."""

FIRST_STEPS = 192
"""Number of first steps of an engine that are all used; then one in PROMPT_EACH of those that
compute prompts and one in DECODE_EACH of the others."""
PROMPT_EACH = 8
DECODE_EACH = 64

ENOUGH_SAMPLES = 24
"""Samples from which on a class goes by its own."""

FORGETTING = 0.99
"""Forgetting factor: what a sample leaves of the weight of those before it."""
RIDGE = 0.02
"""Ridge damping: each equation by this part of its own diagonal, and by `LEAST_RIDGE`."""
LEAST_RIDGE = 1e-16
PRIOR_SAMPLES = 1e-4
"""What the weights a class begins with count, in samples; they are forgotten like these."""
HUBER = 3.0
"""Huber's threshold: errors beyond this multiple of the usual one count in proportion only."""
SLOWEST = 16.0
MOST_DRIFT = 0.02
"""By how much, relatively, a step changes a worker's slowness at most."""
IDLE_US = 50_000
LONGEST = 4.0
"""A step whose gap is longer than itself counts once for each `IDLE_US` of both, up to `LONGEST`:
so that slowness is known after two to three seconds, however few steps they have."""

OVERHEAD_US = 2000
"""What a time to first token takes beyond its steps counts as so much off at most, and an eighth
of what is known: requests that met a step of other length than usual are not to teach it."""
QUIET_TICKS = 5
"""A worker from which nothing came for longer has no requests: its overhead fades."""
FADES = 8
"""Part of it, above the usual one, that fades per tick: half of it in five ticks."""
_DIAGONAL = (0, 2, 5, 9, 14, 20)


def ready(fleet: Fleet, worker: Worker, hardware: str) -> None:
    """An engine of this class serves."""
    worker.eager = FIRST_STEPS
    kind = f"{worker.model}/{worker.build}/{hardware}"
    if kind != worker.steps_like:
        worker.steps_like = kind
        worker.slowness = 1.0
    if kind not in fleet.steptimes:
        weights, grounds = list(DEFAULTS), "default"
        for found in fleet.steptimes.values():
            if found.model == worker.model and found.samples >= ENOUGH_SAMPLES:
                weights, grounds = list(found.weights), "class"
        fleet.steptimes[kind] = _fresh(worker.model, weights, grounds)


def _fresh(model: str, weights: list[float], grounds: str) -> StepTime:
    products = [0.0] * 21
    targets = [0.0] * 6
    for i, weight in enumerate(weights):  # one sample's worth of standing, each for itself
        sure = PRIOR_SAMPLES / max(weight * weight, 1.0)
        products[_DIAGONAL[i]] = sure
        targets[i] = sure * weight
    return StepTime(
        model=model,
        weights=weights,
        products=products,
        targets=targets,
        grounds=grounds,
        routing_weights=weights,
    )


def learn(fleet: Fleet, worker: Worker, event: v.EngineStep) -> None:
    """Use a step, if it is in the sample or the gap before it is longer than itself. Callers
    exclude merged and absurd records."""
    prompt = event.prefill_tokens
    took = event.duration_us + event.gap_us
    idles = event.gap_us > event.duration_us
    sampled = True
    if worker.eager:
        worker.eager -= 1
    elif event.step % (PROMPT_EACH if prompt else DECODE_EACH):
        if not idles:
            return
        sampled = False
    model = fleet.steptimes.get(worker.steps_like)
    if model is None:
        return
    work = 0
    if prompt:
        for change in event.changes:
            if type(change) is v.PrefillChunkDone:
                work += change.tokens * max(change.computed - change.tokens, 0)
                work += change.tokens * change.tokens // 2
    _, a, b, c, d, _ = SCALES
    x = prompt * a, work * b, event.batch * c, event.sum_context * d, 1.0 if prompt else 0.0
    most = MOST_DRIFT * min(max(took / IDLE_US, 1.0), LONGEST) if idles else MOST_DRIFT
    if sampled:
        _take(model, worker, x, took, most)
    elif model.samples > ENOUGH_SAMPLES:
        _drift(worker, _predicted(model.weights, x), took, most)


Features = tuple[float, float, float, float, float]
"""Scaled; the first of all, one, is left out."""


def _take(model: StepTime, worker: Worker, x: Features, took: float, most_drift: float) -> None:
    """One sample of the weighted least squares. Written out: this is where the fold's time goes.
    `m` is the lower triangle of the products, row by row."""
    # 1. The relative error of what the weights say.
    x1, x2, x3, x4, x5 = x
    w0, w1, w2, w3, w4, w5 = model.weights
    expected = w0 + w1 * x1 + w2 * x2 + w3 * x3 + w4 * x4 + w5 * x5
    error = (took - expected) / (took if took > expected else expected)  # in (-1, 1)
    size = error if error >= 0 else -error
    # 2. What the sample counts (Huber), and the usual error.
    most = HUBER * model.spread
    sure = 1.0 if size <= most else most / size
    spread = model.spread + ((size if size < most else most) - model.spread) / 32
    model.spread = spread if spread > 0.01 else 0.01
    model.samples += 1
    weight = sure / (took * min(max(expected, took / 4), took * 4))
    # 3. The normal equations: what they say is forgotten a little, and the sample added.
    b1, b2, b3, b4 = x1 * weight, x2 * weight, x3 * weight, x4 * weight
    m = [value * FORGETTING for value in model.products]
    m[0] += weight
    m[1] += b1
    m[2] += b1 * x1
    m[3] += b2
    m[4] += b2 * x1
    m[5] += b2 * x2
    m[6] += b3
    m[7] += b3 * x1
    m[8] += b3 * x2
    m[9] += b3 * x3
    m[10] += b4
    m[11] += b4 * x1
    m[12] += b4 * x2
    m[13] += b4 * x3
    m[14] += b4 * x4
    if x5:  # which is 1
        m[15] += weight
        m[16] += b1
        m[17] += b2
        m[18] += b3
        m[19] += b4
        m[20] += weight
    model.products = m
    t0, t1, t2, t3, t4, t5 = model.targets
    t0 = t0 * FORGETTING + weight * took
    t1 = t1 * FORGETTING + b1 * took
    t2 = t2 * FORGETTING + b2 * took
    t3 = t3 * FORGETTING + b3 * took
    t4 = t4 * FORGETTING + b4 * took
    t5 = t5 * FORGETTING + x5 * weight * took
    model.targets = [t0, t1, t2, t3, t4, t5]
    # 4. The weights, and what is published of them.
    model.weights = solved(m, model.targets, model.weights)
    _tell(model, x)
    # 5. The worker's own slowness, once its class is known.
    if model.samples == ENOUGH_SAMPLES:
        model.grounds = "measured"
    elif model.samples > ENOUGH_SAMPLES:
        _drift(worker, expected, took, most_drift)


def _drift(worker: Worker, expected: float, took: float, most: float) -> None:
    """The worker's slowness follows the median: what lies far off counts as `most` off."""
    slow = expected * worker.slowness
    off = (took - slow) / (took if took > slow else slow)
    off = most if off > most else -most if off < -most else off
    worker.slowness = min(max(worker.slowness * (1 + off), 1 / SLOWEST), SLOWEST)


def _predicted(weights: list[float], x: Features) -> float:
    """Microseconds of a step by `weights`."""
    x1, x2, x3, x4, x5 = x
    w0, w1, w2, w3, w4, w5 = weights
    return w0 + w1 * x1 + w2 * x2 + w3 * x3 + w4 * x4 + w5 * x5


def solved(m: list[float], targets: list[float], old: list[float]) -> list[float]:
    """Weights that solve the equations, damped towards `old` so that what steps do not distinguish
    stays where it was. One that would be negative is 0 and the others are solved again."""
    found = _all_solved(m, targets, old)
    columns: tuple[int, ...] = (0, 1, 2, 3, 4, 5)
    while negative := [i for i in columns if found[i] < 0.0]:
        for i in negative:
            found[i] = 0.0
        columns = tuple([i for i in columns if i not in negative])
        _solve(_equations(columns, m, targets, old), columns, found)
    found[0] = max(found[0], 1.0)
    return found


@cache
def _rows(columns: tuple[int, ...]) -> tuple[Callable[[list[float]], tuple[float, ...]], ...]:
    """What takes each row of the weights `kept` out of the products, and a place for its right
    side."""
    found = []
    for i in columns:
        places = [max(i, j) * (max(i, j) + 1) // 2 + min(i, j) for j in columns]
        found.append(itemgetter(*places, 0))
    return tuple(found)


def _equations(
    columns: tuple[int, ...], m: list[float], targets: list[float], old: list[float]
) -> list[list[float]]:
    """Those of the weights `kept`, each with its right side last."""
    rows = []
    for place, take in enumerate(_rows(columns)):
        row, i = list(take(m)), columns[place]
        damp = row[place] * RIDGE + LEAST_RIDGE
        row[place] += damp
        row[-1] = targets[i] + damp * old[i]
        rows.append(row)
    return rows


def _solve(rows: list[list[float]], columns: tuple[int, ...], found: list[float]) -> None:
    """Gauss's elimination. Both triangles are computed: their roundings differ, and weights stand
    in logs."""
    size = len(columns)
    for i in range(size):
        top = rows[i]
        pivot = top[i]
        for row in rows[i + 1 :]:
            if factor := row[i] / pivot:
                for j in range(i + 1, size + 1):  # what is left of the pivot is read no more
                    row[j] -= factor * top[j]
    for i in range(size - 1, -1, -1):
        row = rows[i]
        value = row[size]
        for j in range(i + 1, size):
            value -= row[j] * found[columns[j]]
        found[columns[i]] = value / row[i]


def _all_solved(m: list[float], targets: list[float], old: list[float]) -> list[float]:
    """The same with none at 0, written out: of a symmetric matrix the lower triangle is enough."""
    m0, m1, m2, m3, m4, m5, m6, m7, m8, m9, m10 = m[:11]
    m11, m12, m13, m14, m15, m16, m17, m18, m19, m20 = m[11:]
    t0, t1, t2, t3, t4, t5 = targets
    o0, o1, o2, o3, o4, o5 = old
    damp = m0 * RIDGE + LEAST_RIDGE
    m0, t0 = m0 + damp, t0 + damp * o0
    damp = m2 * RIDGE + LEAST_RIDGE
    m2, t1 = m2 + damp, t1 + damp * o1
    damp = m5 * RIDGE + LEAST_RIDGE
    m5, t2 = m5 + damp, t2 + damp * o2
    damp = m9 * RIDGE + LEAST_RIDGE
    m9, t3 = m9 + damp, t3 + damp * o3
    damp = m14 * RIDGE + LEAST_RIDGE
    m14, t4 = m14 + damp, t4 + damp * o4
    damp = m20 * RIDGE + LEAST_RIDGE
    m20, t5 = m20 + damp, t5 + damp * o5
    by = m1 / m0
    m2, m4, m7 = m2 - by * m1, m4 - by * m3, m7 - by * m6
    m11, m16, t1 = m11 - by * m10, m16 - by * m15, t1 - by * t0
    by = m3 / m0
    m5, m8, m12 = m5 - by * m3, m8 - by * m6, m12 - by * m10
    m17, t2 = m17 - by * m15, t2 - by * t0
    by = m6 / m0
    m9, m13, m18 = m9 - by * m6, m13 - by * m10, m18 - by * m15
    t3 = t3 - by * t0
    by = m10 / m0
    m14, m19, t4 = m14 - by * m10, m19 - by * m15, t4 - by * t0
    by = m15 / m0
    m20, t5 = m20 - by * m15, t5 - by * t0
    by = m4 / m2
    m5, m8, m12 = m5 - by * m4, m8 - by * m7, m12 - by * m11
    m17, t2 = m17 - by * m16, t2 - by * t1
    by = m7 / m2
    m9, m13, m18 = m9 - by * m7, m13 - by * m11, m18 - by * m16
    t3 = t3 - by * t1
    by = m11 / m2
    m14, m19, t4 = m14 - by * m11, m19 - by * m16, t4 - by * t1
    by = m16 / m2
    m20, t5 = m20 - by * m16, t5 - by * t1
    by = m8 / m5
    m9, m13, m18 = m9 - by * m8, m13 - by * m12, m18 - by * m17
    t3 = t3 - by * t2
    by = m12 / m5
    m14, m19, t4 = m14 - by * m12, m19 - by * m17, t4 - by * t2
    by = m17 / m5
    m20, t5 = m20 - by * m17, t5 - by * t2
    by = m13 / m9
    m14, m19, t4 = m14 - by * m13, m19 - by * m18, t4 - by * t3
    by = m18 / m9
    m20, t5 = m20 - by * m18, t5 - by * t3
    by = m19 / m14
    m20, t5 = m20 - by * m19, t5 - by * t4
    w5 = t5 / m20
    w4 = (t4 - m19 * w5) / m14
    w3 = (t3 - m13 * w4 - m18 * w5) / m9
    w2 = (t2 - m8 * w3 - m12 * w4 - m17 * w5) / m5
    w1 = (t1 - m4 * w2 - m7 * w3 - m11 * w4 - m16 * w5) / m2
    w0 = (t0 - m1 * w1 - m3 * w2 - m6 * w3 - m10 * w4 - m15 * w5) / m0
    return [w0, w1, w2, w3, w4, w5]


def _tell(model: StepTime, x: Features) -> None:
    """Publish the weights, if they change this step's predicted length by much."""
    old, new = _predicted(model.routing_weights, x), _predicted(model.weights, x)
    if abs(new - old) > old * PUBLISHED_CHANGE:
        model.routing_weights = model.weights


def dispatched(request: Request, worker: Worker, ttft_us: int) -> None:
    """A first attempt goes to `worker`, with this prediction: its prediction of steps is stored."""
    request.predicted_us = max(ttft_us - worker.overhead_us, 0) if ttft_us >= 0 else -1


def first_token(fleet: Fleet, request: Request, took_us: int) -> None:
    """A request is over whose first token came after `took_us` (-1: none did): what its worker
    takes beyond its steps follows the median of the difference to what these were predicted to
    take. That requests end much later than they were predicted does no harm so."""
    worker = fleet.workers.get(request.worker)
    if worker is None or request.predicted_us < 0 or took_us < 0:
        return
    most = OVERHEAD_US + worker.overhead_us // 8
    error = min(max(took_us - request.predicted_us - worker.overhead_us, -most), most)
    worker.overhead_us = max(worker.overhead_us + error // 4, 0)


def fade_overheads(fleet: Fleet, tick: int) -> None:
    """Only requests correct what a worker takes beyond its steps, and a high one keeps them away. So
    on a worker without requests it falls towards the lower median of the workers of its model."""
    usual: dict[str, int] = {}
    for worker in fleet.workers.values():
        if not worker.overhead_us or worker.attempts or tick - worker.heard_tick <= QUIET_TICKS:
            continue
        if (model := worker.model) not in usual:
            usual[model] = _usual_overhead(fleet, model)
        if (surplus := worker.overhead_us - usual[model]) > 0:
            worker.overhead_us -= -(-surplus // FADES)
            dirty_set.changed(fleet, worker.name)


def _usual_overhead(fleet: Fleet, model: str) -> int:
    serving = (w for w in fleet.workers.values() if w.present and w.engine == EnginePhase.READY)
    found = sorted(worker.overhead_us for worker in serving if worker.model == model)
    return found[(len(found) - 1) // 2] if found else 0


class Costs:
    """What steps of one worker cost: microseconds of a step of nothing, and of each token of
    prompt, token x context, decoding request and token of context; `mixed`: of any prompt."""

    __slots__ = ("base", "context", "grounds", "mixed", "prompt", "request", "spread", "work")

    def __init__(self, fleet: Fleet, worker: Worker) -> None:
        model = fleet.steptimes.get(worker.steps_like)
        weights = model.weights if model is not None else DEFAULTS
        by = worker.slowness
        self.base = max(weights[0] * by, 1.0)
        self.prompt = weights[1] * SCALES[1] * by
        self.work = weights[2] * SCALES[2] * by
        self.request = weights[3] * SCALES[3] * by
        self.context = weights[4] * SCALES[4] * by
        self.mixed = weights[5] * SCALES[5] * by
        self.spread = model.spread if model is not None else 1.0
        """Mean relative error."""
        self.grounds = model.grounds if model is not None else "default"
        """measured; class: as another build or hardware of the model; default."""
