"""Requests as their clients sent them, kept for the case that worker and gateway are lost
together. They lie in the arena, within its budget, and end with the request or by age."""

from __future__ import annotations

from msgspec import Struct

from engine_shim.kv_stream.errors import Refusal
from engine_shim.state_daemon.arena import Arena


class _Kept(Struct):
    attempt: int
    offset: int
    length: int
    touched_s: float


class Envelopes:
    """Envelopes by request. One thread. What finds no room is refused: nothing is evicted."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._kept: dict[str, _Kept] = {}

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, request: str, attempt: int, envelope: bytes, now_s: float) -> None:
        """Raises Refusal: fenced (a later attempt wrote one), budget."""
        older = self._kept.get(request)
        if older is not None and attempt < older.attempt:
            raise Refusal("fenced", f"attempt {older.attempt} of {request} is live")
        offset = self._arena.allocate(len(envelope))
        if offset is None:
            raise Refusal("budget", f"no room for {len(envelope)} bytes of {request}")
        self._arena.view(offset, len(envelope))[:] = envelope
        self.drop(request, attempt)
        self._kept[request] = _Kept(attempt, offset, len(envelope), now_s)

    def recall(self, request: str) -> tuple[int, bytes]:
        """(attempt, envelope). Raises Refusal (unknown)."""
        kept = self._kept.get(request)
        if kept is None:
            raise Refusal("unknown", f"no envelope of {request} is held")
        return kept.attempt, bytes(self._arena.read(kept.offset, kept.length))

    def touch(self, request: str, now_s: float) -> None:
        """The request is alive."""
        if (kept := self._kept.get(request)) is not None:
            kept.touched_s = now_s

    def drop(self, request: str, attempt: int) -> None:
        """The request ended, or was written anew; later attempts are left."""
        kept = self._kept.get(request)
        if kept is not None and kept.attempt <= attempt:
            del self._kept[request]
            self._arena.view(kept.offset, kept.length)[:] = bytes(kept.length)
            self._arena.release(kept.offset)

    def expire(self, before_s: float) -> None:
        """Forget what was touched last before then."""
        for request, kept in list(self._kept.items()):
            if kept.touched_s < before_s:
                self.drop(request, kept.attempt)
