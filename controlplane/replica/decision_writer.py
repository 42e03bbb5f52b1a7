"""The replica's own log stream as decisions use it: basis, time, and the append.

A decision is taken on a view (R, p) and recorded with that basis. Nothing may be emitted between
`basis` and the decision it belongs to.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import structlog

from relume.events import vocabulary as v
from relume.events.log.errors import LogFull, LogReplaced
from relume.events.log.feature_levels import require
from relume.events.log.interface import StreamWriter
from relume.policies.leader.feature_level import in_force
from relume.policies.routing import estimate_index
from relume.policies.state.overlay.receive_clock import UnrecordedReceipts
from relume.policies.state.overlay.view import View

log = structlog.get_logger("relume.replica")

GATHERED = (
    v.RequestArrived,
    v.RouteDecided,
    v.HolderChosen,
    v.RequestEnded,
    v.RequestHeld,
    v.RequestShed,
)
"""Events that may wait in the writer for more of their kind: no other process acts on them at
once, and a decision travels with its request as well. All others are sent without delay."""
BEYOND_LIMIT = (v.RequestEnded,)
"""Events that the writer takes although the log is full: without its end, a request would be live for
ever. There is one for each arrival that it took."""


class DecisionWriter:
    """Appends the replica's own events and keeps the view up to date with them.

    `microseconds` is the replica's monotonic clock, used only to record receive times.
    `observers` are called with (position, event) for each own event.
    """

    def __init__(
        self, view: View, writer: StreamWriter, boot: str, microseconds: Callable[[], int]
    ) -> None:
        self.view = view
        self.boot = boot
        self.log_id = ""
        """Id of the log, once it has one and that is known."""
        self.observers: list[Callable[[int, Any], None]] = []
        self._writer = writer
        self._decisions = 0
        self._unwritten = 0
        self._clock = microseconds
        self._began_us = microseconds()
        self._unrecorded = UnrecordedReceipts()
        self._fixed_us = -1

    @property
    def healthy(self) -> bool:
        """Whether the log accepts events now."""
        return self._writer.healthy

    def hurry(self, within_s: float) -> None:
        """Send what was emitted within this time."""
        self._writer.hurry(within_s)

    def emit(self, event: Any) -> int:
        """Append one of our own events and show it to the view at once. Raises LogError,
        AboveFeatureLevel."""
        require(event, in_force(self.view.fleet))
        beyond_limit = type(event) in BEYOND_LIMIT
        try:
            self._emit_receipts()
        except LogFull:  # the next decision needs them, and an end does not
            if not beyond_limit:
                raise
        position = self._append(event, beyond_limit)
        if type(event) not in GATHERED:
            self._writer.hurry()
        self.view.own(position, event)
        for observer in self.observers:
            observer(position, event)
        return position

    def basis(self) -> v.Basis:
        """The basis of a decision made now; the decision must be the next event emitted."""
        self._emit_receipts()
        self.view.reach(self._position)
        return self.view.basis

    def decision_id(self) -> str:
        """A name for the next decision of this replica, unique over its lives."""
        self._decisions += 1
        return f"{self.view.replica}.{self.boot}.{self._decisions}"

    def now_us(self) -> int:
        """Microseconds on the clock that receive times are recorded by."""
        return self._clock() - self._began_us

    def decision_us(self) -> int:
        """The time of a decision made now: that of `deciding_at`, if there is one."""
        return self._fixed_us if self._fixed_us >= 0 else self.now_us()

    @contextmanager
    def deciding_at(self, at_us: int) -> Iterator[None]:
        """Decisions made inside have this time. The admission queue uses it: the decision must
        see the same fleet as the check that called the request."""
        self._fixed_us = at_us
        try:
            yield
        finally:
            self._fixed_us = -1

    def received(self, revision: int) -> None:
        """A watched revision group arrived now, and is folded next."""
        if not self._unrecorded.received(self.view.receipts, revision, self.now_us()):
            estimate_index.forget(self.view)

    def _append(self, event: Any, beyond_limit: bool = False) -> int:
        """The event's position. Once the log was replaced, nobody can read what this replica writes:
        its open streams continue, and their events are only counted."""
        if not self._unwritten:
            try:
                return self._writer.append(event, beyond_limit=beyond_limit)
            except LogReplaced:
                log.warning("events_are_not_written_any_more", stream=self._writer.stream)
        self._unwritten += 1
        return self._position

    @property
    def _position(self) -> int:
        return self._writer.position + self._unwritten

    def _emit_receipts(self) -> None:
        event = self._unrecorded.record()
        if event is not None:
            self.view.reach(self._append(event))
            self._unrecorded.recorded(self.view.receipts)
