"""Requests of which only their engine told: who ends them (I1).

A decision is acted on first and written with the next transaction, so a gateway that is
killed may leave requests without a word of its own. Their engines got the dispatch with
them and tell it. Mostly the gateway's word is just behind; it comes no more when the next
life of that replica has begun (what a life left in its spool stands ahead of that), and is
waited for a while when the replica is lost, because one that lives, and is only cut from
the log, lands its own word later. Then the leader ends the request like other orphans.
"""

from __future__ import annotations

from relume.events import codec
from relume.events import vocabulary as v
from relume.events.errors import LogError
from relume.policies.state import Fleet, Replica, Unheard

WAIT_TICKS = 60
"""A request of a lost replica is ended so long after its engine told of it."""

KEPT = 4096
"""At most so many are remembered; the oldest go first."""


def queued(fleet: Fleet, change: v.RequestQueued) -> None:
    """An engine has the attempt."""
    if not change.dispatch or change.request in fleet.requests or change.request in fleet.unheard:
        return
    try:
        event = codec.decode(change.dispatch)
    except LogError:
        return
    # The arrival stands right ahead of the first decision. Later attempts tell nothing new.
    if type(event) is not v.RouteDecided or event.cause != "arrival":
        return
    name, boot, _ = ("", "", *event.decision.rsplit(".", 2))[-3:]
    replica = fleet.replicas.get(name)
    if replica is None or event.request != change.request:
        return
    head = fleet.streams.get(f"r.{name}")
    written = replica.began if boot != replica.boot else head.position if head else 0
    if written >= event.basis.position:
        return  # it arrived, and has ended since
    fleet.unheard[change.request] = Unheard(name, boot, change.attempt, max(fleet.tick, 0))
    if len(fleet.unheard) > KEPT:
        del fleet.unheard[next(iter(fleet.unheard))]


def arrived(fleet: Fleet, request: str) -> bool:
    """Its gateway's word came. False: the leader had ended it before."""
    told = fleet.unheard.pop(request, None)
    return told is None or not told.ended


def ended(fleet: Fleet, request: str) -> None:
    """Its terminal event. It is remembered as long as its arrival may come."""
    told = fleet.unheard.get(request)
    if told is not None:
        told.ended = True
        if _over(fleet, told):
            del fleet.unheard[request]


def began(fleet: Fleet, stream: str, replica: Replica, boot: str) -> None:
    """Life `boot` of the replica begins: no arrival of an earlier one comes any more."""
    head = fleet.streams.get(stream)
    # The head is that of the segment before: this one may begin with what the last life left.
    replica.began = max(head.position if head is not None else 0, replica.decided)
    replica.decided = 0
    for request, told in list(fleet.unheard.items()):
        if told.replica == replica.name and told.boot != boot and told.ended:
            del fleet.unheard[request]


def expire(fleet: Fleet, tick: int) -> None:
    """Mark those whose gateway will not tell of them."""
    for told in fleet.unheard.values():
        if told.due or told.ended:
            continue
        lost = not fleet.replicas[told.replica].alive
        if _over(fleet, told) or (lost and tick - told.tick >= WAIT_TICKS):
            told.due = tick


def expired(fleet: Fleet, tick: int = 0) -> list[tuple[str, Unheard]]:
    """Those that `tick` found due; 0: all that are due and not ended."""
    return [
        (request, told)
        for request, told in fleet.unheard.items()
        if told.due and not told.ended and tick in (0, told.due)
    ]


def _over(fleet: Fleet, told: Unheard) -> bool:
    return fleet.replicas[told.replica].boot != told.boot
