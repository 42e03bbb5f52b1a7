"""What can go wrong with KV blocks on their way. The class says whose fault it is."""

from __future__ import annotations

from relume.events.log.errors import RelumeError
from relume.events.wire.errors import WireError


class KvStreamError(RelumeError):
    """Root of errors of the KV stream; the answer to any of them is to recompute."""


class MalformedMessage(KvStreamError, WireError):
    """The other end sent bytes that are no message of this protocol, or too many."""


class Refusal(KvStreamError):
    """The state daemon refused. `code`: version, authentication, fenced, fingerprint,
    budget, memory, digest, malformed, unknown, session, busy."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(f"refused ({code}): {detail}")
        self.code = code
        self.detail = detail


class Unreachable(KvStreamError):
    """No answer within the time allowed; the blocks may still be there."""

    def __init__(self, endpoint: str, detail: str) -> None:
        super().__init__(f"{endpoint}: {detail}")
        self.endpoint = endpoint


class Unshapeable(KvStreamError):
    """Two inference setups between which KV blocks cannot be converted."""
