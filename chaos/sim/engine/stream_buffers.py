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
from relume.events.wire.worker_calls import Attach

LEAST_KNOWN = 3
"""An attached connection gets fewer than this number of its client's tokens again."""


class Track(Protocol):
    """An attempt in the engine, as `worker_engine.Track`."""

    name: str
    what: Dispatch
    answer: Answer
    told: int


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


class Kept(Struct, eq=False, kw_only=True):
    """One stream. `finish`: how it ended, empty while it runs. `grace`: counts graces begun or
    ended."""

    track: Track
    finish: str = ""
    grace: int = 0


class KeptStreams:
    """All streams of one engine. `later` runs a function after seconds; `abort` ends an attempt."""

    def __init__(
        self,
        later: Callable[..., object],
        abort: Callable[[str], object],
        now_ns: Callable[[], int],
    ) -> None:
        self._kept: dict[str, Kept] = {}
        self._later = later
        self._abort = abort
        self._now_ns = now_ns

    def keep(self, track: Any) -> None:
        """A new stream."""
        self._kept[track.name] = Kept(track=track)

    def finished(self, name: str, finish: str) -> None:
        """The stream has ended; its client may miss the end."""
        kept = self._kept.get(name)
        if kept is not None:
            kept.finish = finish
            self._begin_grace(kept)

    def forget(self, name: str) -> None:
        """The stream is over; drop its buffer."""
        self._kept.pop(name, None)

    def left(self, name: str, answer: Answer, begun: bool) -> bool:
        """The connection of `answer` is gone. False: abort its attempt."""
        kept = self._kept.get(name)
        if kept is None:
            return False
        if kept.track.answer is not answer:
            return True  # another connection has it
        if not begun:
            self.forget(name)
            return False
        kept.track.answer = NOBODY
        self._begin_grace(kept)
        return True

    def attach(self, what: Attach, answer: Answer, wrong: bool, short: float = 0.0) -> None:
        """`answer` has the stream from now on. A share `short` of streams has only its end here."""
        kept = self._kept.get(f"{what.request}/{what.attempt}")
        if kept is None or kept.track.what.claim != what.claim:
            answer.refused(404 if kept is None else 403)
            return
        track = kept.track
        track.answer.taken()
        track.answer = answer
        kept.grace += 1
        base = track.what.delivered
        again = zlib.crc32(f"{track.name}:{what.tokens}".encode()) % LEAST_KNOWN
        known = max(base, min(what.tokens, track.told) - again)
        if Random(f"{track.name}:{what.tokens}:short").random() < short:
            base = known = track.told
        answer.attached(base, known)
        now = self._now_ns()
        if track.told > known:
            count = track.told - known
            answer.tokens(Stretch(start=known, count=count, first_ns=now, last_ns=now, wrong=wrong))
        if kept.finish:
            answer.end(kept.finish)
            track.answer = NOBODY
            self._begin_grace(kept)

    def release(self, what: Attach) -> None:
        """No client will return for these."""
        for request, attempt, claim in ((what.request, what.attempt, what.claim), *what.also):
            name = f"{request}/{attempt}"
            kept = self._kept.get(name)
            if kept is not None and kept.track.what.claim == claim:
                self._erase(name)

    def _begin_grace(self, kept: Kept) -> None:
        kept.grace += 1
        self._later(kept.track.what.grace_s, self._expire, kept, kept.grace)

    def _expire(self, kept: Kept, grace: int) -> None:
        if kept.grace == grace and self._kept.get(kept.track.name) is kept:
            self._erase(kept.track.name)

    def _erase(self, name: str) -> None:
        kept = self._kept.pop(name)
        kept.track.answer = NOBODY
        if not kept.finish:
            self._abort(name)
