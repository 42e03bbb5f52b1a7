"""Requests that only their engine reported, and their end (I1).

A decision is acted on first and written with the next transaction, so a killed gateway may leave
requests without a record of its own. Their engines got the dispatch with them and report it.
Usually the gateway's record follows shortly. It never comes if the next life of that replica has
begun (records from the spool of a life come before that). If the replica is lost, the fold waits
for it for a while, because one that lives, and is only cut from the log, lands its own word later.
Then the leader ends the request like other orphans. An engine may also report a request of a life
that has not begun in the log yet: its first record is on its way, too. Before version 2 of `leader` the
fold took such a life for one that is over.
"""

from __future__ import annotations

from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.log.errors import LogError
from relume.events.vocabulary.enums import RouteCause
from relume.policies.agreement import LEADER_VERSION, has_version
from relume.policies.state.fleet import Fleet, Replica, Unheard
from relume.policies.state.lifecycles.request_life import Input, State, follows

WAIT_TICKS = 60
"""Time after its engine's report at which a request of a lost replica is ended."""

MAX_ENTRIES = 4096
"""Maximum number of stored requests; the oldest are dropped first."""


def queued(fleet: Fleet, change: v.RequestQueued) -> None:
    """An engine has the attempt."""
    if not change.dispatch or follows(fleet, change.request, Input.QUEUED) is None:
        return
    try:
        event = codec.decode(change.dispatch)
    except LogError:
        return
    # The arrival comes directly before the first decision. Later attempts add nothing.
    if type(event) is not v.RouteDecided or event.cause != RouteCause.ARRIVAL:
        return
    name, boot, _ = ("", "", *event.decision.rsplit(".", 2))[-3:]
    replica = fleet.replicas.get(name)
    if replica is None or event.request != change.request:
        return
    head = fleet.streams.get(f"r.{name}")
    written = replica.began if boot != replica.boot else head.position if head else 0
    if written >= event.basis.position:
        return  # it arrived, and has ended since
    fleet.unacknowledged[change.request] = Unheard(
        replica=name, boot=boot, attempt=change.attempt, tick=max(fleet.tick, 0)
    )
    if len(fleet.unacknowledged) > MAX_ENTRIES:
        del fleet.unacknowledged[next(iter(fleet.unacknowledged))]


def arrived(fleet: Fleet, request: str) -> bool:
    """Its gateway's word came. False: the leader had ended it before."""
    following = follows(fleet, request, Input.ARRIVED)
    fleet.unacknowledged.pop(request, None)
    return following is State.LIVE


def ended(fleet: Fleet, request: str) -> None:
    """Its terminal event. It is remembered as long as its arrival may come."""
    entry = fleet.unacknowledged.get(request)
    if entry is not None:
        entry.ended = True
        if _is_over(fleet, entry, fleet.replicas[entry.replica].boot):
            del fleet.unacknowledged[request]


def began(fleet: Fleet, stream: str, replica: Replica, boot: str) -> None:
    """Life `boot` of the replica begins: no arrival of an earlier one comes any more."""
    head = fleet.streams.get(stream)
    # The head is that of the segment before: this one may begin with what the last life left.
    replica.began = max(head.position if head is not None else 0, replica.decided)
    replica.decided = 0
    for request, entry in list(fleet.unacknowledged.items()):
        if entry.replica == replica.name and entry.ended and _is_over(fleet, entry, boot):
            del fleet.unacknowledged[request]


def expire(fleet: Fleet, tick: int) -> None:
    """Mark those whose gateway will not record them."""
    for entry in fleet.unacknowledged.values():
        if entry.due or entry.ended:
            continue
        replica = fleet.replicas[entry.replica]
        waited = not replica.alive and tick - entry.tick >= WAIT_TICKS
        if waited or _is_over(fleet, entry, replica.boot):
            entry.due = tick


def expired(fleet: Fleet, tick: int = 0) -> list[tuple[str, Unheard]]:
    """Those that `tick` found due; 0: all that are due and not ended."""
    return [
        (request, entry)
        for request, entry in fleet.unacknowledged.items()
        if entry.due and not entry.ended and tick in (0, entry.due)
    ]


def _is_over(fleet: Fleet, entry: Unheard, boot: str) -> bool:
    """Whether life `boot` of its replica came after the one that sent the request."""
    if entry.boot == boot:
        return False
    return not (has_version(fleet, LEADER_VERSION, 2) and _began_after(entry.boot, boot))


def _began_after(boot: str, other: str) -> bool:
    """Whether life `boot` of a replica began after `other`. Each is named by its stream's epoch."""
    try:
        return int(boot, 16) > int(other, 16)
    except ValueError:
        return False
