"""The interface of the log: writers own streams, readers follow all of them.

`relume.events.etcd` implements it on etcd, `relume.events.log.memory.MemoryLog` in memory with the
same rules, for tests and simulation. The total order of events is (revision, stream, index
in segment).
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, Protocol

from msgspec import Struct

from relume.events.log.errors import Fenced
from relume.events.log.segment import Segment

Heads = Mapping[str, tuple[int, bytes, int]]
"""By stream: number and hash of its last segment, and the position of its next event."""


class RevisionGroup(Struct, frozen=True, gc=False):
    """All that one etcd transaction did inside the log prefix, whole.

    `segments` in stream order. `owners` lists (stream, epoch) for owner keys created and
    (stream, 0) for owner keys deleted (lease lapsed or closed) in this transaction.
    """

    revision: int
    segments: tuple[Segment, ...] = ()
    owners: tuple[tuple[str, int], ...] = ()


class LandedSegment(Struct, frozen=True, gc=False, kw_only=True):
    """A segment of this writer became durable: positions `first..last` at `revision`."""

    stream: str
    revision: int
    seq: int
    first: int
    last: int


class StreamWriter(Protocol):
    """The one owner of a stream.

    An async context manager: entering opens (or takes over) the stream, leaving flushes
    what it can within its close timeout, then gives the ownership back.
    """

    stream: str

    @property
    def epoch(self) -> int:
        """create_revision of the owner key; changes when the stream is resumed."""
        ...

    @property
    def position(self) -> int:
        """Position of the last event accepted by `append` (durable or not)."""
        ...

    @property
    def durable(self) -> int:
        """Position of the last event known to be in etcd."""
        ...

    @property
    def healthy(self) -> bool:
        """Whether appends land now (False: spooling through an outage)."""
        ...

    def append(self, *events: Any, beyond_limit: bool = False) -> int:
        """Take events (structs, or records already encoded as bytes); returns the position
        of the last. Never waits. Raises Fenced, LogFull. `beyond_limit`: take them also when
        the log is full, because their number is bounded otherwise."""
        ...

    def hurry(self, within_s: float = 0.0) -> None:
        """Send what was accepted within that time, if the writer gathers events before it sends."""
        ...

    async def flush(self, timeout_s: float) -> None:
        """Wait until all accepted events are durable. Raises TimeoutError, Fenced."""
        ...

    def on_landed(self, callback: Callable[[LandedSegment], None]) -> None:
        """Call `callback` on the event loop for every segment that became durable."""
        ...

    @property
    def fence(self) -> Fenced | None:
        """Why the stream is no longer ours: another owner took it, or LogReplaced."""
        ...

    async def fenced(self) -> None:
        """Return when (if ever) there is a `fence`; this writer takes no more events."""
        ...


class LogReader(Protocol):
    """Reads the whole log, then follows it."""

    def follow(self, after: int = 0, heads: Heads | None = None) -> AsyncIterator[RevisionGroup]:
        """Every revision group with revision > `after`, in order, for ever, whole groups.

        `after=0` starts at the beginning of what the log holds. `heads`: ends of the streams at
        `after`, which the groups continue. Reconnects by itself. Raises Compacted when `after` has
        been trimmed.
        """
        ...

    async def read(
        self, after: int = 0, until: int = 0, heads: Heads | None = None
    ) -> list[RevisionGroup]:
        """The groups in (after, until]; `until=0` means up to the present revision. `heads` as in
        `follow`."""
        ...

    async def owners(self) -> dict[str, int]:
        """Streams that have a living owner now, with its epoch."""
        ...
