"""The observed load of a server that reports nothing itself.

The plain server's requests are counted by what passes through: their dispatch, the events
of their streams, their end (seed 002, "LRS path"). What it cannot see stays unknown: which
prompt tokens were cached, which of those without a first token wait, how full the KV cache is.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from relume.events.vocabulary import EngineFinished, EngineStep, FirstToken, RequestQueued
from relume.events.vocabulary.step_changes import AnyChange
from relume.events.wire.reports import STATED_AT_ONCE

EVERY_S = 0.1
"""Between two records of running streams."""


class ObservedRequest(Struct):
    """A request: its prompt's tokens as the gateway estimates them, and those it streamed."""

    request: str
    attempt: int
    prompt_tokens: int
    tokens: int = 0


class PlainAccount:
    """Requests at one plain server. `send` takes each record; `now` is in seconds."""

    def __init__(
        self, incarnation: int, send: Callable[[EngineStep], None], now: Callable[[], float]
    ) -> None:
        self.records = 0
        self.tokens = 0
        self._incarnation = incarnation
        self._send = send
        self._now = now
        self._held: dict[int, ObservedRequest] = {}
        self._decoding = 0
        self._next = 0
        self._since = now()
        self._tokens_since = 0

    @property
    def running(self) -> int:
        """Requests whose first token has come."""
        return self._decoding

    @property
    def waiting(self) -> int:
        """Requests without a token so far: queued or being prefilled."""
        return len(self._held) - self._decoding

    def begin(self, request: str, attempt: int, prompt_tokens: int, dispatch: bytes) -> int:
        """The request is sent. Returns its number here."""
        self._next += 1
        self._held[self._next] = ObservedRequest(request, attempt, prompt_tokens)
        self._tell(RequestQueued(request, attempt, prompt_tokens, dispatch))
        return self._next

    def stream(self, number: int, tokens: int) -> None:
        """More tokens of its answer arrived."""
        held = self._held.get(number)
        if held is None or tokens <= 0:
            return
        if not held.tokens:
            if not self._decoding:
                self._since, self._tokens_since = self._now(), 0
            self._decoding += 1
            self._tell(FirstToken(held.request, held.attempt))
        held.tokens += tokens
        self.tokens += tokens
        self._tokens_since += tokens
        if self._now() - self._since >= EVERY_S:
            self._pace()

    def end(self, number: int, reason: str) -> None:
        """Its answer ended, or it was given up. Once; later calls change nothing."""
        held = self._held.pop(number, None)
        if held is None:
            return
        if held.tokens:
            self._decoding -= 1
        self._tell(EngineFinished(held.request, held.attempt, reason, held.tokens))

    def state_again(self) -> None:
        """Report each request as far as it is: a log begins that knows none. Their dispatches are
        decisions of the former one."""
        changes: list[AnyChange] = []
        for held in self._held.values():
            changes.append(RequestQueued(held.request, held.attempt, held.prompt_tokens))
            if held.tokens:
                changes.append(FirstToken(held.request, held.attempt))
            if len(changes) >= STATED_AT_ONCE:
                self._tell(*changes)
                changes.clear()
        if changes:
            self._tell(*changes)

    def _tell(self, *changes: AnyChange) -> None:
        self._send(
            EngineStep(
                incarnation=self._incarnation,
                step=self.records,
                duration_us=0,
                batch=0,
                sum_context=0,
                prefill_tokens=0,
                waiting=self.waiting,
                kv_used=0,
                changes=changes,
            )
        )

    def _pace(self) -> None:
        """A record in place of a step: the mean time between two tokens of a stream since
        the last one, with the streams and context there are now. Gaps between steps are part
        of that time, so none is reported."""
        now = self._now()
        each = max(self._tokens_since / max(self._decoding, 1), 1.0)
        took_us = max(int((now - self._since) * 1e6 / each), 1)
        self._since, self._tokens_since = now, 0
        self.records += 1
        context = sum(h.prompt_tokens + h.tokens for h in self._held.values() if h.tokens)
        self._send(
            EngineStep(
                incarnation=self._incarnation,
                step=self.records,
                duration_us=took_us,
                batch=self._decoding,
                sum_context=context,
                prefill_tokens=0,
                waiting=self.waiting,
                kv_used=0,
            )
        )
