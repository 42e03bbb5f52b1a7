"""Whether a request that is sent now would only lengthen an engine's own queue.

A worker that has many requests it does not decode yet has no use for one more: the engine takes
them in its own order, knows no tenant and refuses nobody. So there is a bound on these (whatever
keeps them from decoding: prompts ahead, no free sequence, no KV blocks) and, if wanted, one on
how long the prompts it has will take. Both must be kept by one worker. What this replica sent and
nobody has confirmed counts, so a burst sees its own weight.
"""

from __future__ import annotations

from policies import board, routing
from policies.view import View
from policies.waiting_settings import WaitingConfig

FREE, SATURATED, NO_WORKER = "", "saturated", "no worker"
GLANCES = 4
"""So many workers are glanced at before all of them are considered."""
UNKNOWN = -1


def saturation(view: View, model: str, config: WaitingConfig, now_us: int) -> tuple[str, int]:
    """FREE, SATURATED or NO_WORKER for arrivals at `now_us` of the replica's clock; and when it may
    be over by itself (UNKNOWN: when something is heard)."""
    if not config.ahead_ms and _glance(view, model, config):
        return FREE, UNKNOWN
    of = board.of(view, model, routing.shut(model), board.by_queue)
    if not of.open:
        return NO_WORKER, UNKNOWN
    soonest_us = of.soonest_us(config.queued or board.LATE)
    if soonest_us < 0:
        return SATURATED, UNKNOWN
    allowed_us = now_us + config.ahead_ms * 1000
    if config.ahead_ms and soonest_us > allowed_us:
        return SATURATED, soonest_us - config.ahead_ms * 1000
    return FREE, UNKNOWN


def _glance(view: View, model: str, config: WaitingConfig) -> bool:
    """Whether one of a few workers takes a request: at light load that is all it costs."""
    workers = view.fleet.workers
    shut = routing.shut(model)
    for number, worker in enumerate(workers.values()):
        if number == GLANCES:
            break
        if not config.queued or view.load(worker)[1] - worker.decoding < config.queued:
            distrusted = view.suspect(worker.name) == worker.incarnation
            if not shut(worker, distrusted):
                return True
    return False
