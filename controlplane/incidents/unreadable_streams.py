"""Streams of workers with a record or a segment that cannot be read.

The fact is the decision: the fold of the fleet excludes the worker at once, until an operator
acknowledges it (`relume trust`). So a record opens with the first such fact, and the trust ends it.
Further ones of the same worker belong to it until then. Requests that run on the worker continue
there, so no stream is touched. If the worker's agent ends by a damaged segment, the death of its
engine has a record of its own.

A record of a replica or of the leader that cannot be read excludes no worker, and opens none.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relume.controlplane.incidents.case import Case
from relume.controlplane.incidents.case_book import CaseBook
from relume.controlplane.incidents.incident import MOST_OF_FACTS
from relume.events import vocabulary as v
from relume.events.log.codec import UnreadableRecord
from relume.events.log.entries import Entry
from relume.events.vocabulary.enums import AdminCommand, FailedPart, FailureClass
from relume.policies.state.operator_commands import COMMANDS


class UnreadableStreams:
    """The cases of workers that get no requests because of what stands in their streams."""

    def __init__(self, book: CaseBook) -> None:
        self._book = book
        self._commands: dict[str, None] = {}
        """The latest commands: a gateway may write one twice, and only the first counts."""
        self.handlers: dict[type, Callable[[Entry, Any], None]] = {
            UnreadableRecord: self._on_unreadable,
            v.SegmentSkipped: self._on_skipped,
            v.AdminCommanded: self._on_commanded,
        }

    def _on_unreadable(self, entry: Entry, event: UnreadableRecord) -> None:
        self._fact(entry, entry.stream, event.reason)

    def _on_skipped(self, entry: Entry, event: v.SegmentSkipped) -> None:
        self._fact(entry, event.stream, f"segment {event.segment}: {event.reason}")

    def _fact(self, entry: Entry, stream: str, reason: str) -> None:
        if not stream.startswith("w."):
            return
        case = self._unacknowledged(stream[2:])
        if case is None:
            case = self._book.open(
                entry, FailedPart.STREAM, stream[2:], 0, FailureClass.REPORTS, reason
            )
            case.decided(entry.at_ms)
        if len(case.record.events) < MOST_OF_FACTS:
            case.link(entry)
        else:
            case.record.events_left_out += 1

    def _on_commanded(self, entry: Entry, event: v.AdminCommanded) -> None:
        if event.command_id in self._commands:
            return
        self._commands[event.command_id] = None
        if len(self._commands) > COMMANDS:
            del self._commands[next(iter(self._commands))]
        if event.command != AdminCommand.TRUST:
            return
        case = self._unacknowledged(event.target)
        if case is not None:
            case.record.trusted_by = event.principal
            case.link(entry)
            case.close(entry.at_ms)

    def on_worker_gone(self, entry: Entry, worker: str) -> None:
        """The worker left: its capacity does not come back."""
        case = self._unacknowledged(worker)
        if case is not None and case.record.open:
            case.link(entry)
            case.close(-1)

    def on_worker_here(self, entry: Entry, worker: str) -> None:
        """Its agent writes again. No start of an agent ends the exclusion."""
        case = self._unacknowledged(worker)
        if case is not None and not case.record.open:
            case.reopen()
            case.link(entry)

    def _unacknowledged(self, worker: str) -> Case | None:
        """The worker's case that no operator has ended."""
        case = self._book.latest(FailedPart.STREAM, worker)
        return case if case is not None and case.record.capacity_back_ms < 0 else None
