"""What can go wrong between a client and etcd, on top of `relume.events.log.errors`.

`LogUnavailable` and its subclasses may be retried; the others need an operator.
"""

from __future__ import annotations

from relume.events.log.errors import LogError, LogUnavailable

TIMED_OUT = "DEADLINE_EXCEEDED"
"""gRPC's name of the status of a call without an answer in time."""


class CallFailed(LogUnavailable):
    """One call failed and may be retried. `code` is gRPC's name of the status.

    For a write the outcome is unknown: it may have been applied, or still be.
    """

    def __init__(self, method: str, endpoint: str, code: str, detail: str) -> None:
        super().__init__(f"{method} at {endpoint}: {code} {detail}")
        self.method = method
        self.endpoint = endpoint
        self.code = code


class NoSpace(LogUnavailable):
    """etcd's quota is used up: it refuses puts and lease grants, surely not applied.

    Remedy: delete or archive, compact, defragment, then disarm the alarm.
    """


class LeaseGone(LogError):
    """etcd does not know the lease (any more)."""

    def __init__(self, lease: int) -> None:
        super().__init__(f"lease {lease:x} is gone")
        self.lease = lease


PERMISSIONS_REMEDY = (
    "the user of etcd in --etcd lacks this permission: give each process its own user; "
    "`relume doctor --etcd-roles WORKER,...` prints the commands"
)


class AccessRefused(LogError):
    """Wrong credentials, or a role that may not do this. Retrying does not help."""


class ResponseTooLarge(LogError):
    """The answer exceeds the gRPC message limit; request less."""


class RequestRefused(LogError):
    """etcd refused the request itself (too large, malformed, unsupported)."""


class RecordTooLarge(LogError):
    """One record does not fit a segment; the event was not accepted."""

    def __init__(self, size: int, limit: int) -> None:
        super().__init__(f"a record of {size} bytes, more than {limit}")
        self.size = size
        self.limit = limit


class LogWentBack(LogError):
    """The cluster's revision is below one we have seen: history was lost or replaced."""

    def __init__(self, seen: int, present: int) -> None:
        super().__init__(f"the log is at revision {present}, but {seen} was seen before")
        self.seen = seen
        self.present = present


class BadUrl(LogError):
    """The log's address cannot be understood."""
