"""Whether a request that is sent now would only lengthen an engine's own queue.

A worker that has many requests it does not decode yet has no use for one more: the engine takes
them in its own order, knows no tenant and refuses nobody. So there is a bound on these (whatever
keeps them from decoding: prompts ahead, no free sequence, no KV blocks) and, if wanted, one on
how long the prompts it has will take. Both must be kept by one worker. What this replica sent and
the fold does not have yet counts, so a burst sees its own weight; and where there are n replicas, n
times: the others may have sent as much meanwhile, so that together they stay within the bound.
"""

from __future__ import annotations

from relume.policies import board, routing
from relume.policies.board import Board
from relume.policies.fullness import bound
from relume.policies.view import View
from relume.policies.waiting_settings import WaitingConfig

FREE, SATURATED, NO_WORKER, BEHIND = "", "saturated", "no worker", "behind"
GLANCES = 4
"""So many workers are glanced at before all of them are considered."""
UNKNOWN = -1


def saturation(
    view: View, model: str, config: WaitingConfig, now_us: int, glance: bool = True
) -> tuple[str, int]:
    """FREE, SATURATED or NO_WORKER for arrivals at `now_us` of the replica's clock; and when it may
    be over by itself (UNKNOWN: when something is heard). `glance`: it is probably free."""
    if glance and not config.ahead_ms and _glance(view, model, config):
        return FREE, UNKNOWN
    of = _board(view, model)
    if not of.open:
        return NO_WORKER, UNKNOWN
    limit = bound(view, config)
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


def _board(view: View, model: str) -> Board:
    return board.of(view, model, routing.shut(model), board.by_queue)


def _glance(view: View, model: str, config: WaitingConfig) -> bool:
    """Whether one of a few workers takes a request: at light load that is all it costs."""
    shut, limit = routing.shut(model), bound(view, config)
    for number, worker in enumerate(view.fleet.workers.values()):
        if number == GLANCES:
            break
        requests = view.load(worker)[1]
        if not limit.full(requests - worker.decoding, requests - len(worker.attempts)):
            if not shut(worker, view.suspect(worker.name) == worker.incarnation):
                return True
    return False
