"""HTTP calls and sockets of the control plane, over the simulated network.

`Session` stands in for `aiohttp.ClientSession` (one GET or POST and its JSON), `connect` for
the loop's `create_connection` (an agent's notices). Both are in place inside `standing_in`, which
also silences structlog; the code that uses them is the control plane's own.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import aiohttp
import msgspec
import structlog

from relume.chaos.sim.world.network import End, Refused, Wires
from relume.chaos.sim.world.virtual_loop import Process, current
from relume.events.wire.notices import DeathNotice, hello_line
from relume.events.wire.worker_calls import CROSS_CHECK_PATH

Body = dict[str, Any]


@contextmanager
def standing_in(wires: Wires) -> Iterator[None]:
    """Simulates HTTP sessions and connections made inside; silences logs."""
    log_config = structlog.get_config()
    structlog.configure(
        processors=[_drop],
        wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL),
        cache_logger_on_first_use=False,
    )
    wires.loop.connector = lambda factory, host, port: connect(wires, factory, host, port)
    try:
        with mock.patch.object(aiohttp, "ClientSession", lambda **how: Session(wires, **how)):
            yield
    finally:
        structlog.configure(**log_config)
        wires.loop.connector = None


def _drop(*_: Any) -> Any:
    raise structlog.DropEvent


def _me() -> Process:
    process = current()
    if process is None:
        raise RuntimeError("only a process has a network")
    return process


class Session:
    """The part of `aiohttp.ClientSession` that the control plane uses."""

    def __init__(self, wires: Wires, timeout: aiohttp.ClientTimeout | None = None, **_: Any):
        self._wires = wires
        self._timeout = timeout or aiohttp.ClientTimeout(total=300)

    def get(self, url: str, timeout: aiohttp.ClientTimeout | None = None) -> _Call:
        """A GET; enter it."""
        return _Call(self._wires, url, {}, timeout or self._timeout)

    def post(
        self, url: str, json: Body | None = None, timeout: aiohttp.ClientTimeout | None = None
    ) -> _Call:
        """A POST of JSON; enter it."""
        return _Call(self._wires, url, json or {}, timeout or self._timeout)

    async def close(self) -> None:
        """No effect: no connection stays open."""

    async def __aenter__(self) -> Session:
        return self

    async def __aexit__(self, *_: object) -> None:
        pass


class _Answer:
    """A response."""

    def __init__(self, status: int, body: Body) -> None:
        self.status = status
        self._body = body

    async def read(self) -> bytes:
        """Its bytes."""
        return msgspec.json.encode(self._body)

    async def json(self) -> Body:
        """Its JSON."""
        return self._body


class _Call:
    """One request and its answer. Raises aiohttp.ClientError, TimeoutError."""

    def __init__(self, wires: Wires, url: str, body: Body, timeout: aiohttp.ClientTimeout) -> None:
        self._wires = wires
        self._address, _, path = url.removeprefix("http://").partition("/")
        self._path = f"/{path}"
        self._body = body
        self._total_s = timeout.total
        self._end: End | None = None

    async def __aenter__(self) -> _Answer:
        try:
            async with asyncio.timeout(self._total_s):
                return await self._answered()
        except BaseException:
            self._close()  # as aiohttp does: nobody leaves what was not entered
            raise

    async def __aexit__(self, *_: object) -> None:
        self._close()

    def _close(self) -> None:
        if self._end is not None:
            self._end.close()

    async def _answered(self) -> _Answer:
        try:
            end, served = await self._wires.connect(_me(), self._address, "gateway")
        except Refused as error:
            raise aiohttp.ClientConnectionError(str(error)) from None
        self._end = end
        answer: asyncio.Future[_Answer] = asyncio.get_running_loop().create_future()

        def tell(status: int, body: Body) -> None:
            if not answer.done():
                answer.set_result(_Answer(status, body))

        def lost(kind: str, detail: str) -> None:
            if not answer.done():
                answer.set_exception(aiohttp.ServerDisconnectedError(detail))

        def reply(status: int, body: Body) -> None:
            end.peer.send(tell, status, body)

        def call() -> None:
            if self._path == CROSS_CHECK_PATH:
                stop = served.cross_check(self._body, reply)
                end.peer.lost = lambda kind, detail: stop()
            else:
                reply(*served.call(self._path, self._body))

        end.lost = lost
        end.send(call)
        return await answer


class _Socket:
    """Accepts and ignores options."""

    def setsockopt(self, *_: Any) -> None:
        """Nothing."""


class _Transport:
    """A transport to a notice board."""

    def __init__(self, end: End, protocol: asyncio.Protocol) -> None:
        self._end = end
        self._protocol = protocol

    def get_extra_info(self, name: str) -> Any:
        """The socket."""
        return _Socket() if name == "socket" else None

    def abort(self) -> None:
        """Close it at once."""
        if not self._end.closed:
            self._end.close()
            asyncio.get_running_loop().call_soon(self._protocol.connection_lost, None)


async def connect(
    wires: Wires, factory: Callable[[], asyncio.Protocol], host: str, port: int
) -> tuple[Any, asyncio.Protocol]:
    """A connection to the agent of worker `host`, as `loop.create_connection` makes it."""
    end, board = await wires.connect(_me(), f"{host}:{port}", "gateway")
    protocol = factory()
    transport: Any = _Transport(end, protocol)
    protocol.connection_made(transport)

    def lost(kind: str, detail: str) -> None:
        protocol.connection_lost(ConnectionResetError(detail) if kind == "reset" else None)

    def hear(died: DeathNotice) -> None:
        end.peer.send(protocol.data_received, died.line())

    def greet() -> None:
        end.peer.send(protocol.data_received, hello_line(host))
        board.listen(hear)

    end.lost = lost
    end.send(greet)
    return transport, protocol
