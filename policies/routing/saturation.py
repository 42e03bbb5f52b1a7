"""Whether a request that is sent now would only lengthen an engine's own queue.

A worker with many requests that it does not decode yet gains nothing from one more: the engine
takes them in its own order, without regard to tenants, and refuses none. So there is a bound on
these (whatever keeps them from decoding: prompts ahead, no free sequence, no KV blocks) and, if
wanted, one on how long the prompts it has will take. Both must be kept by one worker. What this
replica sent and the fold does not have yet counts, so a burst limits itself; and where there are n
replicas, n times: the others may have sent as much meanwhile, so that together they stay within the
bound.
"""

from __future__ import annotations

from relume.events.vocabulary.enums import QueueCause
from relume.policies.admission.admission_settings import WaitingConfig
from relume.policies.routing import estimate_index
from relume.policies.routing.eligibility import excluded_at, queue_limit
from relume.policies.routing.estimate_index import EstimateIndex
from relume.policies.state.overlay.view import View

FREE = ""
SATURATED, NO_WORKER, BEHIND = QueueCause.SATURATED, QueueCause.NO_WORKER, QueueCause.BEHIND
GLANCES = 4
"""Number of workers that are checked quickly before all of them are considered."""
UNKNOWN = -1


def saturation(
    view: View, model: str, config: WaitingConfig, now_us: int, glance: bool = True
) -> tuple[str, int]:
    """FREE, SATURATED or NO_WORKER for arrivals at `now_us` of the replica's clock; and when that
    may end without a new report (UNKNOWN: with the next report). `glance`: it is probably free."""
    if glance and not config.ahead_ms and _glance(view, model, config):
        return FREE, UNKNOWN
    of = _board(view, model)
    if not of.open:
        return NO_WORKER, UNKNOWN
    limit = queue_limit(view, config)
    soonest_us, _ = of.soonest(limit)
    if soonest_us < 0:
        return SATURATED, UNKNOWN
    if limit.late(soonest_us, now_us):
        return SATURATED, soonest_us - limit.ahead_us
    return FREE, UNKNOWN


def held_back(cause: str, waiting: bool) -> str:
    """Why an arrival is: by what `saturation` says, and because others of its model wait."""
    return BEHIND if waiting and cause != NO_WORKER else cause


def open_workers(view: View, model: str) -> int:
    """How many workers are open to requests for `model`, busy or not."""
    return _board(view, model).open


def _board(view: View, model: str) -> EstimateIndex:
    return estimate_index.of(view, model, estimate_index.by_queue)


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
