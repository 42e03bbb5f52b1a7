"""Errors of the log. The class says whose fault it is; the fields say what happened."""

from __future__ import annotations


class RelumeError(Exception):
    """Root of every error the project raises on purpose."""


def first_cause(error: BaseException) -> BaseException:
    """The first plain error of nested groups: the others are what it brought down."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


class LogError(RelumeError):
    """Something is wrong with the log or with what was read from it."""


class UnknownEvent(LogError):
    """A record carries a tag this build does not know.

    Raised rather than skipped: a fold that skips a fact is a fold of another log.
    Remedy: replay with the build that wrote the log, or a newer one.
    """

    def __init__(self, tag: str) -> None:
        super().__init__(
            f"unknown event {tag!r}: written by a newer Relume; read this log with that version"
        )
        self.tag = tag


class MalformedRecord(LogError):
    """A record's bytes do not decode as the event their tag names."""

    def __init__(self, detail: str) -> None:
        super().__init__(f"malformed record: {detail}")
        self.detail = detail


class CorruptSegment(LogError):
    """A segment's bytes are damaged: crc, length or version do not fit."""

    def __init__(self, detail: str, which: str = "") -> None:
        super().__init__(f"corrupt segment{which and f' {which}'}: {detail}")
        self.detail = detail


class BrokenChain(LogError):
    """A segment does not continue the one before it (I5, I6)."""

    def __init__(self, stream: str, seq: int, detail: str) -> None:
        super().__init__(f"stream {stream} breaks at segment {seq}: {detail}")
        self.detail = detail
        self.stream = stream
        self.seq = seq


class Fenced(LogError):
    """Another writer owns the stream; this one must stop."""

    def __init__(self, stream: str, epoch: int, detail: str = "another owner exists") -> None:
        super().__init__(f"stream {stream}: epoch {epoch} is fenced ({detail})")
        self.stream = stream
        self.epoch = epoch


class LogReplaced(Fenced):
    """etcd no longer has what it acknowledged to this writer: it was restored from a backup, lost its
    data, or an operator began a new log. No other process owns the stream for that reason."""

    def __init__(self, stream: str, epoch: int, seq: int) -> None:
        super().__init__(stream, epoch)
        self.seq = seq
        self.args = (
            f"stream {stream}: etcd no longer has what it acknowledged up to segment {seq}: it was "
            "restored from a backup, lost its data, or a new log began",
        )


class StreamOwned(LogError):
    """The stream has a living owner, so it cannot be opened.

    Remedy: wait for its lease to lapse, or stop the other process.
    """

    def __init__(self, stream: str, owner: str) -> None:
        super().__init__(f"stream {stream} is owned by {owner}")
        self.stream = stream
        self.owner = owner


class LogFull(LogError):
    """The writer's bounded queue (memory and spool) is full; the event was not accepted."""

    def __init__(self, stream: str, limit_bytes: int) -> None:
        super().__init__(
            f"stream {stream}: {limit_bytes} bytes are waiting for etcd; not taking more"
        )
        self.stream = stream
        self.limit_bytes = limit_bytes


class LogUnavailable(LogError):
    """etcd cannot be reached or refuses; the operation may be retried later."""

    def __init__(self, detail: str) -> None:
        super().__init__(f"the log is unavailable: {detail}")


class Compacted(LogError):
    """The requested revision has been trimmed; start from a snapshot."""

    def __init__(self, requested: int, available: int) -> None:
        super().__init__(f"revision {requested} is compacted, the log begins at {available}")
        self.requested = requested
        self.available = available
