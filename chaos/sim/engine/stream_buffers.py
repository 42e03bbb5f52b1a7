"""A simulated engine's buffers of streams whose clients may return (`stream_buffer` of the shim).

A stream continues without its connection for the grace time. A connection with its resume token may
attach to it meanwhile, any number of times.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from random import Random
from typing import Any, Protocol

from msgspec import Struct

from relume.chaos.sim.message_ports import Answer, Dispatch, Stretch
from relume.events.wire.stream_origin import log_of
from relume.events.wire.worker_calls import Attach, OriginAnswered

LEAST_KNOWN = 3
"""An attached connection gets fewer than this number of its client's tokens again."""


class Track(Protocol):
    """An attempt in the engine, as `worker_engine.Track`."""

    name: str
    what: Dispatch
    answer: Answer
    sent_tokens: int


class Nobody:
    """The `Answer` of a stream without a connection."""

    def tokens(self, stretch: Stretch) -> None: ...
    def end(self, finish: str) -> None: ...
    def moved(self) -> None: ...
    def lost(self, kind: str, detail: str) -> None: ...
    def attached(self, base: int, known: int) -> None: ...
    def refused(self, status: int) -> None: ...
    def broken(self, kind: str) -> None: ...
    def taken(self) -> None: ...


NOBODY = Nobody()


class BufferedStream(Struct, eq=False, kw_only=True):
    """One stream. `finish`: how it ended, empty while it runs. `grace`: counts graces begun or
    ended. `log`: the one that it belongs to, if a replica has attached to it."""

    track: Track
    finish: str = ""
    grace: int = 0
    log: str = ""


class StreamBuffers:
    """All streams of one engine. `later` runs a function after seconds; `abort` ends an attempt."""

    def __init__(
        self,
        later: Callable[..., object],
        abort: Callable[[str], object],
        now_ns: Callable[[], int],
    ) -> None:
        self._streams: dict[str, BufferedStream] = {}
        self._later = later
        self._abort = abort
        self._now_ns = now_ns

    def keep(self, track: Any) -> None:
        """A new stream."""
        self._streams[track.name] = BufferedStream(track=track)

    def finished(self, name: str, finish: str) -> None:
        """The stream has ended; its client may miss the end."""
        stream = self._streams.get(name)
        if stream is not None:
            stream.finish = finish
            self._begin_grace(stream)

    def forget(self, name: str) -> None:
        """The stream is over; drop its buffer."""
        self._streams.pop(name, None)

    def left(self, name: str, answer: Answer, begun: bool) -> bool:
        """The connection of `answer` is gone. False: abort its attempt."""
        stream = self._streams.get(name)
        if stream is None:
            return False
        if stream.track.answer is not answer:
            return True  # another connection has it
        if not begun:
            self.forget(name)
            return False
        stream.track.answer = NOBODY
        self._begin_grace(stream)
        return True

    def attach(self, what: Attach, answer: Answer, wrong: bool, short: float = 0.0) -> None:
        """`answer` has the stream from now on. A share `short` of streams has only its end here."""
        stream = self._streams.get(f"{what.request}/{what.attempt}")
        if stream is None or stream.track.what.claim != what.claim:
            answer.refused(404 if stream is None else 403)
            return
        stream.log = what.log or stream.log
        track = stream.track
        track.answer.taken()
        track.answer = answer
        stream.grace += 1
        base = track.what.delivered
        again = zlib.crc32(f"{track.name}:{what.tokens}".encode()) % LEAST_KNOWN
        known = max(base, min(what.tokens, track.sent_tokens) - again)
        if Random(f"{track.name}:{what.tokens}:short").random() < short:
            base = known = track.sent_tokens
        answer.attached(base, known)
        now = self._now_ns()
        if track.sent_tokens > known:
            count = track.sent_tokens - known
            answer.tokens(Stretch(start=known, count=count, first_ns=now, last_ns=now, wrong=wrong))
        if stream.finish:
            answer.end(stream.finish)
            track.answer = NOBODY
            self._begin_grace(stream)

    def origin(self, request: str) -> OriginAnswered | None:
        """Where a stream that is buffered here began; None if it is not here, or that is unknown. Its grace
        begins anew: its client is there."""
        found = [s for s in self._streams.values() if s.track.what.request == request]
        last = max(found, key=lambda stream: stream.track.what.attempt, default=None)
        if last is None or not (origin := last.track.what.origin):
            return None
        if last.finish or last.track.answer is NOBODY:
            self._begin_grace(last)
        return OriginAnswered(origin, last.log or log_of(origin), last.track.what.attempt)

    def release(self, what: Attach) -> None:
        """No client will return for these."""
        for request, attempt, claim in ((what.request, what.attempt, what.claim), *what.also):
            name = f"{request}/{attempt}"
            stream = self._streams.get(name)
            if stream is not None and stream.track.what.claim == claim:
                self._erase(name)

    def _begin_grace(self, stream: BufferedStream) -> None:
        stream.grace += 1
        self._later(stream.track.what.grace_s, self._expire, stream, stream.grace)

    def _expire(self, stream: BufferedStream, grace: int) -> None:
        if stream.grace == grace and self._streams.get(stream.track.name) is stream:
            self._erase(stream.track.name)

    def _erase(self, name: str) -> None:
        stream = self._streams.pop(name)
        stream.track.answer = NOBODY
        if not stream.finish:
            self._abort(name)
