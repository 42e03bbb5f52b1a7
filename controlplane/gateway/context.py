"""What all sessions of one gateway share, and the client's side of one of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

from msgspec import Struct

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.gateway.http.replies import Reply
from relume.controlplane.gateway.http.upstream import UpstreamPool
from relume.controlplane.gateway.openai.token_counts import Tokens
from relume.controlplane.gateway.ports import SchedulerPort
from relume.controlplane.stream.arrival import Arrival


class Counters(Struct, kw_only=True):
    """What the gateway counts since start; read by telemetry."""

    clients: int = 0
    requests: int = 0
    in_flight: int = 0
    failovers: int = 0
    moves: int = 0
    waits: int = 0
    tokens: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    rejected: int = 0
    refused: int = 0

    @property
    def ended(self) -> int:
        """Requests that got their terminal event."""
        return self.completed + self.cancelled + self.failed + self.rejected


class StopCounts(Struct, frozen=True, kw_only=True):
    """The requests of a gateway that stops: those that `ended` by themselves until then, resumable
    streams `moved` to other replicas, and those `cut` with an error."""

    ended: int
    moved: int
    cut: int


class LiveAttempt(Protocol):
    """A session with an attempt under way, offered by `request_session.RequestSession`."""

    @property
    def arrival(self) -> Arrival: ...
    @property
    def delivered(self) -> int: ...
    @property
    def is_movable(self) -> bool: ...
    @property
    def attempt(self) -> int: ...
    def silence_began(self, before: float) -> float: ...
    @property
    def withholds(self) -> bool: ...
    def worker_lost(self, cause: str, detail: str = "") -> None: ...
    def doubted(self, detail: str) -> None: ...
    def shut_down(self) -> None: ...


class Context(Struct, frozen=True, kw_only=True):
    """What every session of one gateway shares."""

    scheduler: SchedulerPort
    pool: UpstreamPool
    config: GatewayConfig
    clock: Callable[[], float]
    spawn: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
    counters: Counters
    attempts: dict[tuple[str, int], dict[LiveAttempt, None]]
    """Under way on each engine incarnation, in the order in which they were sent there."""
    tokens: Tokens | None = None
    """Counts prompts; None: they are estimated."""


class ClientPort(Protocol):
    """The client's side of one session, offered by `server.ClientConnection`. `chunked`:
    whether the body begun is sent in HTTP chunks. `lost`: the connection is gone.
    `undelivered`: bytes of the answer that the client's end has not acknowledged, or had not
    when the connection was lost."""

    chunked: bool

    @property
    def lost(self) -> bool: ...
    @property
    def undelivered(self) -> int: ...

    def reply(self, reply: Reply) -> None:
        """Send a whole response; the session is over."""
        ...

    def begin(self, head: bytes, first: bytes, last: bool = False) -> None:
        """Send a head (without the blank line) and the first bytes of the body; `last`: they
        are all of it, and the session is over."""
        ...

    def write(self, data: bytes) -> None:
        """Send more of the body."""
        ...

    def write_chunk(self, chunk: bytes) -> None:
        """Send more of a chunked body, given as one whole HTTP chunk."""
        ...

    def finish(self, data: bytes = b"", close: bool = False) -> None:
        """Send the last bytes of the body; the session is over."""
        ...

    def break_off(self) -> None:
        """Cut the response where it is: its framing cannot say that it failed."""
        ...
