"""The blocks: their writers, their location, and what is evicted when memory is full. All of it is
synchronous and has no clock (`now_s` is passed in). A block is accepted if its bytes have the
digest they were sent with, and handed out with that digest, which the reader checks on what it has
copied. Equal images are stored once: equal digests are confirmed by comparing bytes.

Room is made in this order: freed pages, cold checkpoints to the file tier, then
checkpoints of less worth than the one that wants in (least first, from their tails, since
a prefix is of use without its tail). A block that finds no room is refused, never waited
for; its request keeps the prefix it has.
"""

from __future__ import annotations

from collections.abc import Sequence as Row

from relume.engine_shim.checkpoints.daemon.contents import Content, Contents
from relume.engine_shim.checkpoints.daemon.envelopes import Envelopes
from relume.engine_shim.checkpoints.daemon.holdings import Assembly, Block, Holding, Sequence
from relume.engine_shim.checkpoints.daemon.ledger import Ledger
from relume.engine_shim.checkpoints.daemon.prefix_lookup import Prefixes
from relume.engine_shim.checkpoints.daemon.store.arena import Arena
from relume.engine_shim.checkpoints.daemon.store.file_tier import FileTier
from relume.engine_shim.checkpoints.daemon.worth import eviction_order, worth
from relume.engine_shim.checkpoints.link.image import Buffer, digest_of
from relume.events.wire.kv.fingerprint import Fingerprint
from relume.events.wire.kv.kv_errors import Refusal
from relume.events.wire.kv.kv_messages import Change, Piece, Position

MAX_ENDED = 16_384
COUNTS = (
    "blocks", "assemblies", "taken", "refused", "evicted", "demoted", "expired", "dropped",
    "voided", "corrupt", "served", "lent", "bytes_in", "bytes_out",
)  # fmt: skip
MAX_BLOCKS = 1 << 20
"""Bounds the index."""


class BlockStore:
    """Checkpoints under a byte budget. One thread. Closes its tiers with `close`."""

    def __init__(
        self,
        arena: Arena,
        cold: FileTier | None = None,
        ttl_s: float = 600.0,
        cold_after_s: float = 5.0,
    ) -> None:
        """`ttl_s`: a request without any write or read for this time is dropped. `cold_after_s`:
        one without use for this time may go to the file tier."""
        self.arena = arena
        self.contents = Contents(arena, cold)
        self.envelopes = Envelopes(arena)
        self.prefixes = Prefixes(self.contents.read)
        self.ledger = Ledger()
        self._ttl_s = ttl_s
        self._cold_after_s = cold_after_s
        self._holdings: dict[str, Holding] = {}
        self._ended: dict[str, int] = {}
        self._counts = dict.fromkeys(COUNTS, 0)

    # --- writing -----------------------------------------------------------------------

    def put(
        self, writer: str, fingerprint: Fingerprint, piece: Piece, data: memoryview, now_s: float
    ) -> Position:
        """Takes one piece. Raises Refusal: fenced, fingerprint, budget, digest, malformed."""
        try:
            holding = self._admit(writer, fingerprint, piece)
            holding.touched_s = now_s
            sequence = holding.sequence(piece.child, piece.rank)
            self._place(holding, sequence, piece, data, now_s)
        except Refusal:
            self._counts["refused"] += 1
            self._forget_if_empty(piece.request)
            raise
        self._counts["bytes_in"] += piece.length
        self.envelopes.touch(piece.request, now_s)
        return Position(
            request=piece.request,
            child=piece.child,
            rank=piece.rank,
            attempt=holding.attempt,
            blocks=sequence.prefix,
        )

    def keep(
        self, request: str, attempt: int, envelope: Buffer, now_s: float, digest: bytes = b""
    ) -> None:
        """Takes a request's envelope. Raises Refusal: fenced, budget, digest."""
        if attempt <= self._ended.get(request, -1):
            raise Refusal("fenced", f"attempt {attempt} of {request} has ended")
        self.envelopes.keep(request, attempt, envelope, now_s, digest)

    def _admit(self, writer: str, fingerprint: Fingerprint, piece: Piece) -> Holding:
        if piece.attempt <= self._ended.get(piece.request, -1):
            raise Refusal("fenced", f"attempt {piece.attempt} of {piece.request} has ended")
        holding = self._holdings.get(piece.request)
        if holding is not None and piece.attempt < holding.attempt:
            raise Refusal("fenced", f"attempt {holding.attempt} of {piece.request} is live")
        if holding is not None and holding.fingerprint != fingerprint:
            if piece.attempt == holding.attempt:
                raise Refusal("fingerprint", f"{piece.request} was written under another one")
            self._end(holding, "dropped")
            holding = None
        if holding is None:
            holding = Holding(piece.request, piece.attempt, writer, fingerprint)
            holding.scope = piece.scope
            self._holdings[piece.request] = holding
        if holding.scope != piece.scope:
            self._share_nothing(holding)
        holding.attempt = piece.attempt
        holding.writer = writer
        holding.priority = piece.priority
        return holding

    def _place(
        self, holding: Holding, sequence: Sequence, piece: Piece, data: memoryview, now_s: float
    ) -> None:
        held = sequence.blocks.get(piece.index)
        if held and (held.attempt == piece.attempt or held.content.digest == piece.digest):
            held.attempt = piece.attempt
            self.prefixes.extend(holding, sequence)
        elif piece.length == piece.total:
            if digest_of(data) != piece.digest:
                raise Refusal("digest", f"block {piece.index} arrived damaged")
            content = self.contents.same_as(holding.family, piece.digest, data)
            if content is None:
                content = self._store(holding, piece, now_s)
                self.contents.writable(content)[:] = data
            self._hold(holding, sequence, piece, content)
        else:
            self._assemble(holding, sequence, piece, data, now_s)

    def _assemble(
        self, holding: Holding, sequence: Sequence, piece: Piece, data: memoryview, now_s: float
    ) -> None:
        """One of several pieces of a block, in any order, perhaps again."""
        assembly = self._assembly(holding, sequence, piece, now_s)
        assembly.digest = piece.digest or assembly.digest
        fits = assembly.fits(piece.offset, piece.length)
        if fits is None:
            self._abandon(sequence, piece.index)
            raise Refusal("malformed", f"pieces of block {piece.index} overlap")
        content = assembly.content
        image = self.contents.writable(content)
        if fits:
            image[piece.offset : piece.offset + piece.length] = data
            assembly.have[piece.offset] = piece.length
            assembly.missing -= piece.length
        if assembly.missing or not assembly.digest:
            return
        if digest_of(image) != assembly.digest:
            self._abandon(sequence, piece.index)
            raise Refusal("digest", f"block {piece.index} arrived damaged")
        del sequence.open[piece.index]
        self._counts["assemblies"] -= 1
        content.digest = assembly.digest
        if same := self.contents.same_as(content.family, content.digest, image):
            self.contents.abandon(content)
            content = same
        self._hold(holding, sequence, piece, content)

    def _assembly(
        self, holding: Holding, sequence: Sequence, piece: Piece, now_s: float
    ) -> Assembly:
        """The block the piece belongs to, started over if this is the first of its attempt."""
        assembly = sequence.open.get(piece.index)
        if assembly and (
            assembly.attempt < piece.attempt or assembly.content.length != piece.total
        ):
            self._abandon(sequence, piece.index)
            assembly = None
        if assembly is None:
            assembly = Assembly(self._store(holding, piece, now_s), piece.attempt)
            sequence.open[piece.index] = assembly
            self._counts["assemblies"] += 1
        return assembly

    def _abandon(self, sequence: Sequence, index: int) -> None:
        self.contents.abandon(sequence.open.pop(index).content)
        self._counts["assemblies"] -= 1

    def _hold(self, holding: Holding, sequence: Sequence, piece: Piece, content: Content) -> None:
        self.contents.refer(content)
        if piece.index in sequence.blocks:
            # What an older attempt computed after a block that now differs is void.
            for index in sequence.from_on(piece.index):
                if index == piece.index or sequence.blocks[index].attempt < piece.attempt:
                    self._remove(sequence, index)
        sequence.add(piece.index, Block(content, piece.attempt))
        self._counts["taken"] += 1
        self._counts["blocks"] += 1
        self.prefixes.extend(holding, sequence)
        self._note(holding, piece.child, piece.rank)

    def _remove(self, sequence: Sequence, index: int) -> bool:
        """Takes a block out; True when that freed memory."""
        self._counts["blocks"] -= 1
        self.prefixes.cut(sequence, index)
        return self.contents.unrefer(sequence.remove(index))

    def _share_nothing(self, holding: Holding) -> None:
        """Its pieces contradict each other about what their blocks depend on."""
        holding.scope = b""
        for sequence in holding.sequences.values():
            self.prefixes.cut(sequence, 0)

    # --- room --------------------------------------------------------------------------

    def _store(self, holding: Holding, piece: Piece, now_s: float) -> Content:
        """Room for the piece's image. Raises Refusal (budget)."""
        if self._counts["blocks"] + self._counts["assemblies"] >= MAX_BLOCKS:
            raise Refusal("budget", "the index is full")
        while (
            content := self.contents.allocate(holding.family, piece.digest, piece.total)
        ) is None:
            if not self._evict_for(holding, piece, now_s):
                raise Refusal("budget", f"no room for {piece.total} bytes of {piece.request}")
        return content

    def _evict_for(self, wanting: Holding, piece: Piece, now_s: float) -> bool:
        """Frees something for `wanting`; False when nothing may go for it."""
        if self.arena.host_short():
            self.arena.trim()
            if self.arena.host_short():
                return False
        others = [h for h in self._holdings.values() if h is not wanting]
        cold = [h for h in others if now_s - h.touched_s >= self._cold_after_s]
        for holding in sorted(cold, key=lambda h: (h.touched_s, h.request)):
            if self._demote_tail(holding):
                return True
        gain = worth(piece.priority, wanting.prefix_tokens + wanting.fingerprint.block_size)
        for name in eviction_order((h.request, h.worth, h.touched_s) for h in others):
            holding = self._holdings[name]
            if holding.worth >= gain:
                return False
            if self._evict_tail(holding):
                return True
        return False

    def keep_to(self, share: float) -> None:
        """Limit memory to this share of the budget from now on. The excess is evicted, lowest worth
        first; what is being read is evicted at the next allocation."""
        self.arena.keep_to(share)
        while self.arena.used > self.arena.budget:
            holdings = self._holdings.values()
            order = eviction_order((h.request, h.worth, h.touched_s) for h in holdings)
            if not any(self._evict_tail(self._holdings[name]) for name in order):
                return

    def _demote_tail(self, holding: Holding) -> bool:
        """Moves the last block of `holding` that is in memory to the file; True if one was."""
        for sequence in holding.sequences.values():
            for index in sequence.from_on(0):
                if self.contents.demote(sequence.blocks[index].content):
                    self._counts["demoted"] += 1
                    return True
        return False

    def _evict_tail(self, holding: Holding) -> bool:
        """Drops blocks from the ends of `holding` until memory was freed; False when all of
        its memory is pinned or shared. Then it holds less, though nothing was won."""
        freed = False
        for (child, rank), sequence in holding.sequences.items():
            for index in list(sequence.open):
                self._abandon(sequence, index)
                freed = True
            for index in sequence.from_on(0):
                if freed or sequence.blocks[index].content.pins:
                    break
                freed = self._remove(sequence, index)
                self._counts["evicted"] += 1
                self._note(holding, child, rank, "" if sequence.prefix else "evicted")
            if freed:
                break
        self._forget_if_empty(holding.request)
        return freed

    # --- reading -----------------------------------------------------------------------

    def position(self, request: str) -> tuple[list[Position], Fingerprint | None]:
        """The position of each sequence of `request`, and the fingerprint of its blocks."""
        holding = self._holdings.get(request)
        if holding is None:
            return [], None
        positions = [
            Position(
                request=request,
                child=child,
                rank=rank,
                attempt=holding.attempt,
                blocks=sequence.prefix,
            )
            for (child, rank), sequence in sorted(holding.sequences.items())
        ]
        return positions, holding.fingerprint

    def touch(self, request: str, now_s: float) -> None:
        """Keeps it from expiring and from the file tier."""
        if holding := self._holdings.get(request):
            holding.touched_s = now_s

    def run(self, request: str, child: int, rank: int, first: int, count: int) -> list[Content]:
        """Contents of the run of held blocks from `first` on, at most `count`."""
        holding = self._holdings.get(request)
        sequence = holding.sequences.get((child, rank)) if holding else None
        found: list[Content] = []
        while sequence and len(found) < count and first + len(found) in sequence.blocks:
            found.append(sequence.blocks[first + len(found)].content)
        return found

    def match(self, chains: Row[bytes], fingerprint: Fingerprint) -> tuple[str, int, int]:
        """(request, child, blocks) of the sequence with the longest prefix with these chains, on
        all ranks of the caller; 0 blocks if there is none."""
        return self.prefixes.longest(chains, fingerprint, self._holdings)

    def lend(
        self, request: str, child: int, rank: int, first: int, count: int, chain: bytes
    ) -> list[Content]:
        """A run of `request`'s blocks for another one whose prefix up to block `first` has
        this chain; nothing if they have changed."""
        holding = self._holdings.get(request)
        sequence = holding.sequences.get((child, rank)) if holding else None
        if sequence is None or first >= len(sequence.chains) or sequence.chains[first] != chain:
            return []
        last = min(first + count, len(sequence.chains))
        return [sequence.blocks[index].content for index in range(first, last)]

    def served(self, length: int, lent: bool = False) -> None:
        """A block left for a reader; `lent`: for another request than its own."""
        self._counts["served"] += 1
        self._counts["lent"] += lent
        self._counts["bytes_out"] += length

    def discard(self, request: str, child: int, rank: int, index: int) -> None:
        """The block was found damaged: it and all after it are useless, and no other request can
        share it."""
        self._counts["corrupt"] += 1
        holding = self._holdings.get(request)
        sequence = holding.sequences.get((child, rank)) if holding else None
        if holding is None or sequence is None or index not in sequence.blocks:
            return
        self.contents.hide(sequence.blocks[index].content)
        for later in sequence.from_on(index):
            self._remove(sequence, later)
        self._note(holding, child, rank, "" if sequence.prefix else "evicted")
        self._forget_if_empty(request)

    # --- ends --------------------------------------------------------------------------

    def drop(self, request: str, attempt: int, moved: bool = False) -> tuple[int, int]:
        """The request ended, or is held by others now (`moved`: its writer may come back);
        (blocks, bytes) that were held. Later attempts are left."""
        if not moved:
            self._ended[request] = max(attempt, self._ended.pop(request, -1))
        while len(self._ended) > MAX_ENDED:
            del self._ended[next(iter(self._ended))]
        self.envelopes.drop(request, attempt)
        holding = self._holdings.get(request)
        if holding is None or holding.attempt > attempt:
            return 0, 0
        self._counts["dropped"] += 1
        return self._end(holding, "dropped")

    def void(self, request: str, attempt: int) -> tuple[int, int]:
        """What attempts up to this one wrote is wrong: it goes, and they may write no more;
        (blocks, bytes) that were held of it. What a later attempt wrote, or confirmed, is left."""
        holding = self._holdings.get(request)
        blocks, size = self.drop(request, attempt)
        if holding is not None and holding.attempt > attempt:
            blocks, size = self._void(holding, attempt)
        self._counts["voided"] += blocks
        return blocks, size

    def _void(self, holding: Holding, attempt: int) -> tuple[int, int]:
        blocks, before = 0, holding.bytes
        for (child, rank), sequence in holding.sequences.items():
            for index in [i for i, a in sequence.open.items() if a.attempt <= attempt]:
                self._abandon(sequence, index)
            for index in sequence.from_on(0):
                if sequence.blocks[index].attempt <= attempt:
                    self._remove(sequence, index)
                    blocks += 1
            self._note(holding, child, rank, "" if sequence.prefix else "evicted")
        self._forget_if_empty(holding.request)
        return blocks, before - holding.bytes

    def expire(self, now_s: float) -> list[str]:
        """Drops requests without use for the time to live; returns their names."""
        self.envelopes.expire(now_s - self._ttl_s)
        old = [h for h in self._holdings.values() if now_s - h.touched_s > self._ttl_s]
        for holding in old:
            self._counts["expired"] += 1
            self._end(holding, "expired")
        return [holding.request for holding in old]

    def _end(self, holding: Holding, reason: str) -> tuple[int, int]:
        blocks, held = 0, holding.bytes
        for (child, rank), sequence in holding.sequences.items():
            for index in list(sequence.open):
                self._abandon(sequence, index)
            for index in sequence.from_on(0):
                self._remove(sequence, index)
                blocks += 1
            self._note(holding, child, rank, reason)
        self._holdings.pop(holding.request, None)
        return blocks, held

    def _forget_if_empty(self, request: str) -> None:
        holding = self._holdings.get(request)
        if holding and not any(s.blocks or s.open for s in holding.sequences.values()):
            del self._holdings[request]

    # --- reports -----------------------------------------------------------------------

    def _note(self, holding: Holding, child: int, rank: int, reason: str = "") -> None:
        sequence = holding.sequences[child, rank]
        tokens = sequence.prefix * holding.fingerprint.block_size
        change = Change(
            request=holding.request,
            child=child,
            rank=rank,
            attempt=holding.attempt,
            blocks=sequence.prefix,
            tokens=tokens,
            bytes=sequence.bytes,
            worker=holding.writer,
            reason=reason,
            ranks=holding.fingerprint.tp,
        )
        self.ledger.note(change)

    def stats(self) -> dict[str, int]:
        """Statistics by name. `memory_used` counts whole pages; `memory_resident` is what the arena
        has resident now."""
        cold = self.contents.cold
        return {
            **self._counts,
            "shared": self.contents.shared,
            "prefixes": len(self.prefixes),
            "requests": len(self._holdings),
            **self.envelopes.stats(),
            "contents": len(self.contents),
            "memory_used": self.arena.used,
            "memory_budget": self.arena.budget,
            "memory_resident": self.arena.resident(),
            "file_used": cold.used if cold else 0,
            "file_budget": cold.budget if cold else 0,
        }

    def close(self) -> None:
        self._holdings.clear()
        self.contents.close()
