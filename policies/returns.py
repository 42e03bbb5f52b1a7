"""Streams whose clients may come back: who owns a request, and when an orphan expires.

A gateway's death leaves requests without an owner. One that may be resumed waits its grace,
counted in ticks; a client that returns meanwhile gives it a new owner, whoever's log record
of it comes first. At the tick that finds it due it has expired, once and for all, and the
leader ends it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relume.events import vocabulary as v
from relume.policies.state import Fleet, Request


def orphan(fleet: Fleet, request: Request) -> None:
    """The request's gateway is gone."""
    request.orphaned += 1
    if request.grace_ticks and not request.due:
        request.due = max(fleet.tick, 0) + request.grace_ticks


def ended_at_once(request: Request) -> bool:
    """Whether nobody can take the orphan up, so that it ends with its gateway."""
    return not request.grace_ticks


def expire(fleet: Fleet, tick: int) -> None:
    """Mark the orphans whose grace is over at `tick`."""
    for request in fleet.requests.values():
        if request.due and not request.expired and tick >= request.due:
            request.expired = tick


def expired(fleet: Fleet, tick: int) -> list[Request]:
    """The orphans that `tick` found due."""
    return [r for r in fleet.requests.values() if r.expired and r.expired == tick]


def foreign(request: Request | None, stream: str) -> bool:
    """Whether `stream` writes of a request that another replica owns by now."""
    return request is not None and stream not in (request.owner, "fleet")


def _on_client_returned(fleet: Fleet, stream: str, epoch: int, event: v.ClientReturned) -> None:
    request = fleet.requests.get(event.request)
    if request is None or request.expired:
        return
    replica = fleet.replicas.get(stream[2:])
    request.owner = stream
    request.boot = replica.boot if replica is not None else ""
    request.claim = event.claim
    request.orphaned = request.due = 0


HANDLERS: dict[type, Callable[[Fleet, str, int, Any], None]] = {
    v.ClientReturned: _on_client_returned,
}
