"""Streams buffered for clients that may resume (header `GRACE`).

The handler of such a request writes into a `StreamBuffer`; a task sends its content to the attached
connection, the newest one. If that is lost the handler continues until the grace time is over, and
a client with the request's resume token may attach meanwhile (`POST /relume/attach`). Payloads
beyond the bound are dropped, the oldest first. Token ids never are, so a gateway that attaches has
all of them and can have the lost part generated again. All of it runs on the event loop of the API
process.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import Any, Protocol

from relume.engine_shim.generation import Generation
from relume.events.wire import frames
from relume.events.wire.headers import CACHED_BYTES, FROM_BYTES, Grace

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BACKLOG_BYTES = 256 << 10
"""A connection that is slower than the engine holds the handler up beyond this."""
IDS_A_FRAME = 4096
FIRST_BYTE_S = 0.3
"""Maximum time the client's first byte waits for the holders to have the envelope."""
GRACE_OVER = "its grace is over"


class Owner(Protocol):
    """What a buffer needs of all buffers of its engine. `bytes`: what they take together;
    `counts`: streams that were attached to, by how."""

    bytes: int
    counts: dict[str, int]

    def evict_for(self, writing: StreamBuffer) -> None:
        """Bring `bytes` within the bound for all; `writing` has just grown."""
        ...

    def detached(self, buffer: StreamBuffer) -> None:
        """No connection is attached, and the stream's end has not been written out."""
        ...

    def rest(self, buffer: StreamBuffer) -> None:
        """The stream is complete."""
        ...

    def forget(self, buffer: StreamBuffer, why: str) -> None:
        """Erase the stream and abort its request if it runs."""
        ...

    def spawn(self, work: Awaitable[None]) -> None:
        """Run `work` on its own."""
        ...


class _Sink:
    """One connection: `next` is the number of the first write it has not got."""

    __slots__ = ("ended", "next", "send", "task", "wake")

    def __init__(self, send: Send, first: int) -> None:
        self.send = send
        self.next = first
        self.wake = asyncio.Event()
        self.ended = False  # nothing more may be written to it
        self.task: asyncio.Task[None] | None = None


class StreamBuffer:
    """The stream of one attempt. `ids` are the tokens whose payloads are not here (any more):
    those delivered before this attempt, and those dropped."""

    def __init__(
        self,
        buffers: Owner,
        generation: Generation,
        bounds: Grace,
        claim: str,
        envelope: bytes,
    ) -> None:
        self.key = generation.request, generation.attempt
        self.generation = generation
        self.bounds = bounds
        self.claim = claim
        self.envelope = envelope
        self.log = ""
        """The log to which a replica of a later one than it began in has brought it."""
        self.finished = False
        self.bytes = len(envelope)
        self.detached_at = 0.0
        self.ids = array("I", generation.resume.choice(0).ids if generation.resume else ())
        self._buffers = buffers
        self._writes: deque[bytes] = deque()
        self._first = 0  # number of the first of `_writes`
        self._start: Message | None = None
        self._plain = False
        self._sink: _Sink | None = None
        self._first_sink: _Sink | None = None
        self._closed = False
        self.preface = b""
        """Sent ahead of the frames on the connection the request came on."""
        self.held_back: asyncio.Task[None] | None = None
        """The first byte waits for it, a while."""
        self._over = asyncio.Event()
        self._space = asyncio.Event()
        self._timer: asyncio.TimerHandle | None = None

    # --- the handler's side

    def begin(self, send: Send) -> None:
        """The connection the request came on."""
        self._sink = self._first_sink = _Sink(send, 0)

    def receiving(self, receive: Receive) -> Receive:
        """`receive` for the handler: a lost connection is no reason to stop, the end of the
        grace is."""

        async def held() -> Message:
            sink = self._first_sink
            if not self._over.is_set() and sink is self._sink and sink is not None:
                message = await receive()
                if message["type"] != "http.disconnect":
                    return message
                if self._plain or not self._begun:
                    return message  # no client has seen anything: an ordinary cancellation
                self._lost(sink)
            await self._over.wait()
            return {"type": "http.disconnect"}

        return held

    @property
    def _begun(self) -> bool:
        """Whether its client may have a part of the stream, of this attempt or an earlier one."""
        return self._start is not None or self.generation.delivered > 0

    async def send(self, message: Message) -> None:
        """ASGI send for what frames the handler's answer."""
        if self._closed:
            return
        if message["type"] == "http.response.start":
            self._start = message
            self._plain = message["status"] != 200
            if self._sink is not self._first_sink:
                self._begin_unattended()
                return
        if self._plain:
            if self._sink is not None and not self._sink.ended:
                await self._sink.send(message)
            return
        if message["type"] == "http.response.start":
            self._launch(self._sink, head=self.preface)
            return
        if body := message.get("body", b""):
            self._append(body)
        self.finished = self.finished or not message.get("more_body")
        sink = self._sink
        if sink is None:
            if self.finished:
                self._buffers.rest(self)
            return
        sink.wake.set()
        while self._sink is sink and self._waiting(sink) > BACKLOG_BYTES:
            self._space.clear()
            await self._space.wait()

    def _begin_unattended(self) -> None:
        """The answer begins, and the connection that the request came on is lost. One that attached
        meanwhile had a head of its own."""
        if self._plain:
            self._buffers.forget(self, "the engine refused it while no client was there")

    async def settled(self) -> None:
        """Wait until the first connection no longer needs its handler."""
        sink = self._sink
        if sink is not None and sink.task is not None and self.finished:
            await asyncio.wait([sink.task])
        elif not self.finished:
            self._buffers.forget(self, "the worker gave the request up")

    def _waiting(self, sink: _Sink) -> int:
        behind = self._first + len(self._writes) - sink.next
        if behind < 16:
            return 0
        return sum(len(self._writes[-1 - i]) for i in range(min(behind, len(self._writes))))

    def _append(self, data: bytes) -> None:
        self._writes.append(data)
        self.bytes += len(data)
        self._buffers.bytes += len(data)
        bound = self.bounds.stream_bytes + len(self.envelope)
        while self.bytes > bound and self._droppable():
            self._drop()
        if self._buffers.bytes > self.bounds.total_bytes:
            self._buffers.evict_for(self)

    def _droppable(self) -> bool:
        sink = self._sink
        return len(self._writes) > 1 and (sink is None or sink.next > self._first)

    def drop_sent(self) -> bool:
        """Drop the oldest payload that is written out; False when there is none."""
        if self._sink is None or not self._droppable():
            return False
        self._drop()
        return True

    def _drop(self) -> None:
        data = self._writes.popleft()
        self._first += 1
        self.bytes -= len(data)
        self._buffers.bytes -= len(data)
        for _, ids, _ in cut(data):
            self.ids.extend(ids)

    # --- connections

    def attach(self, send: Send, first: int, log: str = "") -> tuple[asyncio.Task[None], _Sink]:
        """Everything from token `first` on goes to `send` from now on; an older connection gets an
        error and ends. The answer's head comes before it. `log`: that of the gateway's replica."""
        self._take_from(self._sink)
        self.log = log or self.log
        self.detached_at = 0.0
        self._stop_timer()
        sink = self._sink = _Sink(send, self._first)
        head = bytearray(frames.encode_envelope(self.envelope))
        known = array("I", self.ids)
        base = len(known)
        self._buffers.counts["taken_up"] += 1
        self._buffers.counts["cut_short"] += base > first
        for data in self._writes:
            early = list(cut(data))
            if not all(_before(frame, first) for frame in early):
                break
            for _, ids, _ in early:
                known.extend(ids)
            sink.next += 1
        for at in range(0, len(known), IDS_A_FRAME):
            head += frames.encode_tokens(at, known[at : at + IDS_A_FRAME])
        headers = [
            (b"content-type", frames.CONTENT_TYPE),
            (FROM_BYTES, b"%d" % base),
        ]
        if cached := self.generation.cached_tokens:
            headers.append((CACHED_BYTES, b"%d" % cached))
        start = {"type": "http.response.start", "status": 200, "headers": headers}
        return self._launch(sink, start, bytes(head)), sink

    def lost(self, sink: _Sink) -> None:
        """The connection is gone."""
        self._lost(sink)

    def _launch(
        self, sink: _Sink | None, start: Message | None = None, head: bytes = b""
    ) -> asyncio.Task[None]:
        assert sink is not None
        sink.task = asyncio.create_task(self._carry(sink, start or self._start, head))
        return sink.task

    async def _carry(self, sink: _Sink, start: Message | None, head: bytes) -> None:
        """Write to the connection what there is, as it comes."""
        if (awaited := self.held_back) is not None:
            self.held_back = None
            await asyncio.wait([awaited], timeout=FIRST_BYTE_S)
        await sink.send(start or {})
        if head:
            await sink.send({"type": "http.response.body", "body": head, "more_body": True})
        while not sink.ended:
            sink.wake.clear()
            while not sink.ended and sink.next < self._first + len(self._writes):
                data = self._writes[max(sink.next - self._first, 0)]
                sink.next = max(sink.next, self._first) + 1
                last = self.finished and sink.next == self._first + len(self._writes)
                sink.ended = sink.ended or last
                await sink.send({"type": "http.response.body", "body": data, "more_body": not last})
                self._space.set()
            if self.finished and not sink.ended and sink.next >= self._first + len(self._writes):
                sink.ended = True
                await sink.send({"type": "http.response.body", "body": b"", "more_body": False})
            if not sink.ended:
                await sink.wake.wait()
        if self._sink is sink and self.finished:
            self._sink = None
            self._buffers.rest(self)

    def _take_from(self, sink: _Sink | None) -> None:
        """Another connection takes the stream: the older one ends."""
        if sink is None or sink.ended:
            return
        sink.ended = True
        sink.wake.set()
        self._space.set()
        if sink.task is not None:
            sink.task.cancel()
        last = frames.encode_failure(
            frames.FailureKind.TAKEN, "another connection continues this stream"
        )
        end = {"type": "http.response.body", "body": last, "more_body": False}
        self._buffers.spawn(_quietly(sink.send(end)))

    def _lost(self, sink: _Sink) -> None:
        if self._sink is not sink:
            return
        sink.ended = True
        sink.wake.set()
        self._space.set()
        if sink.task is not None:
            sink.task.cancel()
        self._sink = None
        self._buffers.detached(self)

    # --- ends

    @property
    def attached(self) -> bool:
        """Whether a connection is attached."""
        return self._sink is not None

    @property
    def is_without_client(self) -> bool:
        """Whether its grace runs: no connection is attached, or has more to write out."""
        return bool(self.detached_at) or (self.finished and not self.attached)

    def expire_in(self, seconds: float) -> None:
        """Be erased, and the request aborted, unless a connection attaches."""
        self._stop_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._buffers.forget, self, GRACE_OVER)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Erase it; the handler, if it still runs, sees its client leave."""
        self._closed = True
        self._stop_timer()
        self._over.set()
        self._space.set()
        self._take_from(self._sink)
        self._sink = None
        self._buffers.bytes -= self.bytes
        self.bytes = 0
        self._writes.clear()
        self.envelope = b""


def cut(data: bytes) -> Iterator[tuple[int, list[int], bool]]:
    """(first token, ids, whether it shows tokens or bytes at a place) of the whole frames in
    `data`, which we wrote ourselves; the start of others is -1."""
    for frame in frames.read_frames(data):
        if isinstance(frame, frames.Tokens):
            yield frame.start, list(frame.ids), True
        else:
            yield -1, [], False


def _before(frame: tuple[int, list[int], bool], first: int) -> bool:
    """Whether all of the frame is in front of token `first`."""
    start, ids, placed = frame
    if not placed or start < 0:
        return False
    return start + len(ids) <= first if ids else start < first


async def _quietly(sending: Awaitable[None]) -> None:
    """The connection may be gone already."""
    try:
        await sending
    except Exception:  # process edge: an ASGI server's send may raise anything here
        return
