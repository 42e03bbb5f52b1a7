"""Errors in the shape of the API that the client called: OpenAI's older ones, its Responses, or
Anthropic's Messages."""

from __future__ import annotations

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from relume.controlplane.gateway.http.replies import Reply
from relume.controlplane.stream.answer import DONE
from relume.events.decode_errors import UNREADABLE

_ANTHROPIC = "/v1/messages"
_RESPONSES = "/v1/responses"

_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class _Error(Struct):
    message: str = ""
    param: str | None = None
    code: str | int | None = None


class _Body(Struct):
    error: _Error
    type: str = ""


_read = msgspec.json.Decoder(_Body).decode


def in_shape_of(path: str, reply: Reply) -> Reply:
    """The reply as clients of `path` read it; itself unless it is an error of another shape."""
    if reply.status < 400 or not _is_anthropic(path):
        return reply
    try:
        found = _read(reply.body)
    except UNREADABLE:
        return reply
    if found.type == "error":
        return reply
    return replace(reply, body=_anthropic_error(reply.status, found.error.message))


def error_event(path: str, reply: Reply, number: int) -> bytes:
    """The end of a broken stream whose 200 is already out: the error as an event, as the API of
    `path` has it. `number`: of the event, where events have numbers; -1: unknown."""
    if _is_anthropic(path):
        return b"event: error\ndata: " + in_shape_of(path, reply).body + b"\n\n"
    if path == _RESPONSES:
        return b"event: error\ndata: " + _numbered_error(reply, number) + b"\n\n"
    return b"data: " + reply.body + b"\n\n" + DONE


def _is_anthropic(path: str) -> bool:
    return path == _ANTHROPIC or path.startswith(_ANTHROPIC + "/")


def _numbered_error(reply: Reply, number: int) -> bytes:
    error = _read(reply.body).error
    numbered = {"sequence_number": number} if number >= 0 else {}
    content = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
    return msgspec.json.encode({**content, **numbered})


def _anthropic_error(status: int, message: str) -> bytes:
    kind = _ANTHROPIC_TYPES.get(status)
    kind = kind or ("invalid_request_error" if status < 500 else "api_error")
    error = {"type": kind, "message": message}
    return msgspec.json.encode({"type": "error", "error": error})
