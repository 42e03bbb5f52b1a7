"""`scatter`, `gather`: DéjàVu's Table 1 over `Peer`.

A cache is seen through `CacheView`: the pieces of one block, one a layer, as writable
memory. A whole block's image is made of its token ids and its pieces.

`scatter` makes few transfers of many small pieces ("buffered copies"): the pieces of as
many blocks as fit are copied into one buffer, and leave as one batch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import msgspec
from msgspec import Struct

from relume.engine_shim.checkpoints.link.image import RunningDigest, pack_tokens
from relume.engine_shim.checkpoints.link.peer import Peer
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.fingerprint import TOKEN_BYTES
from relume.events.wire.kv.kv_errors import KvStreamError, Refusal, Unreachable

CHUNK_BYTES = 1 << 20
"""Size of a batch: small, so that little waits for it."""
REQUESTED_BYTES = 32 << 20
"""Size of blocks requested and not copied yet; more if the transport delivers more per chunk."""


class CacheView(Protocol):
    """A rank's paged KV cache."""

    def pieces(self, block_id: int) -> list[memoryview]:
        """The block's bytes, one contiguous piece a layer, writable and flat."""


class BlockOut(Struct, frozen=True, kw_only=True):
    """A full block to be sent: its key, where it lies, and the tokens it covers."""

    request: str
    child: int
    rank: int
    index: int
    attempt: int
    block_id: int
    tokens: tuple[int, ...]
    priority: int = 1
    scope: bytes = b""


class BlockIn(Struct, frozen=True):
    """A block wanted back: index in the request, where it goes, the tokens it must cover;
    `chain` when it is to come from another request than its own."""

    index: int
    block_id: int
    tokens: tuple[int, ...]
    chain: bytes = b""


class LoadResult(Struct, frozen=True):
    """What `gather` brought: the first `blocks` of those wanted, and why not more."""

    blocks: int
    bytes: int
    failure: str = ""


def scatter(view: CacheView, blocks: Sequence[BlockOut], peer: Peer) -> int:
    """Sends blocks to one peer; returns how many of them, from the first on, were accepted.

    Copies before it returns: the cache may change then.
    """
    taken = 0
    while taken < len(blocks):
        pieces: list[m.Piece] = []
        parts: list[bytes] = []
        total = 0
        for block in blocks[taken : taken + m.MAX_PIECES]:
            image = b"".join((pack_tokens(block.tokens), *view.pieces(block.block_id)))
            size = len(image)
            pieces.append(_piece(block, size))
            parts.append(image)
            total += size
            if total + size > CHUNK_BYTES:  # blocks of a cache are of one size
                break
        if not peer.flush(pieces, parts):
            break
        taken += len(parts)
    return taken


def _piece(block: BlockOut, size: int) -> m.Piece:
    """The whole image, whose digest the sender's link adds."""
    return m.Piece(
        request=block.request,
        child=block.child,
        rank=block.rank,
        index=block.index,
        attempt=block.attempt,
        offset=0,
        length=size,
        total=size,
        digest=b"",
        priority=block.priority,
        scope=block.scope,
    )


def reason_of(error: KvStreamError) -> str:
    """In a word, as `RestoreFailed` names it."""
    if isinstance(error, Refusal):
        return "gone" if error.code == "unknown" else error.code
    return "unreachable" if isinstance(error, Unreachable) else "malformed"


def gather(
    view: CacheView,
    wanted: Sequence[BlockIn],
    peer: Peer,
    request: str,
    child: int,
    rank: int,
    timeout_s: float,
    landed: Callable[[BlockIn], None] = lambda block: None,
) -> LoadResult:
    """Brings blocks (consecutive indices) from one peer into the cache.

    Each is copied, and the copy checked: digest, size and token ids. It stops before the first that
    fails, or if the peer is lost after the first; later blocks are not used, and a failed block's
    place holds garbage that must not be read. A few chunks are in flight while one is copied.
    `landed` is called for each that arrived.

    Raises Refusal, Unreachable, MalformedMessage when not even the first came.
    """
    progress = _GatherState(view, wanted, peer, request, child, rank, landed)
    try:
        return progress.run(timeout_s)
    except KvStreamError as error:
        if not progress.got.blocks:
            raise
        return msgspec.structs.replace(progress.got, failure=reason_of(error))
    finally:
        progress.close()


class _GatherState:
    """One `gather`: what has been requested, and its progress."""

    def __init__(
        self,
        view: CacheView,
        wanted: Sequence[BlockIn],
        peer: Peer,
        request: str,
        child: int,
        rank: int,
        landed: Callable[[BlockIn], None],
    ) -> None:
        self._landed = landed
        self._view = view
        self._wanted = wanted
        self._peer = peer
        self._request, self._child, self._rank = request, child, rank
        self._requested = 0
        self._digest = RunningDigest()
        self._reads = max(2, REQUESTED_BYTES // peer.read_bytes)
        self._on_way: deque[tuple[int, Any]] = deque()
        self._done = self._bytes = 0

    @property
    def got(self) -> LoadResult:
        """What is there so far."""
        return LoadResult(self._done, self._bytes)

    def run(self, timeout_s: float) -> LoadResult:
        """See gather."""
        wanted = self._wanted
        while self._done < len(wanted):
            self._ask_ahead()
            count, question = self._on_way.popleft()
            with self._peer.fetch(question, timeout_s) as blocks:
                for (at, image), block in zip(blocks, wanted[self._done :], strict=False):
                    if not self._accept(block, at, image):
                        self._peer.corrupt(self._request, self._child, self._rank, block.index)
                        return msgspec.structs.replace(self.got, failure="corrupt")
                    self._landed(block)
                    self._done += 1
                    self._bytes += at.length
                if not blocks:
                    return msgspec.structs.replace(self.got, failure="gone")
            if len(blocks) < count:  # the rest of the run lies elsewhere, or does not exist
                self.close()
        return self.got

    def _ask_ahead(self) -> None:
        if not self._on_way:
            self._requested = self._done
        wanted = self._wanted
        while self._requested < len(wanted) and len(self._on_way) < self._reads:
            first = wanted[self._requested]
            pieces = self._view.pieces(first.block_id)
            size = TOKEN_BYTES * len(first.tokens) + sum(len(piece) for piece in pieces)
            count = min(
                len(wanted) - self._requested, max(1, self._peer.read_bytes // size), m.MAX_PIECES
            )
            get = m.Get(
                seq=0,
                request=self._request,
                child=self._child,
                rank=self._rank,
                first=first.index,
                count=count,
                chain=first.chain,
            )
            self._on_way.append((count, self._peer.request(get)))
            self._requested += count

    def _accept(self, block: BlockIn, at: m.BlockAt, image: memoryview) -> bool:
        """Copies the image to its place; whether it is there as it was written."""
        pieces = self._view.pieces(block.block_id)
        tokens = pack_tokens(block.tokens)
        fits = len(image) == len(tokens) + sum(len(piece) for piece in pieces)
        if at.index != block.index or not fits or image[: len(tokens)] != tokens:
            return False
        # What is checked is the copy: what shared memory holds later does not matter, and
        # the bytes are still in the processor's cache.
        digest = self._digest
        digest.reset()
        digest.update(tokens)
        offset = len(tokens)
        for piece in pieces:
            end = offset + len(piece)
            piece[:] = image[offset:end]
            digest.update(piece)
            offset = end
        return digest.digest() == at.digest

    def close(self) -> None:
        for _, question in self._on_way:
            self._peer.forget(question)
        self._on_way.clear()
