"""Between simulated gateways and simulated workers: what of the HTTP protocol has a meaning.

A gateway reaches a worker by the address its log record names, over `Wires`; bytes are not
simulated, tokens are. A stream is told in stretches, not token by token.
"""

from __future__ import annotations

from typing import Any, Protocol

from msgspec import Struct


class Dispatch(Struct, frozen=True):
    """One attempt as it reaches an engine (headers of the worker protocol). `asked` names what
    the tokens depend on: token i of equal `asked` is the same on every healthy engine. `record`:
    the encoded decision that came with it. `delivered` tokens are there already (mode continue
    or replay)."""

    request: str
    attempt: int
    incarnation: int
    mode: str
    asked: str
    prompt_tokens: int
    output_tokens: int
    delivered: int
    record: bytes
    checkpoint: tuple[str, ...] = ()
    restore: tuple[str, ...] = ()
    priority: int = 1
    prefix: tuple[int, ...] = ()
    prefix_block: int = 0


class Stretch(Struct, frozen=True, gc=False):
    """Tokens `start..start+count-1`, the first sent at `first_ns`, the last at `last_ns`, evenly
    between. `wrong`: an engine with damaged weights or blocks made them."""

    start: int
    count: int
    first_ns: int
    last_ns: int
    wrong: bool = False


class Answer(Protocol):
    """The gateway's end of an attempt. Called in the gateway's process."""

    def tokens(self, stretch: Stretch) -> None:
        """More of the stream."""
        ...

    def end(self, finish: str) -> None:
        """The clean end: stop, length, abort."""
        ...

    def moved(self) -> None:
        """Handed over as asked."""
        ...

    def lost(self, kind: str, detail: str) -> None:
        """The connection broke: reset, eof, refused, unreachable, stale, engine_dead."""
        ...


class Endpoint(Protocol):
    """An engine's end, in the engine's process. Called with what arrived over the wire."""

    def dispatch(self, what: Dispatch, answer: Answer) -> None:
        """Begin an attempt; `answer` hears of it, over the wire again."""
        ...

    def flush(self, request: str, attempt: int) -> None:
        """Tell now what of the stream is there; streams are told late while nobody asks."""
        ...

    def drop(self, request: str, attempt: int) -> None:
        """The gateway closed the connection: abort."""
        ...

    def call(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """`GET /relume/state`, `POST /relume/handover`, `/relume/checkpoint`, ...: status and
        JSON of the answer."""
        ...
