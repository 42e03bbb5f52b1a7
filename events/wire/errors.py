"""Errors of the wire: the peer sent bytes that its protocol does not allow."""

from __future__ import annotations

from relume.events.log.errors import RelumeError


class WireError(RelumeError, ValueError):
    """Root of the errors that malformed bytes raise. Nothing else leaves a parser of this
    package."""


class FrameError(WireError):
    """Frames of the worker protocol do not parse, or contradict earlier ones: the worker's
    fault."""


class NoticeError(WireError):
    """A line of an agent is no notice: the connection is useless."""


class ReportError(WireError):
    """A frame of the report socket does not parse: the engine process's fault."""


class EnvelopeError(WireError):
    """Bytes that are no envelope of a request."""


class CallError(WireError):
    """The body of a call to a worker does not parse: the caller's fault."""


class HeaderError(WireError):
    """The value of header `name` does not parse: the sender's fault."""

    def __init__(self, name: str, detail: str) -> None:
        super().__init__(f"{name}: {detail}")
        self.name = name
        self.detail = detail
