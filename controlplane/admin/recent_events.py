"""Recent events in memory, older ones from the log, one order for both.

Theory of operation. The replica's fold hands over each event; a revision group becomes
visible here as a whole, when it has been folded. Entries stay in a bounded list ordered
by (revision, index). A reader holds only a cursor, the position of the last entry it has seen. It
reads what follows from memory or, after a long pause, from the log. A slow follower therefore costs
no memory, and an interrupted one loses nothing.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from relume.controlplane.admin.errors import BadRequest
from relume.controlplane.history import archive
from relume.events.log.entries import Entry, entries
from relume.events.log.interface import LogReader, RevisionGroup

Cursor = tuple[int, int]
"""(revision, index within its group, from 0) of an entry."""

WINDOW = 4096
"""Revisions of one read of older events."""


def _place(entry: Entry) -> Cursor:
    return (entry.revision, entry.index)


def parse_cursor(text: str, param: str) -> Cursor:
    """`revision.index`, or `revision` for the end of that revision. Raises BadRequest."""
    revision, dot, index = text.partition(".")
    if not revision.isdigit() or (dot and not index.isdigit()):
        raise BadRequest(f"{param}={text!r} is not REVISION.INDEX", param)
    return (int(revision), int(index) if dot else (1 << 62))


class OlderLog:
    """The log before the memory: from the archive what is there, the rest from etcd.

    `archive_dir` empty: there is no archive, and nothing is ever trimmed. `log_id` selects our log
    among those archived there; without it there must be exactly one.
    """

    def __init__(
        self,
        reader: LogReader,
        archive_dir: str = "",
        log_id: Callable[[], Awaitable[str]] | None = None,
    ) -> None:
        self._reader = reader
        self._archive_dir = archive_dir
        self._log_id = log_id

    async def read(self, after: int, until: int) -> list[RevisionGroup]:
        """The groups in (after, until]. Raises Compacted, HistoryError, LogUnavailable."""
        groups: list[RevisionGroup] = []
        if self._archive_dir:
            log_id = await self._log_id() if self._log_id else None
            groups, last = await asyncio.to_thread(self._archived, log_id, after, until)
            after = max(after, last)
        return groups if after >= until else groups + await self._reader.read(after, until)

    def _archived(
        self, log_id: str | None, after: int, until: int
    ) -> tuple[list[RevisionGroup], int]:
        if log_id == "":  # not named yet, so nothing of it is archived
            return [], 0
        directory = archive.find(Path(self._archive_dir), log_id or "")
        if directory is None:
            return [], 0
        archived = archive.Archive(directory, directory.name)
        return (
            (list(archived.read(after, until)), archived.last) if archived.last > after else ([], 0)
        )


class History:
    """The newest `capacity` to `2 * capacity` events; `begins` is the first revision held whole.

    `seen` and `folded` are to be called by the replica for each event and each group.
    """

    def __init__(self, older: OlderLog, revision: int, capacity: int = 8192) -> None:
        self.begins = revision + 1
        self.revision = revision
        self._older = older
        self._capacity = capacity
        self._entries: list[Entry] = []
        self._group: list[tuple[str, int, Any]] = []
        self._news = asyncio.Event()
        self._listeners: list[Callable[[Entry], None]] = []

    def listen(self, listener: Callable[[Entry], None]) -> None:
        """Call `listener` with every entry that becomes visible."""
        self._listeners.append(listener)

    def seen(self, stream: str, position: int, event: Any) -> None:
        """One event of the group being folded."""
        self._group.append((stream, position, event))

    def folded(self, group: RevisionGroup) -> None:
        """The group is folded: publish its events."""
        segments = {segment.stream: segment for segment in group.segments}
        for index, (stream, position, event) in enumerate(self._group):
            entry = Entry(
                revision=group.revision,
                index=index,
                stream=stream,
                epoch=segments[stream].epoch,
                position=position,
                at_ms=segments[stream].at_ms,
                event=event,
            )
            self._entries.append(entry)
            for listener in self._listeners:
                listener(entry)
        self._group.clear()
        self.revision = group.revision
        if len(self._entries) > 2 * self._capacity:
            del self._entries[: -self._capacity]
            # its group may be cut: whole from the next revision on
            self.begins = self._entries[0].revision + 1
        self.wake()

    def restart(self, revision: int) -> None:
        """The fold was taken from a snapshot at `revision`: what led there was not seen."""
        self._entries.clear()
        self.begins = revision + 1
        self.revision = max(self.revision, revision)

    def last(self, limit: int, matches: Callable[[Entry], bool]) -> list[Entry]:
        """The newest `limit` entries in memory that match, oldest first."""
        found: list[Entry] = []
        for entry in reversed(self._entries):
            if len(found) == limit or entry.revision < self.begins:
                break
            if matches(entry):
                found.append(entry)
        return found[::-1]

    @property
    def end(self) -> Cursor:
        """A cursor after everything folded so far."""
        return (self.revision, 1 << 62)

    async def after(self, cursor: Cursor, limit: int = 1000) -> tuple[list[Entry], Cursor]:
        """Entries that follow `cursor`, at most `limit` (or one window of the log), and the cursor
        to continue from; the same cursor if there is nothing newer.

        Raises Compacted (trimmed), LogUnavailable.
        """
        if cursor >= (self.begins - 1, 1 << 61):
            at = bisect_right(self._entries, cursor, key=_place)
            found = self._entries[at : at + limit]
            if len(found) == limit:
                return found, _place(found[-1])
            return found, max(cursor, self.end)
        until = min(cursor[0] + WINDOW, self.begins - 1)
        whole = cursor[1] >= 1 << 61  # nothing of its own revision follows
        groups = await self._older.read(cursor[0] if whole else max(cursor[0] - 1, 0), until)
        found = [e for e in entries(groups) if _place(e) > cursor]
        if len(found) > limit:
            found = found[:limit]
            return found, _place(found[-1])
        return found, (until, 1 << 62)

    async def news(self, cursor: Cursor, timeout_s: float) -> None:
        """Return when something follows `cursor`, on `wake`, or when `timeout_s` went by."""
        if cursor >= self.end:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._news.wait()

    def wake(self) -> None:
        """Wake all readers that wait for newer entries."""
        news, self._news = self._news, asyncio.Event()
        news.set()
