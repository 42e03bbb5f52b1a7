"""The client's side of one connection: requests in order, one answer at a time.

Requests that arrive early wait, bounded, and reading pauses meanwhile. Every wait has a
deadline kept as one number per connection and enforced by the gateway's sweep, so an idle
connection costs its memory and nothing else. A request that is refused before its body is
read closes the connection, after a short linger in which what still comes is thrown away
(else a reset would eat the answer).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Protocol, cast

import structlog

from relume.controlplane.gateway.context import Counters
from relume.controlplane.gateway.deliveries import unacknowledged
from relume.controlplane.gateway.http.cross_origin import CrossOrigin
from relume.controlplane.gateway.http.error_shapes import in_shape_of
from relume.controlplane.gateway.http.reading import (
    BODY,
    HEAD,
    IDLE,
    Request,
    RequestIntake,
    RequestReader,
    broke,
)
from relume.controlplane.gateway.http.replies import CONTINUE, Reply, error_reply, status_line
from relume.controlplane.stream.error_codes import TOO_MANY_CLIENTS

log = structlog.get_logger("relume.gateway")

NEVER = float("inf")


class ActiveExchange(Protocol):
    """What serves the current request when it is not answered at once."""

    def client_gone(self) -> None: ...
    def pause(self) -> None: ...
    def resume(self) -> None: ...


class Service(RequestIntake, Protocol):
    """What the connections of one gateway share; offered by `request_service.RequestService`."""

    counters: Counters
    clock: Callable[[], float]
    clients: set[ClientConnection]
    draining: bool
    date_header: bytes
    cross_origin: CrossOrigin

    def serve(self, request: Request, connection: ClientConnection) -> Reply | ActiveExchange:
        """Answer at once, or start an exchange that answers through the connection."""
        ...


class ClientConnection(asyncio.Protocol):
    """One client connection."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._config = service.config
        self._clock = service.clock
        self._transport: asyncio.Transport | None = None
        self._reader = RequestReader(service, self)
        self.deadline = NEVER
        self._waiting: deque[Request] = deque()  # read, and not yet served
        self._current: Request | None = None
        self._active: ActiveExchange | None = None
        self.chunked = False
        self._pumping = False
        self._reading_paused = False
        self._writing_paused = False
        self._flush_until = NEVER
        self._lingered = 0
        self._undelivered = 0  # of a lost connection

    # --- asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = client = cast(asyncio.Transport, transport)
        limit = self._config.stream_buffer_bytes
        client.set_write_buffer_limits(high=limit, low=limit // 4)
        service = self._service
        service.clients.add(self)
        service.counters.clients += 1
        self.deadline = self._clock() + self._config.keepalive_timeout_s
        if len(service.clients) > self._config.max_clients:
            self._reader.refuse(error_reply(503, TOO_MANY_CLIENTS, retry_after_s=1))
            self._pump()

    def data_received(self, data: bytes) -> None:
        reader = self._reader
        if reader.closed:
            self._discard(len(data))
            return
        reader.feed(data)
        if self._waiting:
            self._pump()
        if self._busy() and (self._waiting or reader.state is not IDLE):
            self._pause_reading()

    def _busy(self) -> bool:
        return self._current is not None or self._writing_paused

    def _discard(self, size: int) -> None:
        """Unread bytes: wait with them while an answer is due, then then discard a few at
        most."""
        if self._busy() or self._waiting:
            self._pause_reading()
            return
        self._lingered += size
        if self._lingered > self._config.linger_bytes:
            self.abort()

    def eof_received(self) -> bool | None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        self._service.clients.discard(self)
        self._undelivered = self.undelivered
        self._transport = None
        self._reader.drop()
        self._drop_bodies()
        active, self._active = self._active, None
        self._current = None
        if active is not None:
            active.client_gone()

    def pause_writing(self) -> None:
        self._writing_paused = True
        self.deadline = self._clock() + self._config.client_stall_timeout_s
        if self._active is not None:
            self._active.pause()

    def resume_writing(self) -> None:
        self._writing_paused = False
        if self._active is not None:
            self.deadline = NEVER
            self._active.resume()
        elif self._current is None:
            self._pump()

    # --- reading.Owner

    def progressed(self) -> None:
        """A head began, or a body: its time runs from now."""
        if not self._busy():
            self._set_deadline()
            self._say_continue()

    def take(self, request: Request) -> None:
        """A request was read, or refused while it was."""
        self._waiting.append(request)
        if len(self._waiting) > self._config.max_pipelined:
            self._reader.closed = True  # later bytes are never read; the client may send them again

    # --- serving, in order

    def _pump(self) -> None:
        """Serve what waits while nothing is being served."""
        if self._pumping:
            return
        self._pumping = True
        try:
            while self._waiting and not self._busy() and self._transport is not None:
                request = self._current = self._waiting.popleft()
                self.deadline = NEVER
                answer = request.refusal or self._served(request)
                if isinstance(answer, Reply):
                    self.reply(answer)
                elif self._current is request:
                    self._active = answer
        finally:
            self._pumping = False
        if not self._busy() and self._transport is not None and not self._reader.closed:
            self._await_next()

    def _served(self, request: Request) -> Reply | ActiveExchange:
        try:
            return self._service.serve(request, self)
        except Exception:  # the edge of one request
            log.exception("serving_broke", client_id=request.request_id)
            return broke()

    def _await_next(self) -> None:
        """Nothing is being served: listen again."""
        if self._reading_paused:
            self._reading_paused = False
            assert self._transport is not None
            self._transport.resume_reading()
        self._set_deadline()
        self._say_continue()

    def _set_deadline(self) -> None:
        config, state = self._config, self._reader.state
        if state is BODY:
            patience_s = config.body_timeout_s
        elif state is HEAD:
            patience_s = config.header_timeout_s
        else:
            patience_s = config.keepalive_timeout_s
        self.deadline = self._clock() + patience_s

    def _say_continue(self) -> None:
        reader = self._reader
        if reader.expects and reader.state is BODY and not (self._waiting or reader.begun):
            reader.expects = False
            assert self._transport is not None
            self._transport.write(CONTINUE)

    def _done(self, close: bool) -> None:
        """The current request is answered."""
        request, self._current = self._current, None
        self._active = None
        if request is not None:
            self._service.bodies_bytes -= len(request.body)
        if self._transport is None:
            return
        if close:
            self._linger()
        else:
            self._pump()

    # --- ClientPort, called by the exchange being served

    def reply(self, reply: Reply) -> None:
        """Send a whole response and continue with the next request."""
        request = self._current
        if request is None or self._transport is None:
            return
        close = self._closes(request) or reply.close
        reply = in_shape_of(request.path, reply)
        self._transport.write(self._render(reply, request, close))
        self._done(close)

    def begin(self, head: bytes, first: bytes, last: bool = False) -> None:
        """Send a head (without its blank line) and the first bytes of the body."""
        request = self._current
        if request is None or self._transport is None:
            return
        self.chunked = not request.http_1_0
        closes = self._closes(request)
        head = b"%b%b%b%bx-request-id: %b\r\n%b\r\n" % (
            head,
            b"transfer-encoding: chunked\r\n" if self.chunked else b"",
            self._service.date_header,
            self._service.cross_origin.lines(request),
            request.request_id.encode("latin-1"),
            b"connection: close\r\n" if closes else b"",
        )
        body = b"" if request.method == "HEAD" else self._chunk(first, last)
        self._transport.write(head + body)
        if last:
            self._done(closes)

    def write(self, data: bytes) -> None:
        """Send more of the body."""
        transport = self._transport
        if transport is not None:
            if self.chunked:
                data = b"%x\r\n%b\r\n" % (len(data), data)
            transport.write(data)

    def write_chunk(self, chunk: bytes) -> None:
        """Send more of a chunked body, given as one whole HTTP chunk."""
        transport = self._transport
        if transport is not None:
            transport.write(chunk)

    def finish(self, data: bytes = b"", close: bool = False) -> None:
        """Send the last bytes of the body."""
        request = self._current
        if request is None or self._transport is None:
            return
        self._transport.write(self._chunk(data, True))
        self._done(close or self._closes(request))

    def _chunk(self, data: bytes, last: bool) -> bytes:
        if not self.chunked:
            return data
        end = b"0\r\n\r\n" if last else b""
        return b"%x\r\n%b\r\n%b" % (len(data), data, end) if data else end

    def break_off(self) -> None:
        """Cut the response where it is."""
        self._done(close=False)
        self.abort()

    @property
    def lost(self) -> bool:
        """Whether the connection is gone."""
        return self._transport is None

    @property
    def undelivered(self) -> int:
        """Bytes of the last answer that the client's end has not acknowledged."""
        if self._transport is None:
            return self._undelivered
        if self._current is not None:
            return 0  # a client that sends a new request has read it
        return unacknowledged(self._transport)

    # --- closing

    def _closes(self, request: Request) -> bool:
        return (
            not request.keep_alive
            or request.http_1_0
            or self._service.draining
            or (self._reader.closed and not self._waiting)
        )

    def _render(self, reply: Reply, request: Request, close: bool) -> bytes:
        lines = [f"content-length: {len(reply.body)}"]
        if reply.body:
            lines.append(f"content-type: {reply.content_type}")
        lines += [f"{name}: {value}" for name, value in reply.headers]
        if request.request_id:
            lines.append(f"x-request-id: {request.request_id}")
        if close:
            lines.append("connection: close")
        head = "\r\n".join(lines).encode("latin-1")
        body = b"" if request.method == "HEAD" else reply.body
        return b"%b%b%b%b\r\n\r\n%b" % (
            status_line(reply.status),
            self._service.date_header,
            self._service.cross_origin.lines(request),
            head,
            body,
        )

    def _linger(self) -> None:
        """Close in order: nothing more is sent; what still comes is discarded for a while."""
        self._reader.drop()
        self._waiting.clear()
        transport = self._transport
        assert transport is not None
        if self._reading_paused:
            self._reading_paused = False
            transport.resume_reading()
        now = self._clock()
        self.deadline = now + self._config.linger_timeout_s
        self._flush_until = now + self._config.client_stall_timeout_s
        if transport.can_write_eof() and not transport.is_closing():
            transport.write_eof()
        else:
            transport.close()

    def _pause_reading(self) -> None:
        if not self._reading_paused and self._transport is not None:
            self._reading_paused = True
            self._transport.pause_reading()

    def abort(self) -> None:
        """Close at once, whatever is under way."""
        if self._transport is not None:
            self._transport.abort()

    def _drop_bodies(self) -> None:
        held = sum(len(r.body) for r in self._waiting)
        if self._current is not None:
            held += len(self._current.body)
        self._service.bodies_bytes -= held
        self._waiting.clear()

    def expire(self, now: float) -> None:
        """Called by the sweep once `deadline` has passed."""
        self.deadline = NEVER
        transport = self._transport
        if transport is None:
            return
        if self._reader.closed and self._current is None:
            if transport.get_write_buffer_size() and now < self._flush_until:
                self.deadline = now + self._config.linger_timeout_s  # it still reads the answer
            else:
                self.abort()
        elif self._busy():
            self.abort()  # the client does not read
        elif self._reader.state is IDLE:
            self._linger()
        else:
            self._reader.refuse(error_reply(408, "the request did not arrive in time"))
            self._pump()

    def close_when_idle(self) -> None:
        """Draining: close now if no request is under way."""
        if not self._busy() and self._reader.state is IDLE and self._transport is not None:
            self._transport.close()
