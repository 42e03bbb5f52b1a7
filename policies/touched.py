"""Which workers folded events may have changed: their load, and as holders of checkpoints.

A decision keeps its index of W workers or sites from one to the next (`ranking`,
`checkpoints.index_of`) and must not look at all of them each time. So the fold notes, event by
event, whose account or figures of Eq. 4 and 5 it may have moved: too many rather than too few,
and all of them where an event is rare. What stands in a view's overlay is looked at besides.

It follows from the fold and tells nothing of its own: no part of the state or its hash.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from events import vocabulary as v
from policies.state import Fleet


class Touched:
    """Names by when they were touched last, on a counter of this object."""

    __slots__ = ("_at", "_everything", "count")

    def __init__(self) -> None:
        self.count = 0
        self._everything = 0
        self._at: dict[str, int] = {}

    def note(self, name: str) -> None:
        self.count += 1
        self._at.pop(name, None)
        self._at[name] = self.count  # behind all others: the dict stays in this order

    def everything(self) -> None:
        """Anything may be different now."""
        self.count += 1
        self._everything = self.count
        self._at.clear()

    @property
    def whole(self) -> int:
        """Where the counter stood when anything might have changed."""
        return self._everything

    def since(self, count: int) -> list[str] | None:
        """Names touched since the counter stood there; None for all there are."""
        if self._everything > count:
            return None
        found = []
        for name in reversed(self._at):
            if self._at[name] <= count:
                break
            found.append(name)
        return found


def of(fleet: Fleet) -> Touched:
    """The fleet's; one that was just loaded begins with none."""
    found = fleet.__dict__.get("touched")
    if found is None:
        found = fleet.__dict__["touched"] = Touched()
    return found


def steps_of(fleet: Fleet) -> Touched:
    """Workers by when their engines last made a step in which only figures changed."""
    found = fleet.__dict__.get("steps")
    if found is None:
        found = fleet.__dict__["steps"] = Touched()
    return found


def note(fleet: Fleet, touched: Touched, stream: str, event: Any) -> None:
    """To be called before `event` of `stream` is folded: an end no longer shows afterwards
    what it ended."""
    mark = _MARKS.get(type(event))
    if mark is None:
        touched.everything()
        return
    for name in mark(fleet, stream, event):
        touched.note(name)


def _nobody(fleet: Fleet, stream: str, event: Any) -> Iterable[str]:
    return ()


def _stepped(fleet: Fleet, stream: str, event: v.EngineStep) -> Iterable[str]:
    """Most steps only go on: what runs there stays the same."""
    if event.changes or event.lost:
        return (stream[2:],)
    steps_of(fleet).note(stream[2:])
    return ()


def _target(fleet: Fleet, stream: str, event: Any) -> Iterable[str]:
    return (event.worker,)


def _holder(fleet: Fleet, stream: str, event: Any) -> Iterable[str]:
    return (event.holder,)


def _holders_of(fleet: Fleet, request: str) -> tuple[str, ...]:
    placed = fleet.placed.get(request)
    return placed.holders if placed is not None else ()


def _chosen(fleet: Fleet, stream: str, event: v.HolderChosen) -> Iterable[str]:
    return (*_holders_of(fleet, event.request), *event.holders)


def _ended(fleet: Fleet, stream: str, event: v.RequestEnded) -> Iterable[str]:
    request = fleet.requests.get(event.request)
    if request is None:  # its dispatches stand in no list
        return (*fleet.workers, *_holders_of(fleet, event.request))
    return (*(name for name, _ in request.places), *_holders_of(fleet, event.request))


_MARKS: dict[type, Callable[[Fleet, str, Any], Iterable[str]]] = {
    v.EngineStep: _stepped,
    v.RouteDecided: _target,
    v.TransportObserved: _target,
    v.RequestEnded: _ended,
    v.HolderChosen: _chosen,
    v.CheckpointAcknowledged: _holder,
    v.CheckpointsAcknowledged: _holder,
    v.CheckpointEvicted: _holder,
    v.CheckpointDropped: _holder,
    v.RequestArrived: _nobody,
    v.ClientReturned: _nobody,
    v.GroupsReceived: _nobody,
    v.WorkerSuspected: _nobody,
    v.WorkerCleared: _nobody,
    v.RecoveryPlanned: _nobody,
    v.MigrationPlanned: _nobody,
    v.StateDaemonReported: _nobody,
    v.StreamsReported: _nobody,
    v.PrefixBlocksChanged: _nobody,
    v.RestoreStarted: _nobody,
    v.RestoreDone: _nobody,
    v.LinkMeasured: _nobody,
    v.RestoreFailed: _nobody,
    v.CheckpointsReleased: _nobody,
    v.Tick: _nobody,
}
"""Events that come all the time. Any other may touch everything."""
