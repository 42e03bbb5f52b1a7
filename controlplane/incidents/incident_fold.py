"""The fold of the log into incidents: a pure step for each event, in bounded memory.

It stands beside the fold of the fleet and changes nothing of it: no decision depends on incidents,
and the state hash does not cover them. A replica follows the log with it (`IncidentObserver`); the
same fold reads a stored log (`incidents_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from relume.controlplane.incidents.case import Case
from relume.controlplane.incidents.case_book import MOST_INCIDENTS, CaseBook
from relume.controlplane.incidents.decided_health import DecidedHealth
from relume.controlplane.incidents.incident import Incident
from relume.controlplane.incidents.other_failures import DaemonFailures, GatewayFailures
from relume.controlplane.incidents.recoveries import Recoveries
from relume.controlplane.incidents.served_requests import ServedRequests
from relume.controlplane.incidents.touched_streams import TouchedStreams
from relume.controlplane.incidents.unreadable_streams import UnreadableStreams
from relume.controlplane.incidents.worker_failures import WorkerFailures
from relume.events import vocabulary as v
from relume.events.log.entries import Entry, entries
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import FailedPart, RequestOutcome

Handler = Callable[[Entry, Any], None]


class IncidentFold:
    """The incidents of the entries taken so far, the latest `most` of them."""

    def __init__(self, most: int = MOST_INCIDENTS) -> None:
        self._streams = TouchedStreams()
        self._served = ServedRequests()
        self._book = CaseBook(self._forget, most)
        self._workers = WorkerFailures(self._book, self._streams)
        self._daemons = DaemonFailures(self._book, self._streams)
        self._gateways = GatewayFailures(self._book, self._streams)
        self._unreadable = UnreadableStreams(self._book)
        self._recoveries = Recoveries(self._book)
        self.handlers: dict[type, Handler] = {
            **self._workers.handlers,
            **DecidedHealth(self._book, self._workers.evidence, self._served).handlers,
            **self._daemons.handlers,
            **self._gateways.handlers,
            **self._unreadable.handlers,
            v.Tick: self._on_tick,
            v.RouteDecided: self._on_routed,
            v.TransportObserved: self._on_observed,
            v.EngineStep: self._on_step,
            v.RestoreStarted: self._on_restore_started,
            v.RestoreDone: self._on_restored,
            v.RestoreFailed: self._on_restore_failed,
            v.ClientReturned: self._on_returned,
            v.RequestEnded: self._on_ended,
            v.WeightsLoaded: self._recoveries.on_loaded,
            v.EngineReady: self._on_ready,
            v.EngineDied: self._on_died,
            v.WorkerRegistered: self._on_registered,
            v.WorkerForgotten: self._on_forgotten,
            v.ReplicaStarted: self._on_replica,
            v.ReplicaStopped: self._on_replica,
            v.ReplicaLost: self._on_replica,
            v.StreamResumed: self._on_stream_resumed,
            v.WorkerDeregistered: self._on_deregistered,
        }

    def take(self, entry: Entry) -> None:
        """The next event of the log."""
        handler = self.handlers.get(type(entry.event))
        if handler is not None:
            handler(entry, entry.event)

    def wants(self, stream: str, event: Any) -> bool:
        """Whether `take` has a use for it: most events are engine steps, read only if they have new
        requests, while a touched stream waits for its next token, or of an engine that follows a failed
        one."""
        kind = type(event)
        if kind is v.EngineStep:
            return (
                bool(self._streams.waiting) or self._recoveries.follows(stream) or _has_new(event)
            )
        return kind in self.handlers

    @property
    def incidents(self) -> list[Incident]:
        """The latest, oldest first."""
        return [case.record for case in self._book]

    def _forget(self, case: Case) -> None:
        self._streams.forget(case)
        self._served.forget(case)
        self._recoveries.forget(case)

    def _on_tick(self, entry: Entry, event: v.Tick) -> None:
        self._served.on_tick(event)
        self._recoveries.on_tick(entry)

    def _on_ready(self, entry: Entry, event: v.EngineReady) -> None:
        self._workers.handlers[v.EngineReady](entry, event)
        self._recoveries.on_ready(entry, event)

    def _on_died(self, entry: Entry, event: v.EngineDied) -> None:
        self._recoveries.on_died(event)
        self._workers.handlers[v.EngineDied](entry, event)

    def _on_routed(self, entry: Entry, event: v.RouteDecided) -> None:
        self._served.on_routed(event)
        self._streams.on_routed(entry, event)

    def _on_observed(self, entry: Entry, event: v.TransportObserved) -> None:
        self._workers.handlers[v.TransportObserved](entry, event)
        self._served.on_observed(event)

    def _on_step(self, entry: Entry, event: v.EngineStep) -> None:
        self._served.on_step(entry.stream[2:], event)
        self._recoveries.on_step(entry, event)
        if self._streams.waiting:
            for case in self._streams.on_step(entry, event):
                _settled(case, entry)

    def _on_restore_started(self, entry: Entry, event: v.RestoreStarted) -> None:
        self._served.on_restore_started(event)

    def _on_restored(self, entry: Entry, event: v.RestoreDone) -> None:
        self._served.on_restored(event)
        self._streams.on_restored(entry, event)

    def _on_restore_failed(self, entry: Entry, event: v.RestoreFailed) -> None:
        self._streams.on_restored(entry, event)
        self._daemons.on_restore_failed(entry, event)

    def _on_returned(self, entry: Entry, event: v.ClientReturned) -> None:
        gateway = entry.stream[2:]
        self._gateways.on_returned(event, gateway)
        self._streams.on_returned(entry, event, gateway)

    def _on_ended(self, entry: Entry, event: v.RequestEnded) -> None:
        self._served.on_ended(event)
        self._daemons.on_ended(event.request)
        self._gateways.on_ended(event.request)
        if event.outcome == RequestOutcome.REJECTED and event.status < 500:
            for case in self._streams.withdraw(event.request):
                self._book.drop(case)
        for case in self._streams.on_ended(entry, event):
            _settled(case, entry)

    def _on_replica(self, entry: Entry, event: Any) -> None:
        self._workers.on_replica_gone(entry, event.replica)
        self._gateways.handlers[type(event)](entry, event)

    def _on_stream_resumed(self, entry: Entry, event: v.StreamResumed) -> None:
        if entry.stream.startswith("r."):
            self._gateways.on_stream_resumed(entry)
        elif entry.stream.startswith("w."):
            self._workers.handlers[v.StreamResumed](entry, event)
            self._unreadable.on_worker_here(entry, entry.stream[2:])

    def _on_registered(self, entry: Entry, event: v.WorkerRegistered) -> None:
        self._workers.handlers[v.WorkerRegistered](entry, event)
        self._unreadable.on_worker_here(entry, event.worker)

    def _on_forgotten(self, entry: Entry, event: v.WorkerForgotten) -> None:
        self._workers.handlers[v.WorkerForgotten](entry, event)
        if not self._workers.knows(event.worker):
            self._recoveries.on_gone(event.worker)
            self._served.forget_worker(event.worker)
            self._daemons.on_worker_left(entry, event.worker)
            self._unreadable.on_worker_gone(entry, event.worker)

    def _on_deregistered(self, entry: Entry, event: v.WorkerDeregistered) -> None:
        self._recoveries.on_gone(event.worker)
        self._workers.handlers[v.WorkerDeregistered](entry, event)
        self._daemons.on_worker_left(entry, event.worker)
        self._unreadable.on_worker_gone(entry, event.worker)


def _has_new(event: v.EngineStep) -> bool:
    """Whether the engine says that it has new requests. Called with each engine step."""
    queued = v.RequestQueued
    for change in event.changes:  # noqa: SIM110 (a generator costs three times as much)
        if type(change) is queued:
            return True
    return False


def _settled(case: Case, entry: Entry) -> None:
    """A stream less waits: that may end a case of single wrong answers."""
    if case.record.part == FailedPart.WORKER and not case.waiting:
        case.settle(entry.at_ms)


class IncidentObserver:
    """The incidents of a log that is being folded. `since` is the first revision that it has seen;
    what happened before is in the log alone."""

    def __init__(self) -> None:
        self.since = 1
        self._fold = IncidentFold()
        self._index = 0
        self._group: list[tuple[int, str, int, Any]] = []

    def seen(self, stream: str, position: int, event: Any) -> None:
        """One event of the group being folded."""
        if self._group or self._fold.wants(stream, event):
            self._group.append((self._index, stream, position, event))
        self._index += 1

    def folded(self, group: RevisionGroup) -> None:
        """The group is folded."""
        fold, taken, self._group, self._index = self._fold, self._group, [], 0
        segments = {segment.stream: segment for segment in group.segments} if taken else {}
        for index, stream, position, event in taken:
            if fold.wants(stream, event):
                segment = segments[stream]
                fold.take(
                    Entry(
                        revision=group.revision,
                        index=index,
                        stream=stream,
                        epoch=segment.epoch,
                        position=position,
                        at_ms=segment.at_ms,
                        event=event,
                    )
                )

    def restart(self, revision: int) -> None:
        """The fold was taken from a snapshot at `revision`: what led there was not seen."""
        self._fold = IncidentFold()
        self.since = revision + 1

    @property
    def incidents(self) -> list[Incident]:
        """The latest, oldest first."""
        return self._fold.incidents


def incidents_of(groups: Iterable[RevisionGroup], most: int = 100_000) -> list[Incident]:
    """The incidents of a log, oldest first; if there are more than `most`, the latest.

    Raises UnknownEvent, MalformedRecord.
    """
    fold = IncidentFold(most)
    for entry in entries(groups):
        fold.take(entry)
    return fold.incidents
