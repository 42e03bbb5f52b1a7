"""Idle connections to an engine that is dead are not used again, and what counts as silence."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from relume.controlplane.gateway.http.upstream import Upstream, UpstreamPool
from relume.controlplane.stream.arrival import Assignment
from relume.events.vocabulary.enums import AttemptMode, TransportKind
from tests.gateway.client_requests import CHAT, chat_body
from tests.gateway.peers import Engine

SILENCE_S = 10.0


async def test_idle_connections_to_a_dead_engine_are_closed(rig):
    """Its host may not reset them, and the next request would wait there."""
    async with rig(engines=1) as r:
        await r.ask(CHAT, chat_body())
        idle = r.gateway._pool._idle
        assert [len(found) for found in idle.values()] == [1]
        r.gateway.break_streams("w0", 3, TransportKind.ENGINE_DEAD, "its agent saw it die")
        assert not any(idle.values())


class Response:
    """Takes the response to one request. `lost`: why no more of it comes."""

    def __init__(self) -> None:
        self.lost: list[str] = []

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None: ...
    def take_chunk(self, data: bytes, now: float) -> bool:
        return False

    def on_data(self, data: bytes) -> None: ...
    def on_complete(self) -> None: ...
    def on_lost(self, kind: str, detail: str) -> None:
        self.lost.append(kind)

    def on_fault(self, error: Exception) -> None:
        raise error


class Engines:
    """One engine, and the connections to it by a clock that the test sets."""

    def __init__(self, engine: Engine) -> None:
        self.now = 0.0
        self.response = Response()
        self.pool = UpstreamPool(
            lambda: self.now, keepalive_s=600.0, connect_timeout_s=5.0, silence_s=SILENCE_S,
            max_idle_per_engine=4,
        )  # fmt: skip
        self._to = Assignment(
            request="q", attempt=1, worker="w0", incarnation=3, host="127.0.0.1", port=engine.port,
            mode=AttemptMode.NEW, dispatch=b"",
        )  # fmt: skip

    async def connect(self) -> Upstream:
        return await self.pool.open(self._to)

    def send(self, upstream: Upstream) -> None:
        upstream.send(self.response, b"GET / HTTP/1.1\r\n\r\n", b"")

    def sweep(self, now: float) -> list[str]:
        """Why the response is lost by then."""
        self.now = now
        self.pool.sweep(now)
        return self.response.lost


@pytest.fixture
async def engines() -> AsyncIterator[Engines]:
    async with Engine("w0", incarnation=3) as engine:
        found = Engines(engine)
        yield found
        found.pool.close()


async def test_silence_begins_when_a_slow_client_is_read_for_again(engines: Engines) -> None:
    upstream = await engines.connect()
    engines.send(upstream)
    upstream.pause()
    assert engines.sweep(60.0) == []
    upstream.resume()
    assert engines.sweep(60.0) == [] and upstream.heard == 60.0
    assert engines.sweep(60.1 + SILENCE_S) == [TransportKind.TIMEOUT]


async def test_silence_of_an_idle_engine_begins_with_its_next_request(engines: Engines) -> None:
    """The stall watch measures it from `last_byte`."""
    first, second = await engines.connect(), await engines.connect()
    activity = engines.pool.activity["w0", 3]
    engines.now = 60.0
    engines.send(first)
    assert (activity.open_streams, activity.last_byte) == (1, 60.0)
    engines.now = 61.0
    engines.send(second)
    assert (activity.open_streams, activity.last_byte) == (2, 60.0), "the first one still waits"
