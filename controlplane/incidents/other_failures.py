"""Failures of state daemons and of gateways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relume.controlplane.incidents.case import Case
from relume.controlplane.incidents.case_book import CaseBook
from relume.controlplane.incidents.touched_streams import MOST_LIVE, NO_ATTEMPT, TouchedStreams
from relume.events import vocabulary as v
from relume.events.log.entries import Entry
from relume.events.vocabulary.enums import FailedPart, FailureClass, PlacementCause

_PLANNED = ("stopped", "not wanted any more")
"""Reasons for which an agent ends its state daemon on purpose."""


class DaemonFailures:
    """State daemons that were lost, and the checkpoints that moved because of it."""

    def __init__(self, book: CaseBook, streams: TouchedStreams) -> None:
        self._book = book
        self._streams = streams
        self._holders: dict[str, tuple[str, ...]] = {}
        self._addresses: dict[str, tuple[str, str]] = {}
        """Of each worker's daemon: engines name it by these."""
        self.handlers: dict[type, Callable[[Entry, Any], None]] = {
            v.StateDaemonLost: self._on_lost,
            v.StateDaemonStarted: self._on_started,
            v.HolderChosen: self._on_chosen,
        }

    def on_ended(self, request: str) -> None:
        """The request has no checkpoint any more."""
        self._holders.pop(request, None)

    def on_worker_left(self, entry: Entry, worker: str) -> None:
        """The worker left on purpose, or is forgotten: its daemon does not return."""
        self._addresses.pop(worker, None)
        case = self._book.latest(FailedPart.DAEMON, worker)
        if case is not None and case.record.open:
            case.link(entry)
            case.close(-1)

    def on_restore_failed(self, entry: Entry, event: v.RestoreFailed) -> None:
        """A holder could not be read."""
        for worker, addresses in self._addresses.items():
            if event.holder in addresses:
                case = self._book.latest(FailedPart.DAEMON, worker)
                if case is not None and case.record.open:
                    case.link(entry, event.request)

    def _on_lost(self, entry: Entry, event: v.StateDaemonLost) -> None:
        if event.reason in _PLANNED:
            return
        case = self._book.latest(FailedPart.DAEMON, event.worker)
        if case is None or not case.record.open:
            case = self._book.open(
                entry, FailedPart.DAEMON, event.worker, 0, FailureClass.CRASH, event.reason
            )
        case.link(entry)

    def _on_started(self, entry: Entry, event: v.StateDaemonStarted) -> None:
        self._addresses[event.worker] = event.address, event.local
        case = self._book.latest(FailedPart.DAEMON, event.worker)
        if case is not None and case.record.open:
            case.link(entry)
            case.close(entry.at_ms)

    def _on_chosen(self, entry: Entry, event: v.HolderChosen) -> None:
        """A checkpoint that was on a lost daemon gets another holder."""
        before = self._holders.pop(event.request, ())
        self._holders[event.request] = event.holders
        if len(self._holders) > MOST_LIVE:
            del self._holders[next(iter(self._holders))]
        if event.cause != PlacementCause.HOLDER_LOST:
            return
        for holder in before:
            case = self._of_holder(holder)
            if case is not None and holder not in event.holders:
                case.decided(entry.at_ms)
                case.link(entry, event.request)
                if case.record.part == FailedPart.DAEMON:
                    self._streams.moved(case, entry, event.request, event.holders)

    def _of_holder(self, worker: str) -> Case | None:
        """Why the worker holds nothing now: its daemon died, or its host did."""
        daemon = self._book.latest(FailedPart.DAEMON, worker)
        host = self._book.latest(FailedPart.WORKER, worker)
        return host if host is not None and host.lost else daemon


class GatewayFailures:
    """Replicas that were lost, and the streams of clients that they served."""

    def __init__(self, book: CaseBook, streams: TouchedStreams) -> None:
        self._book = book
        self._streams = streams
        self._owners: dict[str, str] = {}
        self._serving: dict[str, int] = {}
        """By replica that started and did not stop: when it wrote something last."""
        self._epochs: dict[str, int] = {}
        self._stopped: dict[str, None] = {}
        self._leader = ""
        self.handlers: dict[type, Callable[[Entry, Any], None]] = {
            v.RequestArrived: self._on_arrived,
            v.GroupsReceived: self._on_received,
            v.ReplicaStarted: self._on_started,
            v.ReplicaStopped: self._on_stopped,
            v.ReplicaLost: self._on_lost,
            v.LeaderElected: self._on_elected,
        }

    def on_returned(self, event: v.ClientReturned, gateway: str) -> None:
        """Another gateway serves the client."""
        self._owners[event.request] = gateway

    def on_ended(self, request: str) -> None:
        """The request is over."""
        self._owners.pop(request, None)

    def on_stream_resumed(self, entry: Entry) -> None:
        """A gateway that was declared lost had only been cut off."""
        replica = entry.stream[2:]
        self._epochs[replica] = entry.epoch
        self._back(entry, replica)

    def _on_arrived(self, entry: Entry, event: v.RequestArrived) -> None:
        self._owners[event.request] = entry.stream[2:]
        if len(self._owners) > MOST_LIVE:
            del self._owners[next(iter(self._owners))]

    def _on_received(self, entry: Entry, event: v.GroupsReceived) -> None:
        if entry.stream[2:] in self._serving:
            self._serving[entry.stream[2:]] = entry.at_ms

    def _on_stopped(self, entry: Entry, event: v.ReplicaStopped) -> None:
        self._serving.pop(event.replica, None)
        self._stopped[event.replica] = None

    def _on_started(self, entry: Entry, event: v.ReplicaStarted) -> None:
        """One that starts while an earlier life of it was serving had died unheard."""
        if event.replica in self._serving:
            self._lost(entry, event.replica, "restarted without a stop")
        self._serving[event.replica] = entry.at_ms
        self._epochs[event.replica] = entry.epoch
        self._stopped.pop(event.replica, None)
        self._back(entry, event.replica)

    def _on_lost(self, entry: Entry, event: v.ReplicaLost) -> None:
        is_older = self._epochs.get(event.replica, event.epoch) != event.epoch
        if event.replica not in self._stopped and not is_older:
            self._lost(entry, event.replica, "its lease lapsed").decided(entry.at_ms)

    def _lost(self, entry: Entry, replica: str, reason: str) -> Case:
        case = self._book.latest(FailedPart.GATEWAY, replica)
        if case is None or not case.record.open:
            case = self._book.open(
                entry, FailedPart.GATEWAY, replica, 0, FailureClass.CRASH, reason
            )
            heard_ms = self._serving.pop(replica, 0)
            if 0 < heard_ms < entry.at_ms:
                case.record.began_ms = heard_ms
            for request in [r for r, owner in self._owners.items() if owner == replica]:
                self._streams.touch(case, entry, request, NO_ATTEMPT, 0)
        case.link(entry)
        return case

    def _back(self, entry: Entry, replica: str) -> None:
        case = self._book.latest(FailedPart.GATEWAY, replica)
        if case is not None and case.record.open:
            if case.record.id != f"{entry.revision}.{entry.index}":
                case.link(entry)
            case.close(entry.at_ms)

    def _on_elected(self, entry: Entry, event: v.LeaderElected) -> None:
        """Another leads, because the leader was lost."""
        lost = self._book.latest(FailedPart.GATEWAY, self._leader)
        if lost is not None and lost.record.open and event.replica != self._leader:
            lost.link(entry)
        self._leader = event.replica
