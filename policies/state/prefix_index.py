"""Which workers hold how much of a prompt's prefix, for decisions.

A prefix is given by its marks (`relume.events.wire.prefix`). It counts what engines reported and
what dispatches will have them make: those in the fold (`relume.policies.state.prefix_cache`), and
the replica's own that the fold lacks. A pure function of the view, so replay gets the same.
"""

from __future__ import annotations

from collections.abc import Container

from relume.events.vocabulary.enums import EnginePhase
from relume.events.wire.prefix import HASH_BYTES, MAX_MARKS, blocks_at, common, unpack
from relume.policies.state.fleet import Worker
from relume.policies.state.overlay.view import View
from relume.policies.state.prefix_cache import index_of

_MOST = HASH_BYTES * MAX_MARKS
FEW = 64
"""Of no more prompts than this that a worker is to compute, each is compared; of more, all are
looked up in the index."""


def block_tokens(view: View, model: str) -> int:
    """Tokens per block in which workers of `model` report their prefixes; 0: none reports them."""
    for worker in view.fleet.workers.values():
        if (
            worker.model == model
            and worker.cached.block_tokens
            and worker.engine == EnginePhase.READY
        ):
            return worker.cached.block_tokens
    return 0


def hit_blocks(view: View, worker: Worker, prefix: bytes) -> int:
    """Blocks of the leading prefix that `worker` holds, or is expected to; O(marks)."""
    if not prefix or not worker.cached.block_tokens:
        return 0
    prefix = prefix[:_MOST]
    sure = view.expected.on(worker, prefix)
    expected = worker.cached.expected
    if len(expected) <= FEW:
        held: Container[int] = worker.cached.marks
        sure = max(sure, max((common(prefix, other) for other in expected.values()), default=0))
    else:
        held = _PrefixHolders(view, worker)
    marks = unpack(prefix)
    while sure < len(marks) and marks[sure] in held:
        sure += 1
    return blocks_at(sure)


class _PrefixHolders:
    """The marks of one worker in the index."""

    def __init__(self, view: View, worker: Worker) -> None:
        index = index_of(view.fleet)
        self._masks, self._bit = index.masks, index.bit(worker.name)

    def __contains__(self, one: object) -> bool:
        return bool(self._masks.get(one, 0) & self._bit)  # type: ignore[call-overload]


def runs(view: View, prefix: bytes) -> list[tuple[int, int]]:
    """(blocks, workers) of the leading prefix, the longest first: sets of workers as bits
    (`relume.policies.state.prefix_cache.Index`), each worker in one of them; those that hold
    nothing in none. O(marks), however many workers there are."""
    found: list[tuple[int, int]] = []
    prefix = prefix[:_MOST]
    index, marks = index_of(view.fleet), unpack(prefix)
    own = _own_bits(view, prefix, len(marks)) if view.expected else None
    masks, running = index.masks, 0
    for number, one in enumerate(marks):
        here = masks.get(one, 0)
        if own is not None:
            here |= own[number]
        if number:
            here &= running
            if here != running:
                found.append((blocks_at(number), running & ~here))
        if not here:
            break
        running = here
    else:
        if running:
            found.append((blocks_at(len(marks)), running))
    found.reverse()
    return found


def _own_bits(view: View, prefix: bytes, count: int) -> list[int] | None:
    """By mark, the workers that own dispatches the fold lacks will have make it."""
    bits = [0] * count
    index = index_of(view.fleet)
    for name, marks in view.expected.everywhere(view.fleet, prefix):
        bits[marks - 1] |= index.bit(name)
    for number in range(count - 2, -1, -1):
        bits[number] |= bits[number + 1]
    return bits if count and bits[0] else None
