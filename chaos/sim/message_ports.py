"""Ports between simulated clients, gateways and workers: the meaningful part of the HTTP protocol.

A process serves an object at an address (`host:port`; the host is the name of the worker or
replica) on the network; others reach it by the address in its log record. The network carries
tokens, not bytes. Engines report a stream in stretches, not token by token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from msgspec import Struct

from relume.chaos.sim.world.virtual_loop import Process
from relume.events.wire.notices import DeathNotice
from relume.events.wire.worker_calls import Attach


class Dispatch(Struct, frozen=True, kw_only=True):
    """One attempt as it reaches an engine (headers of the worker protocol). The tokens depend on
    `content_id`: token i of equal `content_id` is the same on every healthy engine. `record`: the
    encoded decision that came with it. `delivered` tokens exist already (mode continue or replay).
    `claim`: the resume token, with which a connection may attach to the stream within `grace_s`;
    `envelope`: state daemons that may have the request; `origin`: where the stream began
    (`relume.events.wire.stream_origin`), as text. `is_stock`: its engine has no plugin, so it does not
    name token ids, and hands nothing over. `model`: an engine of another one refuses it; empty: the fleet
    has but one."""

    request: str
    attempt: int
    incarnation: int
    mode: str
    content_id: str
    prompt_tokens: int
    output_tokens: int
    delivered: int
    record: bytes
    checkpoint: tuple[str, ...] = ()
    restore: tuple[str, ...] = ()
    priority: int = 1
    prefix: tuple[int, ...] = ()
    prefix_block: int = 0
    claim: str = ""
    grace_s: int = 0
    envelope: tuple[str, ...] = ()
    origin: str = ""
    is_stock: bool = False
    model: str = ""


class Stretch(Struct, frozen=True, gc=False, kw_only=True):
    """Tokens `start..start+count-1`, the first sent at `first_ns`, the last at `last_ns`, about
    evenly between; `longest_ns` is the longest time between two of them; 0: not longer than even.
    `wrong`: an engine with damaged weights or blocks made them."""

    start: int
    count: int
    first_ns: int
    last_ns: int
    wrong: bool = False
    longest_ns: int = 0
    data: bytes = b""
    """Bytes that a gateway sends its client for them; empty on the way from an engine."""


class Answer(Protocol):
    """The gateway's end of an attempt. Called in the gateway's process."""

    def tokens(self, stretch: Stretch) -> None:
        """More of the stream."""
        ...

    def end(self, finish: str) -> None:
        """The clean end: stop, length, abort."""
        ...

    def moved(self) -> None:
        """The engine handed it over on request."""
        ...

    def attached(self, base: int, known: int) -> None:
        """The answer to `attach`: ids of `known` tokens; the engine has the payload of those from
        `base` on."""
        ...

    def refused(self, status: int) -> None:
        """The engine has no such stream, no holder has the request, or the engine refuses it."""
        ...

    def broken(self, kind: str) -> None:
        """The engine gives the answer up (`frames.FailureKind`)."""
        ...

    def taken(self) -> None:
        """Another connection continues this stream."""
        ...

    def lost(self, kind: str, detail: str) -> None:
        """The connection broke: reset, eof, refused, unreachable, stale, engine_dead."""
        ...


class Endpoint(Protocol):
    """An engine's end, in the engine's process. Called with what arrived over the wire."""

    def dispatch(self, what: Dispatch, answer: Answer) -> None:
        """Begin an attempt; messages go to `answer`, over the network."""
        ...

    def flush(self, request: str, attempt: int) -> None:
        """Report the stream up to now; without a read, engines report streams late."""
        ...

    def last_ns(self, request: str, attempt: int) -> int:
        """Time of the stream's last sent token, reported or not; 0: none."""
        ...

    def newest_ns(self) -> int:
        """Time of the last sent token of any stream."""
        ...

    def drop(self, request: str, attempt: int, answer: Answer) -> None:
        """The gateway closed the connection of `answer`: abort, or keep the stream."""
        ...

    def attach(self, what: Attach, answer: Answer) -> None:
        """Continue a buffered stream with `answer`."""
        ...

    def call(self, path: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """`GET /relume/state`, `POST /relume/handover`, `/relume/checkpoint`, ...: status and
        JSON of the answer."""
        ...

    def cross_check(
        self, body: dict[str, Any], reply: Callable[[int, dict[str, Any]], None]
    ) -> Callable[[], None]:
        """`POST /relume/cross-check`: `reply` gets status and JSON of the answer, later. Returns how
        to stop it, for when the caller is gone."""
        ...


class Ask(Struct, frozen=True, kw_only=True):
    """A request as its client sends it to a gateway. `client_id` is its x-request-id; the other
    fields are those of `Dispatch` and of the schedule's `Request`. `verdict`: its resume guarantee,
    as `gateway.classify` gives it. `tier`, `tenant`: for the admission queue. `kind`: as the
    schedule's `Request.client`; `connection`: unique, also among those of one client;
    `last_event_id`: set if the client returns. `loses_end`: its connection breaks when the end of
    the answer is on its way."""

    client_id: str
    content_id: str
    prompt_tokens: int
    output_tokens: int
    verdict: str = "exact"
    priority: int = 1
    n: int = 1
    prefix: tuple[int, ...] = ()
    prefix_block: int = 0
    tier: str = ""
    tenant: str = ""
    kind: str = "streaming"
    connection: str = ""
    last_event_id: str = ""
    loses_end: bool = False
    model: str = ""

    @property
    def key(self) -> str:
        """Key of its connection."""
        return self.connection or self.client_id


class Caller(Protocol):
    """The client's end of a request. Called in the clients' process."""

    def tokens(self, stretch: Stretch) -> None:
        """More of the answer; times are those at which it left the engine or gateway."""
        ...

    def end(self, finish: str, status: int = 200) -> None:
        """The clean end of an answer with that status."""
        ...

    def refused(self, status: int, message: str) -> None:
        """An error, before or instead of the rest: status of the answer, or of an error event. No
        message: a worker's own answer on a relayed route."""
        ...

    def cut(self) -> None:
        """The connection broke without an end."""
        ...

    def lost_end(self) -> None:
        """The client's connection broke when the end was on its way (`Ask.loses_end`)."""
        ...


class Door(Protocol):
    """A gateway's port for requests, in its process."""

    def ask(self, what: Ask, caller: Caller) -> None:
        """A client's request."""
        ...

    def flush(self, connection: str) -> None:
        """Report the answer up to now."""
        ...

    def hang_up(self, connection: str) -> None:
        """The client closed its connection."""
        ...


class Board(Protocol):
    """An agent's notice board, in its process (`relume.events.wire.notices`)."""

    def listen(self, hear: Callable[[DeathNotice], None]) -> None:
        """Add a replica as listener; sends it the last death."""
        ...


class Net(Protocol):
    """The network's interface for a process that serves on it."""

    def serve(self, address: str, process: Process, what: Endpoint | Board | Door) -> None:
        """Have `what` answer at `address`, in `process`."""
        ...

    def close(self, address: str) -> None:
        """Close the address (closed, or its process was killed): resets connections to it."""
        ...

    def answers(self, address: str) -> bool:
        """Whether a process listens there."""
        ...

    def door(self, address: str) -> Door:
        """A gateway's door for clients: calls on it travel over the network. A missing door cuts
        the caller."""
        ...
