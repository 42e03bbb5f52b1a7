"""One dispatched request, as the HTTP middleware and the engine patches share it.

The middleware makes a `Generation` from the headers of a dispatch and puts it in `CURRENT`;
the patches of `vllm_private` find it there, because vLLM's handler, its engine generator
and its response body all run in tasks that inherit the context. The patches report to it which
tokens the handler takes from the engine. It signals to the middleware when what the handler has
rendered belongs to one engine output and must leave as one frame.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import msgspec

from relume.events.wire.resumption import Resume

IDENTITY_KEY = "relume"
UNREPORTED = ""
"""Request id of the engine's own traffic, of which the agent hears nothing."""
SELF_TEST = "~selftest-"
"""The same with blocks to keep; no client's request has such an id."""


class ReplayMismatch(RuntimeError):
    """The replay did not give the tokens the client already has."""

    def __init__(self, index: int, expected: int | None, actual: int | None) -> None:
        super().__init__(f"token {index} is {actual} in the replay and {expected} with the client")
        self.index = index
        self.expected = expected
        self.actual = actual


class EngineStopped(RuntimeError):
    """The engine gave the request up: it shuts down or had to drop all."""

    def __init__(self) -> None:
        super().__init__("the engine stopped before the request was done")


def reported(request: str) -> bool:
    """Whether the agent hears of the request."""
    return request != UNREPORTED and not request.startswith(SELF_TEST)


class TokenRun(msgspec.Struct):
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
    engine's checkpoints can be trusted. `uncached`: no block of its prefix cache is read. `refused`:
    status and body of the refusal, when the request itself was at fault within its stream.
    `next_event`: number of the first event that the client does not have; -1: events have none, or it
    is not known.
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
        self.uncached = False
        self.stepwise = False
        self.whole = False
        self.moving = False
        self.engine_ids: list[str] = []
        self.flush: Callable[[], Awaitable[None]] | None = None
        self.failure = ""
        self.error = ""
        self.next_event = -1
        self.refused: tuple[int, bytes] | None = None
        self.finish = "-"
        self.outputs = 0
        self.calls = 0
        self.width = 1
        self.choice = 0
        self._dispatch = dispatch
        self._taken: dict[int, int] = {}
        self._unsent: list[TokenRun] = []
        self._tool_calls: dict[int, int] = {}
        self._items = 0

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
            self._unsent.append(TokenRun(choice, start, list(ids), note))

    def taken(self, choice: int) -> int:
        """Tokens of `choice` that the handler has consumed."""
        return self._taken.get(choice, 0)

    def unsent(self) -> list[TokenRun]:
        """Returns and clears the tokens not yet in a frame."""
        unsent, self._unsent = self._unsent, []
        return unsent

    @property
    def caught_up(self) -> bool:
        """Whether what was consumed last is new to the client. Without a resumption, all is."""
        return self.new_of(self.choice) or not self.delivered

    def known(self, choice: int) -> int:
        """Tokens of `choice` the client has already."""
        return len(self.resume.choice(choice).ids) if self.resume else 0

    def new_of(self, choice: int) -> bool:
        """Whether more of `choice` was consumed than the client has."""
        return self._taken.get(choice, 0) > self.known(choice)

    def tool_call_id(self) -> str:
        """16 hex digits for the next tool call: the same ones in every attempt."""
        number = self._tool_calls.get(self.choice, 0)
        self._tool_calls[self.choice] = number + 1
        name = f"{self.request}/{self.choice}/{number}"
        return hashlib.sha256(name.encode()).hexdigest()[:16]

    def item_id(self) -> str:
        """32 hex digits for the next item of an answer: the same ones in every attempt."""
        self._items += 1
        return hashlib.sha256(f"{self.request}/item/{self._items}".encode()).hexdigest()[:32]


CURRENT: ContextVar[Generation | None] = ContextVar("relume_generation", default=None)
