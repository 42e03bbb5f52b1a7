"""Whether a request that is sent now would only lengthen an engine's own queue.

A worker with many requests that it does not decode yet gains nothing from one more: the engine
takes them in its own order, without regard to tenants, and refuses none. So there is a bound on
these (whatever keeps them from decoding: prompts ahead, no free sequence, no KV blocks) and, if
wanted, one on how long the prompts it has will take. Both must be kept by one worker. What this
replica sent and the fold does not have yet counts, so a burst limits itself; and where there are n
replicas, n times: the others may have sent as much meanwhile, so that together they stay within the
bound.

Requests of tier batch may go to spares, so for them the spares count too. While the other workers
are saturated, a spare that is not takes the next request of that tier, before higher ones that
wait: to those it gives nothing. If none of that tier waits, an arrival is the next one. A policy that does
not go by these bounds (`relume.policies.routing.selection`) may send it elsewhere all the same.
"""

from __future__ import annotations

from relume.events.vocabulary.enums import QueueCause
from relume.policies.admission.admission_queue import AdmissionQueue, rank_of
from relume.policies.admission.admission_settings import WaitingConfig
from relume.policies.admission.fair_queue import Entry
from relume.policies.routing import estimate_index
from relume.policies.routing.eligibility import (
    BATCH,
    excluded_at,
    queue_limit,
    takes_spares,
)
from relume.policies.routing.estimate_index import EstimateIndex
from relume.policies.state.overlay.view import View

FREE = ""
SATURATED, NO_WORKER, BEHIND = QueueCause.SATURATED, QueueCause.NO_WORKER, QueueCause.BEHIND
GLANCES = 4
"""Number of workers that are checked quickly before all of them are considered."""
UNKNOWN = -1
BATCH_RANK = rank_of(BATCH)


def saturation(
    view: View,
    model: str,
    config: WaitingConfig,
    now_us: int,
    spares: bool = False,
    glance: bool = True,
) -> tuple[str, int]:
    """FREE, SATURATED or NO_WORKER for arrivals at `now_us` of the replica's clock; and when that
    may end without a new report (UNKNOWN: with the next report). `spares`: for requests that a spare
    takes. `glance`: it is probably free."""
    if glance and not config.ahead_ms and _glance(view, model, config):
        return FREE, UNKNOWN
    of = _board(view, model, spares)
    if not of.open:
        return NO_WORKER, UNKNOWN
    limit = queue_limit(view, config)
    soonest_us, _ = of.soonest(limit)
    if soonest_us < 0:
        return SATURATED, UNKNOWN
    if limit.late(soonest_us, now_us):
        return SATURATED, soonest_us - limit.ahead_us
    return FREE, UNKNOWN


def on_arrival(
    view: View, queue: AdmissionQueue, model: str, tier: str, config: WaitingConfig, now_us: int
) -> tuple[str, int]:
    """Why a request of `tier` that arrives waits (FREE: it does not), and when that may change as
    `saturation` says it."""
    spares = takes_spares(view, tier)
    if not queue.waiting(model):
        return saturation(view, model, config, now_us, spares)
    again_us = UNKNOWN
    if spares and not queue.waiting(model, BATCH_RANK):
        others, _ = saturation(view, model, config, now_us, glance=False)
        if others == SATURATED:
            spare, again_us = saturation(view, model, config, now_us, spares=True, glance=False)
            if spare == FREE:
                return FREE, UNKNOWN
    return BEHIND if open_workers(view, model) else NO_WORKER, again_us


def call_next(
    view: View,
    queue: AdmissionQueue,
    model: str,
    config: WaitingConfig,
    now_us: int,
    overload: bool = False,
) -> tuple[Entry | None, int]:
    """The waiting request that a worker has room for at `now_us` (None: there is none), and when that
    may change as `saturation` says it. `overload`: a saturated worker has room too."""
    cause, again_us = saturation(view, model, config, now_us, glance=False)
    if cause == NO_WORKER:
        return None, UNKNOWN
    if cause == SATURATED:
        if takes_spares(view, BATCH) and queue.waiting(model, BATCH_RANK):
            spare, again_us = saturation(view, model, config, now_us, spares=True, glance=False)
            if spare == FREE:
                return queue.next(model, now_us, config, BATCH_RANK), UNKNOWN
        if not overload:
            return None, again_us
    return queue.next(model, now_us, config), UNKNOWN


def open_workers(view: View, model: str) -> int:
    """How many workers are open to requests for `model`, busy or not. Spares are, or another is."""
    return _board(view, model).open


def _board(view: View, model: str, spares: bool = False) -> EstimateIndex:
    return estimate_index.of(view, model, estimate_index.by_queue, spares)


def _glance(view: View, model: str, config: WaitingConfig) -> bool:
    """Whether one of a few workers takes a request: at light load that is all it costs."""
    limit = queue_limit(view, config)
    for number, worker in enumerate(view.fleet.workers.values()):
        if number == GLANCES:
            break
        requests = view.load(worker)[1]
        if not limit.reached(requests - worker.decoding, requests - len(worker.attempts)):
            if not excluded_at(view, worker, model):
                return True
    return False
