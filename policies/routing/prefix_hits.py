"""What workers hold of one prompt, for an order of workers: those with most of it first, what one
of them holds, and what the others hold at most. It is `prefixes.runs` in tokens, by name."""

from __future__ import annotations

from collections.abc import Iterator

from relume.policies.state import prefix_index
from relume.policies.state.overlay.view import View
from relume.policies.state.prefix_cache import index_of


class Hits:
    """Of a prompt with these marks (`relume.events.wire.prefix`). Tokens, by worker's name."""

    __slots__ = ("_bits", "_names", "_runs")

    def __init__(self, view: View, model: str, prefix: bytes) -> None:
        index = index_of(view.fleet)
        block_tokens = prefix_index.block_tokens(view, model)
        self._names, self._bits = index.names, index.bit
        found = prefix_index.runs(view, prefix) if block_tokens else []
        self._runs = [(blocks * block_tokens, workers) for blocks, workers in found]

    def __bool__(self) -> bool:
        return bool(self._runs)

    def of(self, worker: str) -> int:
        """What `worker` holds."""
        bit = self._bits(worker)
        for tokens, workers in self._runs:
            if workers & bit:
                return tokens
        return 0

    def longest(self) -> Iterator[tuple[str, int]]:
        """(worker, tokens), those that hold most first."""
        for tokens, workers in self._runs:
            left = workers
            while left:
                low = left & -left
                yield self._names[low.bit_length() - 1], tokens
                left ^= low


class NoHits(Hits):
    """No worker holds anything, or it is unknown."""

    def __init__(self) -> None:
        self._runs = []


NONE = NoHits()


def of(view: View, model: str, prefix: bytes) -> Hits:
    """What workers of `model` hold of a prompt with these marks."""
    return Hits(view, model, prefix) if prefix else NONE
