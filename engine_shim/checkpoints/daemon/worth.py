"""What a checkpoint is worth: which one is evicted first when memory is full.

Priority-weighted recompute value (seed 000, "Checkpoint Eviction Policy"): losing a
longer prefix costs more to compute again, and Eq. 6 would use it rather than a short
one. Pure; integers.
"""

from __future__ import annotations

from collections.abc import Iterable


def worth(priority: int, prefix_tokens: int) -> int:
    """Tokens that need not be computed again, weighted."""
    return priority * prefix_tokens


def eviction_order(candidates: Iterable[tuple[str, int, float]]) -> list[str]:
    """Requests, first to go first. Candidates are (request, worth, last touched in
    seconds): least worth first; of equals the one touched longest ago; then by name, so
    that the order is one."""
    return [name for name, _, _ in sorted(candidates, key=lambda c: (c[1], c[2], c[0]))]
