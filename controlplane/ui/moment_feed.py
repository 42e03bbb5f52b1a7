"""One feed of moments for all viewers: built, encoded and compressed once per tick.

Theory of operation. Nothing happens without viewers. All viewers sleep until the same instant; the
first that wakes builds the next moment, the others find it there. A viewer that has the moment before
gets the changes, any other the whole moment. So a replica's cost does not grow with the number of
viewers, except for writing to their sockets. After a moment that took long to build the pause is
longer: building takes at most one part in `SHARE` of a core.

Server-sent events are compressed as one endless gzip stream. Each message is a run of deflate blocks
that ends at a byte boundary and refers to nothing before it (a full flush), so the same bytes fit into
the stream of each viewer.
"""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Callable

import msgspec
from aiohttp import web

from relume.controlplane.admin.errors import TooManyFollowers
from relume.controlplane.ui.moment import Moment, MomentChanges, changes

PERIOD_S = 0.5
SHARE = 25
"""Building moments takes at most this part of a core: 4 %."""
MAX_VIEWERS = 64
WRITE_TIMEOUT_S = 30.0
"""A viewer that reads nothing for this long is disconnected."""
GZIP_HEAD = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\xff"
LEVEL = 5


class Message:
    """A server-sent event, plain and as a part of a gzip stream; each form is made once, on demand."""

    __slots__ = ("_deflated", "_plain", "_value")

    def __init__(self, value: Moment | MomentChanges) -> None:
        self._value = value
        self._plain = b""
        self._deflated = b""

    def plain(self) -> bytes:
        """The text of the event."""
        if not self._plain:
            kind = b"moment" if type(self._value) is Moment else b"changes"
            data = msgspec.json.encode(self._value)
            self._plain = b"event: " + kind + b"\ndata: " + data + b"\n\n"
        return self._plain

    def deflated(self) -> bytes:
        """The same, as blocks that fit into any deflate stream."""
        if not self._deflated:
            self._deflated = deflated(self.plain())
        return self._deflated


def deflated(data: bytes) -> bytes:
    """`data` as deflate blocks that refer to nothing before them and are not the last."""
    packer = zlib.compressobj(LEVEL, zlib.DEFLATED, -zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush(zlib.Z_FULL_FLUSH)


class MomentFeed:
    """Moments of `build` for any number of viewers. `closing` ends their streams."""

    def __init__(self, build: Callable[[], Moment], period_s: float = PERIOD_S) -> None:
        self.closing = False
        self.viewers = 0
        self.built = 0
        """Moments built so far."""
        self._build = build
        self._period_s = period_s
        self._moment: Moment | None = None
        self._whole: Message | None = None
        self._changes: Message | None = None
        self._due = 0.0

    def current(self) -> Moment:
        """The moment for one call, not older than a period."""
        if self._now() >= self._due or self._moment is None:
            self._advance()
        assert self._moment is not None
        return self._moment

    async def follow(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events until the viewer leaves: a `moment`, then `changes`.

        Raises TooManyFollowers.
        """
        if self.viewers >= MAX_VIEWERS:
            raise TooManyFollowers(f"{MAX_VIEWERS} pages are open; close one")
        packed = "gzip" in request.headers.get("Accept-Encoding", "")
        headers = {
            "Content-Type": "text/event-stream",
            "Cache-Control": "no-store",
            "X-Accel-Buffering": "no",
        }
        if packed:
            headers["Content-Encoding"] = "gzip"
        answer = web.StreamResponse(headers=headers)
        self.viewers += 1
        try:
            await answer.prepare(request)
            if packed:
                await answer.write(GZIP_HEAD)
            await self._feed(answer, packed)
        except (ConnectionResetError, TimeoutError):
            pass  # the viewer left, or reads nothing: its page connects again
        finally:
            self.viewers -= 1
        return answer

    async def _feed(self, answer: web.StreamResponse, packed: bool) -> None:
        self.current()
        seen = -1
        while not self.closing:
            message = self._after(seen)
            if message is not None:
                seen = self.built
                async with asyncio.timeout(WRITE_TIMEOUT_S):
                    await answer.write(message.deflated() if packed else message.plain())
            await asyncio.sleep(max(self._due - self._now(), 0.0))
            if self._now() >= self._due:
                self._advance()

    def _after(self, seen: int) -> Message | None:
        """What a viewer needs that has seen the moment numbered `seen`."""
        if seen == self.built:
            return None
        if seen == self.built - 1 and self._changes is not None:
            return self._changes
        if self._whole is None:
            assert self._moment is not None
            self._whole = Message(self._moment)
        return self._whole

    def _advance(self) -> None:
        began = self._now()
        before, self._moment = self._moment, self._build()
        self._whole = None
        self._changes = Message(changes(before, self._moment)) if before is not None else None
        if self._changes is not None and self.viewers:
            self._changes.deflated()
        self.built += 1
        ended = self._now()
        self._due = ended + max(self._period_s, (ended - began) * (SHARE - 1))

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
