"""Errors of the admin API, the one table that maps them to HTTP, and answers in JSON."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import structlog
from aiohttp import web
from msgspec import Struct

from relume.controlplane.history.errors import HistoryGap
from relume.events.log.errors import (
    Compacted,
    Fenced,
    LogError,
    LogFull,
    LogUnavailable,
    RelumeError,
)

log = structlog.get_logger("relume.admin")


class AdminError(RelumeError):
    """Root of the errors that the admin API returns. `param` names the field at fault."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class BadRequest(AdminError):
    """The call does not make sense; the caller's to repair."""


class Unauthenticated(AdminError):
    """No bearer token, or an unknown one."""


class Forbidden(AdminError):
    """The token's role may not do this."""


class NotFound(AdminError):
    """There is no such thing in the fold or the log."""


class Conflict(AdminError):
    """The leader refused, or the idempotency key was used for another command."""


class TooFewWorkers(Conflict):
    """The leader refused a drain that leaves too few open workers of the model."""


class TooManyFollowers(AdminError):
    """The bound on open event streams is reached."""


class UnhealthyReply(Exception):
    """Not an error: /health answers 503 with its usual body."""

    def __init__(self, status: str, health: Struct) -> None:
        super().__init__(status)
        self.health = health


class Answer(Struct, frozen=True):
    """How an error is returned: HTTP status, OpenAI's `type`, and our `code`."""

    status: int
    type: str
    code: str


TABLE: dict[type[RelumeError], Answer] = {
    BadRequest: Answer(400, "invalid_request_error", "bad_request"),
    Unauthenticated: Answer(401, "authentication_error", "unauthenticated"),
    Forbidden: Answer(403, "permission_error", "forbidden"),
    NotFound: Answer(404, "not_found_error", "not_found"),
    Conflict: Answer(409, "conflict_error", "conflict"),
    TooFewWorkers: Answer(409, "conflict_error", "too_few_workers"),
    Compacted: Answer(410, "not_found_error", "trimmed"),
    HistoryGap: Answer(410, "not_found_error", "trimmed"),
    TooManyFollowers: Answer(429, "rate_limit_error", "too_many_followers"),
    Fenced: Answer(503, "service_unavailable_error", "fenced"),
    LogFull: Answer(503, "service_unavailable_error", "log_full"),
    LogUnavailable: Answer(503, "service_unavailable_error", "log_unavailable"),
    LogError: Answer(500, "server_error", "log_error"),
}
RETRY_AFTER_S = {429: "5", 503: "2"}
"""Every answer with such a status says when to try again."""


def answer_for(error: RelumeError) -> Answer:
    """The row of the nearest base class of `error`."""
    for base in type(error).__mro__:
        if base in TABLE:
            return TABLE[base]
    return Answer(500, "server_error", "internal")


def body(message: str, kind: str, code: str, param: str | None = None) -> dict[str, Any]:
    """An error body in OpenAI's shape."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def json_answer(answer: Any, status: int = 200) -> web.Response:
    """`answer` as JSON, never stored by caches."""
    headers = {"Cache-Control": "no-store"}
    if status in RETRY_AFTER_S:
        headers["Retry-After"] = RETRY_AFTER_S[status]
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        body=msgspec.json.encode(answer),
        status=status,
        content_type="application/json",
        headers=headers,
    )


@web.middleware
async def answer_errors(request: web.Request, handler: Any) -> web.StreamResponse:
    """Turn what a handler raises into an answer."""
    try:
        return await handler(request)
    except RelumeError as error:
        row = answer_for(error)
        param = getattr(error, "param", None)
        if row.status >= 500:
            log.warning("admin_failed", path=request.path, reason=str(error))
        return json_answer(body(str(error), row.type, row.code, param), row.status)
    except UnhealthyReply as unserving:
        return json_answer(unserving.health, 503)
    except web.HTTPException as refused:
        kind = "not_found_error" if refused.status == 404 else "invalid_request_error"
        text = f"{request.method} {request.path}: {refused.reason}; see /admin/v1/openapi.json"
        answer = json_answer(body(text, kind, f"http_{refused.status}"), refused.status)
        if "Allow" in refused.headers:
            answer.headers["Allow"] = refused.headers["Allow"]
        return answer
    except asyncio.CancelledError:
        raise
    except Exception:  # the process edge: a bug in one answer must not end the replica
        log.exception("admin_bug", path=request.path)
        return json_answer(body("internal error; see the log", "server_error", "internal"), 500)
