"""Which workers hold how much of a prompt's prefix, for decisions.

A prefix is given by its marks (`events.prefix`). It counts what engines told and what
dispatches will have them make: those in the fold (`policies.cached`), and the replica's own that
the fold lacks. A pure function of the view, so replay gets the same.
"""

from __future__ import annotations

from events.prefix import HASH_BYTES, MAX_MARKS, blocks_at, unpack
from policies.cached import index_of
from policies.state import Worker
from policies.view import View

_MOST = HASH_BYTES * MAX_MARKS


def block_tokens(view: View, model: str) -> int:
    """Tokens of a block in which workers of `model` tell their prefixes; 0: none does."""
    for worker in view.fleet.workers.values():
        if worker.model == model and worker.cached.block_tokens and worker.engine == "ready":
            return worker.cached.block_tokens
    return 0


def hit_blocks(view: View, worker: Worker, prefix: bytes) -> int:
    """Blocks of the leading prefix that `worker` holds, or is expected to; O(marks)."""
    if not prefix or not worker.cached.block_tokens:
        return 0
    index = index_of(view.fleet)
    masks, bit, own = index.masks, index.bit(worker.name), view.expected
    marks = 0
    for one in unpack(prefix[:_MOST]):
        if not masks.get(one, 0) & bit and not (own.marks and own.on(worker, one)):
            break
        marks += 1
    return blocks_at(marks)


def runs(view: View, prefix: bytes) -> list[tuple[int, int]]:
    """(blocks, workers) of the leading prefix, the longest first: sets of workers as bits
    (`policies.cached.Index`), each worker in one of them; those that hold nothing in none.
    O(marks), however many workers there are."""
    found: list[tuple[int, int]] = []
    masks, own = index_of(view.fleet).masks, view.expected
    running = marks = 0
    for one in unpack(prefix[:_MOST]):
        here = masks.get(one, 0)
        if one in own.marks:
            here |= _own_bits(view, one)
        if marks:
            here &= running
            if here != running:
                found.append((blocks_at(marks), running & ~here))
        if not here:
            break
        running, marks = here, marks + 1
    else:
        if running:
            found.append((blocks_at(marks), running))
    found.reverse()
    return found


def _own_bits(view: View, one: int) -> int:
    """Workers that own dispatches the fold lacks will have make this block."""
    index, workers = index_of(view.fleet), view.fleet.workers
    bits = 0
    for name in view.expected.workers(one):
        worker = workers.get(name)
        if worker is not None and view.expected.on(worker, one):
            bits |= index.bit(name)
    return bits
