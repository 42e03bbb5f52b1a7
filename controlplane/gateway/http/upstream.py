"""Connections to engines: a bare protocol each, pooled while they are idle.

An `Upstream` carries one response at a time to its `Consumer`. Once detached it never
calls the consumer again, so the late bytes of a hung engine go nowhere. Connections are
pooled per (host, port, incarnation): a restarted engine never gets an older one's socket.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from functools import partial
from typing import Protocol, cast

import httptools
import structlog

from relume.controlplane.gateway.errors import UpstreamError
from relume.controlplane.gateway.ports import Activity
from relume.controlplane.stream.arrival import Assignment

log = structlog.get_logger("relume.gateway")

EngineKey = tuple[str, int, int]  # host, port, incarnation

DRAIN_TIMEOUT_S = 2.0  # for the end of a response whose content is complete


class Consumer(Protocol):
    """Takes one response; `on_data` is called once for each read from the socket.

    `take_chunk` is offered a read that begins where an HTTP chunk begins, with the time of
    the read; True says that it was exactly one chunk and is dealt with. What a consumer
    raises is given back to it by `on_fault`: a bug of ours says nothing of the engine.
    """

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None: ...
    def take_chunk(self, data: bytes, now: float) -> bool: ...
    def on_data(self, data: bytes) -> None: ...
    def on_complete(self) -> None: ...
    def on_lost(self, kind: str, detail: str) -> None: ...
    def on_fault(self, error: Exception) -> None: ...


class Upstream(asyncio.Protocol):
    """One connection. Idle when `consumer` is None and `_expecting` is False."""

    __slots__ = (
        "_between_chunks",
        "_clock",
        "_complete",
        "_counted",
        "_ended_chunk",
        "_expecting",
        "_generates",
        "_headers",
        "_keep",
        "_parser",
        "_parts",
        "_pool",
        "activity",
        "consumer",
        "deadline",
        "heard",
        "key",
        "on_body",
        "on_chunk_complete",
        "on_chunk_header",
        "reused",
        "transport",
        "untouched",
    )

    def __init__(self, pool: UpstreamPool, key: EngineKey, activity: Activity) -> None:
        self._pool = pool
        self._clock = pool.clock
        self.key = key
        self.activity = activity
        self.consumer: Consumer | None = None
        self.transport: asyncio.Transport | None = None
        self.reused = False
        self.untouched = True  # no byte of the current response has come
        self.deadline = 0.0
        self.heard = 0.0  # when the last bytes came
        # What the parser calls for each chunk is bound to C functions: it costs next to nothing.
        self._parts: list[bytes] = []
        self.on_body = self._parts.append
        self._ended_chunk: list[bool] = []
        self.on_chunk_header = self._ended_chunk.clear
        self.on_chunk_complete = partial(self._ended_chunk.append, True)
        self._parser = httptools.HttpResponseParser(self)
        self._headers: dict[bytes, bytes] = {}
        self._expecting = False
        self._complete = False
        self._between_chunks = False
        self._counted = False
        self._generates = True
        self._keep = True

    # --- used by the consumer

    def send(
        self,
        consumer: Consumer,
        head: bytes,
        body: bytes,
        tail: bytes = b"",
        generates: bool = True,
    ) -> None:
        """Send a request (head ends with the blank line) whose response goes to `consumer`.

        `generates`: tokens are due, so silence is evidence about the engine; other
        requests stay out of its activity.
        """
        self.consumer = consumer
        self._generates = generates
        self._expecting = True
        self._complete = False
        self._between_chunks = False
        self.untouched = True
        self._count(True)
        self.heard = self._clock()
        self.deadline = self.heard + self._pool.silence_s
        assert self.transport is not None
        if len(body) + len(tail) <= 16384:
            self.transport.write(head + body + tail)
        else:
            self.transport.writelines([head, body, tail] if tail else [head, body])

    def pause(self) -> None:
        """Stop reading: the client is slower than the engine."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.pause_reading()
            self._count(False)
            self.deadline = float("inf")

    def resume(self) -> None:
        """Read on after `pause`."""
        if self.transport is not None and not self.transport.is_closing():
            self.transport.resume_reading()
            self._count(True)
            self.heard = self._clock()
            self.deadline = self.heard + self._pool.silence_s

    def abandon(self) -> None:
        """Drop the connection and whatever still comes; the engine aborts the request."""
        self.consumer = None
        self._count(False)
        if self.transport is not None:
            self.transport.abort()

    def release(self) -> None:
        """The consumer has all it wants; reuse the connection once the response has ended."""
        self.consumer = None
        self._count(False)
        if self._complete:
            self._finish()
        else:
            self.deadline = self._clock() + DRAIN_TIMEOUT_S

    def _count(self, waiting: bool) -> None:
        """Account this connection in its engine's activity, or take it out again."""
        if waiting is self._counted or (waiting and not self._generates):
            return
        self._counted = waiting
        activity = self.activity
        if waiting:
            if activity.open_streams == 0:
                activity.last_byte = self._clock()
            activity.open_streams += 1
        else:
            activity.open_streams -= 1

    def _finish(self) -> None:
        self._expecting = False
        if self._keep:
            self._pool.give_back(self)
        elif self.transport is not None:
            self.transport.close()

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        now = self._clock()
        self.heard = now
        if self._generates:
            self.activity.last_byte = now
        # A token a read is the rule while an engine decodes. Such a read is one HTTP chunk,
        # which the consumer can take whole: the parser, being between chunks, need not see it.
        consumer = self.consumer
        try:
            if self._between_chunks and consumer is not None:
                if consumer.take_chunk(data, now):
                    return
            self._parse(data)
        except Exception as error:  # the edge of one response
            self._fault(consumer, error)

    def _parse(self, data: bytes) -> None:
        if not self._expecting:
            self._lose("engine_error", "bytes without a request")
            return
        self.untouched = False
        broken = ""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            broken = f"not HTTP: {error!r:.120}"
        # the last callback was a chunk's end, and no part of the next one's head was read
        self._between_chunks = bool(self._ended_chunk) and data[-2:] == b"\r\n"
        parts = self._parts
        if parts:
            body = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            if self.consumer is not None:
                self.consumer.on_data(body)
        if broken:
            self._lose("engine_error", broken)
        elif self._complete:
            if self.consumer is not None:
                self.consumer.on_complete()
            elif self._expecting:
                self._finish()

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        kind = "reset" if isinstance(exc, ConnectionError) else "eof"
        self._lose(kind, str(exc) if exc else "closed by the engine")
        self.transport = None

    def _lose(self, kind: str, detail: str) -> None:
        consumer, self.consumer = self.consumer, None
        self._count(False)
        if self.transport is not None:
            self.transport.abort()
        if consumer is not None:
            try:
                consumer.on_lost(kind, detail)
            except Exception as error:  # the edge of one response
                consumer.on_fault(error)

    def _fault(self, consumer: Consumer | None, error: Exception) -> None:
        """Our own code failed on the response: the connection goes, the engine is not blamed."""
        self.consumer = None
        self._count(False)
        if self.transport is not None:
            self.transport.abort()
        if consumer is not None:
            consumer.on_fault(error)
        else:
            log.error("abandoned_response_broke", exc_info=error)

    def expire(self, now: float) -> None:
        """Called by the pool's sweep: enforce the deadline of the current state."""
        if self.consumer is not None and self.heard + self._pool.silence_s >= now:
            self.deadline = self.heard + self._pool.silence_s
        else:
            self._lose("timeout", "silent for too long")

    # --- httptools callbacks

    def on_message_begin(self) -> None:
        self._headers = {}

    def on_header(self, name: bytes, value: bytes) -> None:
        if len(self._headers) < 128:
            self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self.consumer is not None:
            self.consumer.on_head(status, self._headers)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self._complete = True
            self._keep = self._parser.should_keep_alive()


class UpstreamPool:
    """All connections to engines, and the activity account of each incarnation."""

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        keepalive_s: float,
        connect_timeout_s: float,
        silence_s: float,
        max_idle_per_engine: int,
    ) -> None:
        self.clock = clock
        self.silence_s = silence_s
        self.activity: dict[tuple[str, int], Activity] = {}
        self._keepalive_s = keepalive_s
        self._connect_timeout_s = connect_timeout_s
        self._max_idle = max_idle_per_engine
        self._idle: dict[EngineKey, list[Upstream]] = {}
        self._all: dict[Upstream, None] = {}

    def activity_of(self, worker: str, incarnation: int) -> Activity:
        """The account of an incarnation; older idle ones of the worker are dropped."""
        found = self.activity.get((worker, incarnation))
        if found is None:
            for key in [k for k in self.activity if k[0] == worker and k[1] < incarnation]:
                if self.activity[key].open_streams == 0:
                    del self.activity[key]
            found = self.activity[worker, incarnation] = self.new_activity()
        return found

    def new_activity(self) -> Activity:
        """An empty account."""
        return Activity(self.clock())

    def take(self, to: Assignment) -> Upstream | None:
        """An idle connection to that incarnation, the one used last, or None."""
        idle = self._idle.get((to.host, to.port, to.incarnation))
        while idle:
            upstream = idle.pop()
            if upstream.transport is not None and not upstream.transport.is_closing():
                upstream.reused = True
                return upstream
        return None

    async def open(self, to: Assignment) -> Upstream:
        """A new connection. Raises `UpstreamError` (refused, unreachable)."""
        key = (to.host, to.port, to.incarnation)
        upstream = Upstream(self, key, self.activity_of(to.worker, to.incarnation))
        upstream.deadline = float("inf")
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                transport, _ = await loop.create_connection(lambda: upstream, to.host, to.port)
        except TimeoutError as error:
            raise UpstreamError("unreachable", "no connection in time") from error
        except OSError as error:
            raise UpstreamError("refused", str(error)) from error
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._all[upstream] = None
        return upstream

    def give_back(self, upstream: Upstream) -> None:
        """Keep an idle connection for the next request to its engine."""
        idle = self._idle.setdefault(upstream.key, [])
        transport = upstream.transport
        if transport is None or transport.is_closing():
            return
        if len(idle) >= self._max_idle:
            transport.close()
            return
        upstream.deadline = self.clock() + self._keepalive_s
        idle.append(upstream)

    def forget(self, upstream: Upstream) -> None:
        """A connection is gone."""
        self._all.pop(upstream, None)
        idle = self._idle.get(upstream.key)
        if idle is None:
            return
        if upstream in idle:
            idle.remove(upstream)
        if not idle:
            del self._idle[upstream.key]

    def sweep(self, now: float) -> None:
        """Close what is idle too long and fail what is silent too long."""
        for upstream in [u for u in self._all if now > u.deadline]:
            upstream.expire(now)

    def drop(self, activity: Activity) -> None:
        """Close the idle connections of one incarnation (it hangs or is gone)."""
        for idle in list(self._idle.values()):
            for upstream in [u for u in idle if u.activity is activity]:
                idle.remove(upstream)
                upstream.abandon()

    def close(self) -> None:
        """Close every connection."""
        for upstream in list(self._all):
            upstream.abandon()
