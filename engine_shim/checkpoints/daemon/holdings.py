"""What the store has about each request whose blocks it holds. Data, and its arithmetic."""

from __future__ import annotations

from relume.engine_shim.checkpoints.daemon.contents import Content
from relume.engine_shim.checkpoints.daemon.worth import worth
from relume.events.wire.kv.fingerprint import Fingerprint


class Assembly:
    """A block of which not all pieces have come."""

    __slots__ = ("attempt", "content", "digest", "have", "missing")

    def __init__(self, content: Content, attempt: int) -> None:
        self.content = content
        self.attempt = attempt
        self.digest = b""
        self.have: dict[int, int] = {}
        self.missing = content.length

    def fits(self, offset: int, length: int) -> bool | None:
        """True: new bytes; False: a duplicate; None: overlaps what has come."""
        if self.have.get(offset) == length:
            return False
        overlaps = any(o < offset + length and offset < o + n for o, n in self.have.items())
        return None if overlaps else True


class Block:
    """Block `index` of a sequence: its content, and the attempt that wrote it."""

    __slots__ = ("attempt", "content")

    def __init__(self, content: Content, attempt: int) -> None:
        self.content = content
        self.attempt = attempt


class Sequence:
    """The blocks of one (child, rank) of a request. `prefix` counts those without a gap
    from the first on; `bytes` are of all blocks, shared ones counted in each. `chains`:
    see `prefixes`."""

    __slots__ = ("blocks", "bytes", "chains", "child", "open", "prefix", "rank", "request")

    def __init__(self, request: str, child: int, rank: int) -> None:
        self.request = request
        self.child = child
        self.rank = rank
        self.chains: list[bytes] = []
        self.blocks: dict[int, Block] = {}
        self.open: dict[int, Assembly] = {}
        self.prefix = 0
        self.bytes = 0

    def add(self, index: int, block: Block) -> None:
        self.blocks[index] = block
        self.bytes += block.content.length
        while self.prefix in self.blocks:
            self.prefix += 1

    def remove(self, index: int) -> Content:
        """Takes block `index` out; the prefix ends before it."""
        block = self.blocks.pop(index)
        self.bytes -= block.content.length
        self.prefix = min(self.prefix, index)
        return block.content

    def from_on(self, index: int) -> list[int]:
        """Indices held at or after `index`, the last first."""
        return sorted((i for i in self.blocks if i >= index), reverse=True)


class Holding:
    """All that is held of one request."""

    def __init__(self, request: str, attempt: int, writer: str, fingerprint: Fingerprint) -> None:
        self.request = request
        self.attempt = attempt
        self.writer = writer
        self.fingerprint = fingerprint
        self.family = fingerprint.digest
        self.priority = 1
        self.scope = b""
        self.touched_s = 0.0
        self.sequences: dict[tuple[int, int], Sequence] = {}

    def sequence(self, child: int, rank: int) -> Sequence:
        key = child, rank
        if key not in self.sequences:
            self.sequences[key] = Sequence(self.request, child, rank)
        return self.sequences[key]

    @property
    def prefix_tokens(self) -> int:
        """Tokens covered on every rank, over all children."""
        by_child: dict[int, int] = {}
        for (child, _), sequence in self.sequences.items():
            by_child[child] = min(by_child.get(child, sequence.prefix), sequence.prefix)
        return sum(by_child.values()) * self.fingerprint.block_size

    @property
    def worth(self) -> int:
        return worth(self.priority, self.prefix_tokens)

    @property
    def bytes(self) -> int:
        """Bytes of its blocks; those shared with others are counted in each."""
        return sum(sequence.bytes for sequence in self.sequences.values())
