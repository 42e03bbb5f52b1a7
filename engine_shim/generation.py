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
import hashlib
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
SELF_TEST = "~selftest-"
"""The same with blocks to keep; no client's request has such an id."""


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


class Delivered(msgspec.Struct, frozen=True):
    """What the gateway holds of one choice: its tokens, and of a request that does not
    stream what the engine noted beside them (`records`)."""

    ids: tuple[int, ...] = ()
    note: bytes = b""


class Resume(msgspec.Struct, frozen=True):
    """How to take the request up again, and what was delivered of each choice."""

    mode: Mode
    choices: tuple[Delivered, ...] = ()

    @classmethod
    def of(cls, mode: Mode, tail: Sequence[int]) -> Resume:
        """A request of one choice."""
        return cls(mode, (Delivered(tuple(tail)),))

    def choice(self, index: int) -> Delivered:
        """What was delivered of choice `index`; nothing of one that is not named."""
        return self.choices[index] if index < len(self.choices) else Delivered()


def parse_resume(header: str, body: bytes) -> tuple[Resume, bytes]:
    """The resumption and the client's own body.

    `header` is `<mode> <n>[:<m>][,<n>[:<m>]...]`, one part a choice; `body` ends with the
    n little-endian uint32 ids of each, then the m noted bytes of each. Raises
    MalformedDispatch.
    """
    mode, _, counts = header.partition(" ")
    if mode not in ("continue", "replay"):
        raise MalformedDispatch("resume", f"unknown mode {mode[:20]!r}")
    sizes = []
    for count in counts.split(","):
        ids, colon, note = count.partition(":")
        sizes.append((number("resume", ids), number("resume", note) if colon else 0))
    size = sum(4 * ids + note for ids, note in sizes)
    if size > len(body):
        raise MalformedDispatch("resume", f"{counts[:80]} tokens in a body of {len(body)} bytes")
    at = split = len(body) - size
    tails = []
    for ids, _ in sizes:
        tail = array.array("I", body[at : at + 4 * ids])
        if sys.byteorder == "big":
            tail.byteswap()
        tails.append(tuple(tail))
        at += 4 * ids
    choices = []
    for tail, (_, note) in zip(tails, sizes, strict=True):
        choices.append(Delivered(tail, body[at : at + note]))
        at += note
    return Resume(mode, tuple(choices)), body[:split]


def reported(request: str) -> bool:
    """Whether the agent hears of the request."""
    return request != UNREPORTED and not request.startswith(SELF_TEST)


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


class Taken(msgspec.Struct):
    """Tokens of one choice that are not in a frame yet: the first one's index, their ids,
    and the engine's note of them."""

    choice: int
    start: int
    ids: list[int]
    note: bytes = b""


class Generation:
    """State of one attempt inside the API process; lives on the event loop only.

    `failure` is the `:x` kind of what broke it (`error` says what), empty while nothing
    did or when the request itself was at fault. `stepwise`: a parser reads the output, so
    delivered tokens must pass it one by one, as they did the first time. `whole`: the answer
    is rendered in one piece. `moving`: it was handed over, and ends here. `keeps_blocks`: this
    engine's checkpoints can be trusted.
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
        self.keeps_blocks = True
        self.stepwise = False
        self.whole = False
        self.moving = False
        self.engine_ids: list[str] = []
        self.flush: Callable[[], Awaitable[None]] | None = None
        self.failure = ""
        self.error = ""
        self.finish = "-"
        self.outputs = 0
        self.calls = 0
        self.width = 1
        self.choice = 0
        self._dispatch = dispatch
        self._taken: dict[int, int] = {}
        self._unsent: list[Taken] = []
        self._tool_calls: dict[int, int] = {}

    @property
    def delivered(self) -> int:
        """Tokens the client already has, of all choices."""
        return sum(len(c.ids) for c in self.resume.choices) if self.resume else 0

    @property
    def multiple(self) -> bool:
        """Several choices or prompts."""
        return self.width > 1 or self.calls > 1

    def identity(self) -> dict[str, Any]:
        """What travels to EngineCore in `sampling_params.extra_args[IDENTITY_KEY]`."""
        mark: dict[str, Any] = {"r": self.request, "a": self.attempt, "d": self._dispatch}
        if self.keeps_blocks and (self.checkpoint or self.restore):
            mark |= {"to": self.checkpoint, "from": self.restore, "p": self.priority}
        return mark

    def take(self, ids: Sequence[int], choice: int = 0, note: bytes = b"") -> None:
        """The handler takes an engine output with new tokens `ids` of `choice`."""
        self.outputs += 1
        self.choice = choice
        start = self._taken.get(choice, 0)
        self._taken[choice] = start + len(ids)
        if not ids:
            return
        last = self._unsent[-1] if self._unsent else None
        if last is not None and last.choice == choice and start != self.known(choice):
            last.ids.extend(ids)
            last.note += note
        else:
            self._unsent.append(Taken(choice, start, list(ids), note))

    def taken(self, choice: int) -> int:
        """Tokens the handler has taken of `choice`."""
        return self._taken.get(choice, 0)

    def unsent(self) -> list[Taken]:
        """Tokens not yet in a frame; forgets them."""
        unsent, self._unsent = self._unsent, []
        return unsent

    @property
    def caught_up(self) -> bool:
        """Whether what was taken last is new to the client. Without a resumption, all is."""
        return self.new_of(self.choice) or not self.delivered

    def known(self, choice: int) -> int:
        """Tokens of `choice` the client has already."""
        return len(self.resume.choice(choice).ids) if self.resume else 0

    def new_of(self, choice: int) -> bool:
        """Whether more of `choice` was taken than the client has."""
        return self._taken.get(choice, 0) > self.known(choice)

    def tool_call_id(self) -> str:
        """16 hex digits for the next tool call: the same ones in every attempt."""
        number = self._tool_calls.get(self.choice, 0)
        self._tool_calls[self.choice] = number + 1
        name = f"{self.request}/{self.choice}/{number}"
        return hashlib.sha256(name.encode()).hexdigest()[:16]


CURRENT: ContextVar[Generation | None] = ContextVar("relume_generation", default=None)
