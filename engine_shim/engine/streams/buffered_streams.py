"""All streams that an engine buffers for clients that may resume, within bounds."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from relume.engine_shim.engine.streams.stream_buffer import GRACE_OVER, StreamBuffer
from relume.engine_shim.generation import Generation
from relume.events.wire.envelope import unpack
from relume.events.wire.headers import Grace
from relume.events.wire.stream_origin import log_of
from relume.events.wire.worker_calls import OriginAnswered

TOMBSTONES = 256
NO_SPACE = "no room for detached streams"
TOO_MANY = "too many detached streams"
RELEASED = "released"
COUNTED = {GRACE_OVER: "expired", NO_SPACE: "refused_bytes", TOO_MANY: "refused_streams"}
"""Ends of streams whose clients were absent, by their name in the statistics."""


class StreamGone(Exception):
    """There is no such stream, or not for this client. `status` for the answer."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class StreamBuffers:
    """All buffered streams of this engine."""

    def __init__(self) -> None:
        self.bytes = 0
        self.counts = dict.fromkeys(("taken_up", "cut_short", *COUNTED.values()), 0)
        self._buffers: dict[tuple[str, int], StreamBuffer] = {}
        self._gone: dict[tuple[str, int], str] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    def keep(
        self, generation: Generation, bounds: Grace, claim: str, envelope: bytes
    ) -> StreamBuffer:
        """A new stream; an older one of the same attempt is erased."""
        key = generation.request, generation.attempt
        if (older := self._buffers.get(key)) is not None:
            self.forget(older, "sent again")
        buffer = self._buffers[key] = StreamBuffer(self, generation, bounds, claim, envelope)
        self.bytes += buffer.bytes
        return buffer

    def find(self, request: str, attempt: int, claim: str) -> StreamBuffer:
        """Raises Gone."""
        buffer = self._buffers.get((request, attempt))
        if buffer is None:
            why = self._gone.get((request, attempt), "it is not here")
            raise StreamGone(404, f"the stream is not kept: {why}")
        if not hmac.compare_digest(buffer.claim.encode(), claim.encode()):
            raise StreamGone(403, "not this stream's claim")
        return buffer

    def envelope(self, request: str, attempt: int) -> bytes:
        """Of a stream that is buffered here; empty for any other."""
        buffer = self._buffers.get((request, attempt))
        return buffer.envelope if buffer is not None else b""

    def origin(self, request: str) -> OriginAnswered | None:
        """Where a stream that is buffered here began; None if it is not here, or that is unknown. The question
        says that its client is there: its grace begins anew."""
        attempt = max((n for name, n in self._buffers if name == request), default=None)
        if attempt is None:
            return None
        buffer = self._buffers[request, attempt]
        if not (origin := unpack(buffer.envelope).origin):
            return None
        if buffer.is_without_client:
            buffer.expire_in(buffer.bounds.grace_s)
        return OriginAnswered(origin, buffer.log or log_of(origin), attempt)

    def detached(self, buffer: StreamBuffer) -> None:
        """No connection is attached, and its end has not been written out."""
        loop = asyncio.get_running_loop()
        buffer.detached_at = loop.time()
        buffer.expire_in(buffer.bounds.grace_s)
        self._bound(buffer.bounds.streams)

    def rest(self, buffer: StreamBuffer) -> None:
        """It is complete: until its gateway releases it, its client may have missed its end."""
        if buffer.detached_at:
            return  # it was never written out: its grace runs
        buffer.expire_in(buffer.bounds.grace_s)
        self._bound(buffer.bounds.streams)

    def _bound(self, streams: int) -> None:
        """Erase what is too many: complete ones first, then the one detached longest."""
        if len(self._buffers) <= streams:
            return
        away = [k for k in self._buffers.values() if k.is_without_client]
        away.sort(key=lambda k: (not k.finished, k.detached_at))
        for old in away[: -streams or None]:
            self.forget(old, TOO_MANY)

    def release(self, streams: Iterable[tuple[str, int, str]]) -> None:
        """Erase those of (request, attempt, claim) that are here."""
        for request, attempt, claim in streams:
            with suppress(StreamGone):
                self.forget(self.find(request, attempt, claim), RELEASED)

    def evict_for(self, writing: StreamBuffer) -> None:
        """Stay within the bytes for all: complete streams go first, then what `writing` has
        written out, then the one detached longest, whose client gets an error."""
        total = writing.bounds.total_bytes
        for buffer in [k for k in self._buffers.values() if k.finished and not k.attached]:
            if self.bytes <= total:
                return
            self.forget(buffer, NO_SPACE)
        while self.bytes > total and writing.drop_sent():
            pass
        waiting = [k for k in self._buffers.values() if k.detached_at]
        for buffer in sorted(waiting, key=lambda k: k.detached_at):
            if self.bytes <= total:
                return
            self.forget(buffer, NO_SPACE)

    def forget(self, buffer: StreamBuffer, why: str) -> None:
        """Erase a stream and abort its request if it runs."""
        if self._buffers.get(buffer.key) is buffer:
            if buffer.detached_at and why in COUNTED:
                self.counts[COUNTED[why]] += 1
            del self._buffers[buffer.key]
            self._gone[buffer.key] = why
            if len(self._gone) > TOMBSTONES:
                del self._gone[next(iter(self._gone))]
        buffer.close()

    def close(self) -> None:
        """The engine stops: streams of absent clients are dropped."""
        for buffer in [k for k in self._buffers.values() if not k.attached]:
            self.forget(buffer, "the worker stopped")

    def spawn(self, work: Any) -> None:
        """Run `work` on its own."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def figures(self) -> dict[str, int]:
        """For `/relume/state` and the log. `taken_up`: streams a connection attached to,
        `cut_short` of them when payload it lacked had been dropped; the others counted ended
        while their clients were away."""
        away = [k for k in self._buffers.values() if k.detached_at]
        return {
            "streams": len(self._buffers),
            "bytes": self.bytes,
            "detached": len(away),
            "detached_bytes": sum(k.bytes for k in away),
            **self.counts,
        }
