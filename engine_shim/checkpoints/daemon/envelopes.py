"""Requests as their clients sent them, stored in case worker and gateway are lost together. They
are in the arena, within its budget, and end with the request or by age."""

from __future__ import annotations

from msgspec import Struct

from relume.engine_shim.checkpoints.daemon.store.arena import Arena
from relume.engine_shim.checkpoints.link.image import Buffer, digest_of
from relume.events.wire.kv.kv_errors import Refusal


class _StoredEnvelope(Struct, kw_only=True):
    attempt: int
    offset: int
    length: int
    touched_s: float
    digest: bytes


class Envelopes:
    """Envelopes by request. One thread. What finds no room is refused: nothing is evicted."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        self._stored: dict[str, _StoredEnvelope] = {}
        self.bytes = 0
        self.taken = self.refused = 0

    def __len__(self) -> int:
        return len(self._stored)

    def keep(
        self, request: str, attempt: int, envelope: Buffer, now_s: float, digest: bytes = b""
    ) -> None:
        """`digest`: what the envelope's must be, if given. Raises Refusal: fenced (a later
        attempt wrote one), budget, digest."""
        try:
            self._keep(request, attempt, envelope, now_s, digest)
        except Refusal:
            self.refused += 1
            raise
        self.taken += 1

    def _keep(
        self, request: str, attempt: int, envelope: Buffer, now_s: float, digest: bytes
    ) -> None:
        older = self._stored.get(request)
        if older is not None and attempt < older.attempt:
            raise Refusal("fenced", f"attempt {older.attempt} of {request} is live")
        offset = self._arena.allocate(len(envelope))
        if offset is None:
            raise Refusal("budget", f"no room for {len(envelope)} bytes of {request}")
        held = self._arena.view(offset, len(envelope))
        held[:] = envelope
        found = digest_of(held)
        if digest and found != digest:
            self._arena.release(offset)
            raise Refusal("digest", f"the envelope of {request} is not as it was sent")
        self.drop(request, attempt)
        self._stored[request] = _StoredEnvelope(
            attempt=attempt, offset=offset, length=len(envelope), touched_s=now_s, digest=found
        )
        self.bytes += len(envelope)

    def recall(self, request: str) -> tuple[int, memoryview]:
        """(attempt, view of the envelope). Raises Refusal: unknown, digest (it is damaged, and
        dropped)."""
        stored = self._stored.get(request)
        if stored is None:
            raise Refusal("unknown", f"no envelope of {request} is held")
        held = self._arena.read(stored.offset, stored.length)
        if digest_of(held) != stored.digest:
            self.drop(request, stored.attempt)
            raise Refusal("digest", f"the envelope of {request} is damaged")
        return stored.attempt, held

    def touch(self, request: str, now_s: float) -> None:
        """The request is alive."""
        if (stored := self._stored.get(request)) is not None:
            stored.touched_s = now_s

    def drop(self, request: str, attempt: int) -> None:
        """The request ended, or was written again; later attempts stay."""
        stored = self._stored.get(request)
        if stored is not None and stored.attempt <= attempt:
            del self._stored[request]
            self.bytes -= stored.length
            self._arena.view(stored.offset, stored.length)[:] = bytes(stored.length)
            self._arena.release(stored.offset)

    def stats(self) -> dict[str, int]:
        """Statistics by name: what is held, and what arrived since the start."""
        return {
            "envelopes": len(self._stored),
            "envelope_bytes": self.bytes,
            "envelopes_taken": self.taken,
            "envelopes_refused": self.refused,
        }

    def expire(self, before_s: float) -> None:
        """Drop what was last used before then."""
        for request, stored in list(self._stored.items()):
            if stored.touched_s < before_s:
                self.drop(request, stored.attempt)
