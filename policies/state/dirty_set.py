"""Dirty sets: which workers the events folded since a point may have changed.

Theory of operation. An index over W workers (`routing.worker_index`, checkpoint sites) stays from
one decision to the next and must not evaluate all of them each time. So the fold notes, event by
event, whose account or checkpoint figures it may have changed: rather too many than too few, and
"all of them" for a rare event. Each reader remembers where the counter stood when it last looked,
and asks for the names since then. The view adds what its own events, which the fold lacks, concern.

A dirty set follows from the fold. It is no part of the state or of its hash, and a log that is only
folded does not pay for it: there is none until the first reader asks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

from relume.events import vocabulary as v
from relume.policies.state.fleet import Fleet

MAX_MARKS = 2048
"""Maximum number of separate notes; older ones are merged into a set of names."""
NAMES = 16_384
"""With more names, among them those of workers long gone, it is all of them again."""


class DirtySet:
    """Names in the order they were touched, on a counter of this object."""

    __slots__ = ("_begin", "_old", "_recent", "count", "whole")

    def __init__(self) -> None:
        self.count = 0
        """The current value of the counter."""
        self.whole = 0
        """The value of the counter when anything might last have changed."""
        self._old: set[str] = set()
        self._begin = 0
        self._recent: list[str] = []

    def note(self, name: str) -> None:
        recent = self._recent
        recent.append(name)
        self.count += 1
        if len(recent) > MAX_MARKS:
            self._old.update(recent)
            self._begin = self.count
            recent.clear()
            if len(self._old) > NAMES:
                self.everything()

    def everything(self) -> None:
        """Anything may be different now."""
        self.count += 1
        self.whole = self._begin = self.count
        self._recent.clear()
        self._old.clear()

    def since(self, count: int) -> Collection[str] | None:
        """Names changed since that value of the counter, some of them more than once or without
        need; None for all there are."""
        if self.whole > count:
            return None
        if count < self._begin:
            return self._old.union(self._recent)
        return self._recent[count - self._begin :]


class FleetDirtySet(DirtySet):
    """Those of a fold. `steps`: workers by when their engines made a step in which only figures
    changed."""

    __slots__ = ("steps",)

    def __init__(self) -> None:
        super().__init__()
        self.steps = DirtySet()


def of(fleet: Fleet) -> FleetDirtySet:
    """The fleet's dirty sets. They are created by the first reader, which then has no older
    state."""
    found: FleetDirtySet | None = fleet.__dict__.get("dirty")
    if found is None:
        found = fleet.__dict__["dirty"] = FleetDirtySet()
    return found


def in_use(fleet: Fleet) -> FleetDirtySet | None:
    """The fleet's, if anybody goes by them: a log that is only folded does not pay for them."""
    return fleet.__dict__.get("dirty")


def changed(fleet: Fleet, *workers: str) -> None:
    """What the fold holds of those workers changed, by an event that does not name them; of none: of
    all."""
    if (marks := in_use(fleet)) is None:
        return
    for name in workers:
        marks.note(name)
    if not workers:
        marks.everything()


def note(fleet: Fleet, marks: FleetDirtySet, stream: str, event: Any) -> None:
    """To be called before `event` of `stream` is folded: an end no longer shows afterwards
    what it ended."""
    if type(event) is v.EngineStep:  # most only continue: what runs there stays the same
        (marks if event.changes or event.lost else marks.steps).note(stream[2:])
        return
    names = _NAMES.get(type(event))
    if names is None:
        marks.everything()
        return
    for name in names(fleet, stream, event):
        marks.note(name)


def _nobody(fleet: Fleet, stream: str, event: Any) -> Iterable[str]:
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


def _every_holder(fleet: Fleet, stream: str, event: Any) -> Iterable[str]:
    return tuple(fleet.holders)


def _ended(fleet: Fleet, stream: str, event: v.RequestEnded) -> Iterable[str]:
    request = fleet.requests.get(event.request)
    if request is None:  # its dispatches are in no list
        return (*fleet.workers, *_holders_of(fleet, event.request))
    places = (name for name, _ in request.places)
    # Its engine may have told of it, and of its end, before its gateway: then it stands nowhere,
    # and its first token counts for its worker all the same.
    return (request.worker, *places, *_holders_of(fleet, event.request))


_NAMES: dict[type, Callable[[Fleet, str, Any], Iterable[str]]] = {
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
    v.WeightsLoaded: _nobody,
    v.WeightsLoading: _nobody,
    v.RestoreFailed: _nobody,
    v.CheckpointsReleased: _nobody,
    v.CheckpointsVoided: _every_holder,
    v.StallJudged: _nobody,
    v.EngineHung: _target,
    v.EngineRecovered: _target,
    v.ReportsDropped: _target,
    v.CrossCheckDecided: _nobody,
    v.CrossChecked: _nobody,
    v.CanaryReported: _target,
    v.CanaryValuesDecided: _nobody,
    v.WeightsReadStarted: _nobody,
    v.WeightsDigested: _nobody,
    v.WeightsCompared: _nobody,
    v.HealthDecided: _target,
    v.VerdictsWithheld: _nobody,
    v.DegradationDecided: _nobody,
    v.Tick: _nobody,
}
"""Events that come all the time. Any other may touch everything."""
