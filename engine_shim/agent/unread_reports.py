"""What the agent dropped of its engine's reports, as a fact in the log.

The fold then no longer waits for what they may have said, and forgets the engine's load until it
reports the next step. The leader judges a worker whose engine goes on so. An engine may report
thousands a second, so the events are few: one at once, then one per second. An event follows the last
report that was dropped: if the engine is idle since, nothing else says so.
"""

from __future__ import annotations

import asyncio

from relume.engine_shim.agent.journal import Journal
from relume.events.vocabulary import ReportsDropped

INTERVAL_S = 1.0
"""Minimum time between two events."""
MAX_REASON = 200
"""Maximum length of the reason in an event, in characters."""


class UnreadReports:
    """Counts dropped reports of the engine incarnation between `begin` and `end`."""

    def __init__(self, journal: Journal) -> None:
        self._journal = journal
        self._incarnation = self._count = 0
        self._reason, self._muted = "", False
        self._muted_for = ""
        self._due: asyncio.TimerHandle | None = None

    def begin(self, incarnation: int) -> None:
        """An engine lives."""
        self._incarnation = incarnation
        self._muted_for = ""

    def end(self) -> None:
        """The engine is dead: write the rest, which then stands before its death."""
        self._write()
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def note(self, reason: str, muted: bool = False) -> None:
        """Something of the engine was dropped, by its fault. `muted`: no more is read of the process
        that sent it."""
        self._count += 1
        self._reason, self._muted = reason[:MAX_REASON], self._muted or muted
        if muted:
            self._muted_for = reason
        if self._due is None:
            self._write()

    def state_again(self) -> None:
        """Record in a log that knows nothing of it that no more is read of the engine, if so."""
        if self._muted_for:
            self.note(self._muted_for, muted=True)

    def _write(self) -> None:
        self._due = None
        if not self._count:
            return
        self._journal.record(
            ReportsDropped(
                worker=self._journal.stream.removeprefix("w."),
                incarnation=self._incarnation,
                count=self._count,
                reason=self._reason,
                muted=self._muted,
            )
        )
        self._count, self._muted = 0, False
        self._due = asyncio.get_running_loop().call_later(INTERVAL_S, self._write)
