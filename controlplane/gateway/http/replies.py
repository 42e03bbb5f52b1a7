"""What the gateway itself says to clients: whole responses and errors in OpenAI's shape."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any

import msgspec
from msgspec import Struct

from relume.controlplane.gateway.errors import ClientError
from relume.controlplane.stream.error_codes import OF_MESSAGES
from relume.events.decode_errors import UNREADABLE

JSON = "application/json"

ERROR_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "timeout_error",
    411: "invalid_request_error",
    413: "invalid_request_error",
    415: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "client_closed_request",
    500: "internal_server_error",
    502: "bad_gateway_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

_STATUS_LINES = {s.value: f"HTTP/1.1 {s.value} {s.phrase}\r\n".encode() for s in HTTPStatus}

CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


class Reply(Struct, frozen=True, kw_only=True):
    """One whole response. `headers` are further name/value pairs, already safe to send.
    `close` asks to close the connection after it."""

    status: int
    body: bytes = b""
    content_type: str = JSON
    headers: tuple[tuple[str, str], ...] = ()
    close: bool = False


def status_line(status: int) -> bytes:
    """The HTTP/1.1 status line, also for codes http.HTTPStatus does not name."""
    return _STATUS_LINES.get(status) or f"HTTP/1.1 {status} Status\r\n".encode()


def error_body(
    status: int, message: str, param: str | None = None, code: str | None = None
) -> bytes:
    """The JSON of an error as OpenAI's clients read it."""
    kind = ERROR_TYPES.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    code = code or OF_MESSAGES.get(message) or str(status)
    error = {"message": message, "type": kind, "param": param, "code": code}
    return msgspec.json.encode({"error": error})


class _Refusal(Struct):
    error: dict[str, Any] | None = None
    detail: Any = None


_refusal = msgspec.json.Decoder(_Refusal).decode


def as_openai_error(status: int, body: bytes) -> bytes:
    """A worker's refusal as it is if it has OpenAI's shape, else put into it: some come from
    the framework below vLLM's handlers."""
    try:
        found = _refusal(body)
    except UNREADABLE:
        return error_body(status, body[:500].decode("utf-8", "replace") or "refused by the worker")
    if found.error is not None:
        return body
    return error_body(status, str(found.detail or "refused by the worker")[:2000])


def error_reply(
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    retry_after_s: int | None = None,
    close: bool = False,
    headers: tuple[tuple[str, str], ...] = (),
) -> Reply:
    """An error as a whole response; `retry_after_s` becomes the Retry-After header."""
    if retry_after_s is not None:
        headers = (*headers, ("retry-after", str(retry_after_s)))
    return Reply(
        status=status,
        body=error_body(status, message, param, code),
        content_type=JSON,
        headers=headers,
        close=close,
    )


def client_error_reply(error: ClientError) -> Reply:
    """The reply a `ClientError` stands for."""
    return error_reply(error.status, error.message, param=error.param, code=error.code)
