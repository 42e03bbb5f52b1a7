"""Errors of the gateway: the class says whose fault it is, the fields say what happened."""

from __future__ import annotations

from relume.events.log.errors import RelumeError


class GatewayError(RelumeError):
    """Root of the gateway's errors."""


class ClientError(GatewayError):
    """The client's request is wrong; it never reaches a worker or a worker's account.

    `param` names the field at fault, `code` is OpenAI's machine-readable code.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None
    ):
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code


class UpstreamError(GatewayError):
    """A connection to an engine could not be made. `kind` as in `SchedulerPort.observed`."""

    def __init__(self, kind: str, detail: str):
        super().__init__(f"{kind}: {detail}")
        self.kind = kind
        self.detail = detail


class UnsafeBind(GatewayError):
    """The operator asked to listen beyond loopback without API keys. Remedy: set keys."""

    def __init__(self, host: str):
        super().__init__(
            f"refusing to listen on {host} without API keys; set keys or use 127.0.0.1"
        )
        self.host = host
