"""KV blocks of one engine and its prefix cache, as counts.

Blocks are numbers, except those of shared prefixes: a prefix is a chain of segments with ids,
equal leading ids being equal tokens. An unused segment stays until its blocks are
needed, the one unused longest first. (vLLM caches blocks of unshared tokens as well, so under
pressure it loses shared ones a little sooner than this model.)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from relume.chaos.sim.engine.prefix_model import SegmentMove


class KvBlocks:
    """`total` blocks of `block_tokens` tokens each."""

    def __init__(self, total: int, block_tokens: int) -> None:
        self.total = total
        self.block_tokens = block_tokens
        self._free = total
        self._idle_blocks = 0
        self._users: dict[int, int] = {}
        self._sizes: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._before: dict[int, int] = {}
        self.moves: list[SegmentMove] | None = None
        """Published and evicted segments, if a reader empties it."""

    @property
    def available(self) -> int:
        """Number of available blocks, with those of unused segments."""
        return self._free + self._idle_blocks

    def for_tokens(self, tokens: int) -> int:
        """Number of blocks that hold `tokens` tokens."""
        return -(-tokens // self.block_tokens)

    def take(self, blocks: int) -> None:
        """Allocate blocks, evicting unused segments if needed. Raises ValueError if fewer than
        `blocks` are available."""
        if blocks > self.available:
            raise ValueError(f"{blocks} blocks of {self.available}")
        while self._free < blocks:
            self._evict()
        self._free -= blocks

    def forget(self) -> None:
        """Evict all unused segments. Those in use stay cached, other than in vLLM."""
        while self._idle:
            self._evict()

    def _evict(self) -> None:
        segment, _ = self._idle.popitem(last=False)
        size = self._sizes.pop(segment)
        del self._users[segment]
        before = self._before.pop(segment)
        if self.moves is not None:
            self.moves.append(SegmentMove(segment, before, size, False))
        self._idle_blocks -= size
        self._free += size

    def give(self, blocks: int) -> None:
        """Free blocks."""
        self._free += blocks

    def held(self, prefix: Sequence[int]) -> int:
        """Number of leading segments of `prefix` in the cache."""
        for index, segment in enumerate(prefix):
            if segment not in self._users:
                return index
        return len(prefix)

    def idle_among(self, prefix: Sequence[int]) -> int:
        """Blocks of `prefix`'s segments that are available only while they are unused."""
        return sum(self._sizes[segment] for segment in prefix if segment in self._idle)

    def use(self, prefix: Sequence[int]) -> int:
        """Use cached segments; returns their blocks."""
        for segment in prefix:
            if not self._users[segment]:
                del self._idle[segment]
                self._idle_blocks -= self._sizes[segment]
            self._users[segment] += 1
        return sum(self._sizes[segment] for segment in prefix)

    def publish(self, segment: int, blocks: int, before: int = 0) -> bool:
        """Make a segment of allocated blocks, after `before` others of its prompt; False: it
        exists already."""
        if segment in self._users:
            return False
        self._users[segment], self._sizes[segment] = 1, blocks
        self._before[segment] = before
        if self.moves is not None:
            self.moves.append(SegmentMove(segment, before, blocks, True))
        return True

    def cached(self) -> list[SegmentMove]:
        """All cached segments."""
        return [
            SegmentMove(one, self._before[one], size, True) for one, size in self._sizes.items()
        ]

    def leave(self, prefix: Sequence[int]) -> None:
        """Stop using segments; the last ones are evicted first."""
        for segment in reversed(prefix):
            self._users[segment] -= 1
            if not self._users[segment]:
                self._idle[segment] = None
                self._idle_blocks += self._sizes[segment]
