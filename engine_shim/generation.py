"""One dispatched request, as the HTTP middleware and the engine patches share it.

The middleware makes a `Generation` from the x-relume headers and puts it in `CURRENT`;
the patches of `vllm_private` find it there, because vLLM's handler, its engine generator
and its response body all run in tasks that inherit the context. The patches tell it
which tokens the handler takes from the engine; it tells the middleware when what the
handler has rendered belongs to one engine output and must leave as one frame.
"""

from __future__ import annotations

import array
import base64
import re
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any, Literal

import msgspec

_REQUEST_ID = re.compile(r"[A-Za-z0-9_.-]{1,64}")

Mode = Literal["continue", "replay"]
IDENTITY_KEY = "relume"
UNREPORTED = ""
"""Request id of the engine's own traffic, of which the agent hears nothing."""


class MalformedDispatch(ValueError):
    """The x-relume headers or the resume tail do not read: the gateway's fault."""

    def __init__(self, header: str, detail: str) -> None:
        super().__init__(f"x-relume-{header}: {detail}")
        self.header = header


class ReplayMismatch(RuntimeError):
    """The replay did not give the tokens the client already has."""

    def __init__(self, index: int, expected: int | None, actual: int | None) -> None:
        super().__init__(f"token {index} is {actual} in the replay and {expected} with the client")
        self.index = index
        self.expected = expected
        self.actual = actual


class EngineStopped(RuntimeError):
    """The engine gave the request up by itself: it shuts down or was told to drop all."""

    def __init__(self) -> None:
        super().__init__("the engine stopped before the request was done")


class Resume(msgspec.Struct, frozen=True):
    """How to take the request up again, and the tokens the client has."""

    mode: Mode
    tail: tuple[int, ...]


def parse_resume(header: str, body: bytes) -> tuple[Resume, bytes]:
    """The resumption and the client's own body.

    `header` is `<mode> <n>`; the last 4*n bytes of `body` are little-endian uint32 ids.
    Raises MalformedDispatch.
    """
    mode, _, count = header.partition(" ")
    if mode not in ("continue", "replay"):
        raise MalformedDispatch("resume", f"unknown mode {mode[:20]!r}")
    size = 4 * number("resume", count)
    if size > len(body):
        raise MalformedDispatch("resume", f"{count} tokens in a body of {len(body)} bytes")
    split = len(body) - size
    ids = array.array("I", body[split:])
    if sys.byteorder == "big":
        ids.byteswap()
    return Resume(mode, tuple(ids)), body[:split]


def number(header: str, text: str) -> int:
    """A decimal number of at most nine digits. Raises MalformedDispatch."""
    if not (text.isascii() and text.isdecimal() and len(text) <= 9):
        raise MalformedDispatch(header, f"{text[:20]!r} is not a number")
    return int(text)


def request_id(text: str) -> str:
    """Raises MalformedDispatch."""
    if not _REQUEST_ID.fullmatch(text):
        raise MalformedDispatch("request", f"{text[:80]!r} is no request id")
    return text


def dispatch_record(text: str) -> bytes:
    """The encoded decision, from unpadded or padded base64url. Raises MalformedDispatch."""
    try:
        return base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
    except ValueError as error:
        raise MalformedDispatch("dispatch", str(error)) from None


class Generation:
    """State of one attempt inside the API process; lives on the event loop only.

    `failure` is the `:x` kind of what broke it (`error` says what), empty while nothing
    did or when the request itself was at fault.
    """

    def __init__(
        self,
        request: str,
        attempt: int,
        dispatch: bytes = b"",
        resume: Resume | None = None,
        cached_tokens: int = 0,
        checkpoint: tuple[str, ...] = (),
        restore: tuple[str, ...] = (),
        priority: int = 1,
    ) -> None:
        self.request = request
        self.attempt = attempt
        self.resume = resume
        self.cached_tokens = cached_tokens
        self.checkpoint = checkpoint
        self.restore = restore
        self.priority = priority
        self.flush: Callable[[], Awaitable[None]] | None = None
        self.failure = ""
        self.error = ""
        self.finish = "-"
        self.outputs = 0
        self.calls = 0
        self._dispatch = dispatch
        self._taken = 0
        self._unsent: list[int] = []

    @property
    def delivered(self) -> int:
        """Tokens the client already has."""
        return len(self.resume.tail) if self.resume else 0

    @property
    def multiple(self) -> bool:
        """Several choices or prompts: token indices mean nothing."""
        return self.finish == "multi" or self.calls > 1

    def identity(self) -> dict[str, Any]:
        """What travels to EngineCore in `sampling_params.extra_args[IDENTITY_KEY]`."""
        mark: dict[str, Any] = {"r": self.request, "a": self.attempt, "d": self._dispatch}
        if self.checkpoint or self.restore:
            mark |= {"to": self.checkpoint, "from": self.restore, "p": self.priority}
        return mark

    def take(self, ids: Sequence[int]) -> None:
        """The handler takes an engine output with new tokens `ids`."""
        self.outputs += 1
        self._taken += len(ids)
        self._unsent.extend(ids)

    def unsent(self) -> tuple[int, list[int]]:
        """Index of the first token not yet in a frame, and those tokens; forgets them."""
        ids, self._unsent = self._unsent, []
        return self._taken - len(ids), ids

    @property
    def caught_up(self) -> bool:
        """Whether anything taken so far is new to the client. Without a resumption, all is."""
        return self._taken > self.delivered or not self.delivered


CURRENT: ContextVar[Generation | None] = ContextVar("relume_generation", default=None)
