"""Streams kept for clients that may come back (`x-relume-grace`).

The handler of such a request writes into a `Kept` stream; a task carries what is there to
the connection attached at present, the newest one. When that is lost the handler goes on
until the grace is over, and whoever shows the request's claim may attach meanwhile
(`POST /relume/attach`). Payloads beyond the bound are dropped, the oldest first; the token
ids never are, so that a gateway that attaches knows all of them and can have the lost part
generated again. All of it lives on the event loop of the API process.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from relume.engine_shim import frames
from relume.engine_shim.generation import Generation, MalformedDispatch, number

if TYPE_CHECKING:
    from relume.engine_shim.shelf import Shelf

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

BACKLOG_BYTES = 256 << 10
"""A connection that is slower than the engine holds the handler up beyond this."""
IDS_A_FRAME = 4096
FIRST_BYTE_S = 0.3
"""The client's first byte waits so long for the holders to have the envelope."""
TAKEN = "taken"
GRACE_OVER = "its grace is over"


class Bounds(Struct, frozen=True):
    """`x-relume-grace: <seconds> <bytes a stream> <bytes in all> <detached streams>`."""

    grace_s: int
    stream_bytes: int
    total_bytes: int
    streams: int

    @classmethod
    def of(cls, header: str) -> Bounds:
        """Raises MalformedDispatch."""
        words = header.split()
        if len(words) != 4:
            raise MalformedDispatch("grace", f"{header[:80]!r} is not four numbers")
        return cls(*(number("grace", word) for word in words))


class _Sink:
    """One connection: `next` is the number of the first write it has not got."""

    __slots__ = ("ended", "next", "send", "task", "wake")

    def __init__(self, send: Send, first: int) -> None:
        self.send = send
        self.next = first
        self.wake = asyncio.Event()
        self.ended = False  # nothing more may be written to it
        self.task: asyncio.Task[None] | None = None


class Kept:
    """The stream of one attempt. `ids` are the tokens whose payloads are not here (any more):
    those delivered before this attempt, and those dropped."""

    def __init__(
        self,
        shelf: Shelf,
        generation: Generation,
        bounds: Bounds,
        claim: str,
        envelope: bytes,
    ) -> None:
        self.key = generation.request, generation.attempt
        self.generation = generation
        self.bounds = bounds
        self.claim = claim
        self.envelope = envelope
        self.finished = False
        self.bytes = len(envelope)
        self.detached_at = 0.0
        self.ids = array("I", generation.resume.choice(0).ids if generation.resume else ())
        self._shelf = shelf
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
        self._room = asyncio.Event()
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
                    return message  # nobody has seen anything: an ordinary cancellation
                self._lost(sink)
            await self._over.wait()
            return {"type": "http.disconnect"}

        return held

    @property
    def _begun(self) -> bool:
        return self._start is not None

    async def send(self, message: Message) -> None:
        """ASGI send for what frames the handler's answer."""
        if self._closed:
            return
        if message["type"] == "http.response.start":
            self._start = message
            self._plain = message["status"] != 200
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
                self._shelf.rest(self)
            return
        sink.wake.set()
        while self._sink is sink and self._waiting(sink) > BACKLOG_BYTES:
            self._room.clear()
            await self._room.wait()

    async def settled(self) -> None:
        """Wait until the first connection needs its handler no more."""
        sink = self._sink
        if sink is not None and sink.task is not None and self.finished:
            await asyncio.wait([sink.task])
        elif not self.finished:
            self._shelf.forget(self, "the worker gave the request up")

    def _waiting(self, sink: _Sink) -> int:
        behind = self._first + len(self._writes) - sink.next
        if behind < 16:
            return 0
        return sum(len(self._writes[-1 - i]) for i in range(min(behind, len(self._writes))))

    def _append(self, data: bytes) -> None:
        self._writes.append(data)
        self.bytes += len(data)
        self._shelf.bytes += len(data)
        bound = self.bounds.stream_bytes + len(self.envelope)
        while self.bytes > bound and self._droppable():
            self._drop()
        if self._shelf.bytes > self.bounds.total_bytes:
            self._shelf.make_room(self)

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
        self._shelf.bytes -= len(data)
        for _, ids, _ in cut(data):
            self.ids.extend(ids)

    # --- connections

    def attach(self, send: Send, first: int) -> tuple[asyncio.Task[None], _Sink]:
        """Everything from token `first` on goes to `send` from now on; an older connection is
        told so and ends. The answer's head comes before it."""
        self._take_from(self._sink)
        self.detached_at = 0.0
        self._stop_timer()
        sink = self._sink = _Sink(send, self._first)
        head = bytearray(frames.envelope(self.envelope))
        known = array("I", self.ids)
        base = len(known)
        self._shelf.counts["taken_up"] += 1
        self._shelf.counts["cut_short"] += base > first
        for data in self._writes:
            early = list(cut(data))
            if not all(_before(frame, first) for frame in early):
                break
            for _, ids, _ in early:
                known.extend(ids)
            sink.next += 1
        for at in range(0, len(known), IDS_A_FRAME):
            head += frames.tokens(at, known[at : at + IDS_A_FRAME])
        headers = [
            (b"content-type", frames.CONTENT_TYPE),
            (b"x-relume-from", b"%d" % base),
        ]
        if cached := self.generation.cached_tokens:
            headers.append((b"x-relume-cached", b"%d" % cached))
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
                self._room.set()
            if self.finished and not sink.ended and sink.next >= self._first + len(self._writes):
                sink.ended = True
                await sink.send({"type": "http.response.body", "body": b"", "more_body": False})
            if not sink.ended:
                await sink.wake.wait()
        if self._sink is sink and self.finished:
            self._sink = None
            self._shelf.rest(self)

    def _take_from(self, sink: _Sink | None) -> None:
        """Another connection takes the stream: the older one ends."""
        if sink is None or sink.ended:
            return
        sink.ended = True
        sink.wake.set()
        self._room.set()
        if sink.task is not None:
            sink.task.cancel()
        last = frames.broken(TAKEN, "another connection goes on with this stream")
        end = {"type": "http.response.body", "body": last, "more_body": False}
        self._shelf.spawn(_quietly(sink.send(end)))

    def _lost(self, sink: _Sink) -> None:
        if self._sink is not sink:
            return
        sink.ended = True
        sink.wake.set()
        self._room.set()
        if sink.task is not None:
            sink.task.cancel()
        self._sink = None
        self._shelf.detached(self)

    # --- ends

    @property
    def attached(self) -> bool:
        """Whether a connection has it at present."""
        return self._sink is not None

    def expire_in(self, seconds: float) -> None:
        """Be erased, and the request aborted, unless somebody attaches."""
        self._stop_timer()
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(seconds, self._shelf.forget, self, GRACE_OVER)

    def _stop_timer(self) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()

    def close(self) -> None:
        """Erase it; the handler, if it still runs, sees its client leave."""
        self._closed = True
        self._stop_timer()
        self._over.set()
        self._room.set()
        self._take_from(self._sink)
        self._sink = None
        self._shelf.bytes -= self.bytes
        self.bytes = 0
        self._writes.clear()
        self.envelope = b""


def cut(data: bytes) -> Iterator[tuple[int, list[int], bool]]:
    """(first token, ids, whether it shows tokens or bytes at a place) of the whole frames in
    `data`, which we wrote ourselves; the start of others is -1."""
    at = 0
    while at < len(data):
        newline = data.index(b"\n", at)
        words = data[at:newline].split(b" ")
        if words[0] == b":r":
            length = int(words[2])
            yield int(words[1]), [int(word) for word in words[3:]], True
        else:
            length = 0 if words[0] == b":e" else int(words[2])
            yield -1, [], False
        at = newline + 1 + length


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
