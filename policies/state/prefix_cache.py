"""Which worker holds the KV blocks of which prefix, by reports of engines and by expectation from
dispatches.

Reported: `PrefixBlocksChanged` says which marks (`relume.events.wire.prefix`) an engine's prefix
cache gained and lost; its death, its loss or a new start clears them. Expected: an attempt that was
dispatched will make its prompt's blocks, so it counts as if they were there until its first
token (its engine has reported them by then) or its end. So in a burst with one prefix the second
request already follows the first one; a view adds its own dispatches that the fold lacks.

Per worker the fold keeps what it holds; how many is in the state hash, they themselves in
snapshots only, since hashing all of them each tick would cost milliseconds. The index over all
workers (`Index`: hash -> workers, one bit each) follows from that: it is built for the first
decision that needs it, updated by the fold from then on, and no part of the state. A log that is
only folded does not pay for it.

Bounds: `MAX_TOLD` a worker, where engines stop reporting, and `TOTAL` in all: each worker of a
larger fleet has its share, at least `SHARE`, and reports beyond it are not stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import repeat

from relume.events import vocabulary as v
from relume.events.wire.prefix import MAX_REPORTED, unpack
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.lifecycles.engine_life import taken_in

TOTAL = 1 << 20
SHARE = 1 << 10


class Index:
    """`masks`: by hash, the workers that hold or expect it, as bits. `bits`: the bit of each
    worker. `counts`: by worker, how many of its attempts expect a hash."""

    __slots__ = ("bits", "counts", "free", "masks", "names")

    def __init__(self, fleet: Fleet) -> None:
        self.masks: dict[int, int] = {}
        self.bits: dict[str, int] = {}
        self.names: list[str] = []
        self.free: list[int] = []
        """Bits of removed workers."""
        self.counts: dict[str, dict[int, int]] = {}
        for worker in fleet.workers.values():
            self.gained(worker, worker.cached.marks)
            for data in worker.cached.expected.values():
                self.expected(worker, unpack(data))

    def bit(self, name: str) -> int:
        """The bit of a worker."""
        found = self.bits.get(name)
        if found is None:
            if self.free:
                found = self.free.pop()
                self.names[found.bit_length() - 1] = name
            else:
                found = 1 << len(self.names)
                self.names.append(name)
            self.bits[name] = found
        return found

    def forget(self, name: str) -> None:
        """The worker holds nothing, and its bit is another's from now on."""
        self.counts.pop(name, None)
        bit = self.bits.pop(name, 0)
        if bit:
            self.names[bit.bit_length() - 1] = ""
            self.free.append(bit)

    def gained(self, worker: Worker, hashes: Iterable[int]) -> None:
        """The worker holds these."""
        masks, bit = self.masks, self.bit(worker.name)
        for one in hashes:
            masks[one] = masks.get(one, 0) | bit

    def lost(self, worker: Worker, hashes: Iterable[int]) -> None:
        """The worker no longer holds these."""
        counts = self.counts.get(worker.name, {})
        self._clear(self.bit(worker.name), [one for one in hashes if one not in counts])

    def expected(self, worker: Worker, hashes: Iterable[int]) -> None:
        """One more attempt will make these."""
        counts = self.counts.setdefault(worker.name, {})
        masks, bit = self.masks, self.bit(worker.name)
        for one in hashes:
            counts[one] = counts.get(one, 0) + 1
            masks[one] = masks.get(one, 0) | bit

    def settled(self, worker: Worker, hashes: Iterable[int]) -> None:
        """One attempt has made them, or never will."""
        counts, marks = self.counts.get(worker.name, {}), worker.cached.marks
        gone = []
        for one in hashes:
            left = counts.get(one, 0) - 1
            if left > 0:
                counts[one] = left
            elif counts.pop(one, 0) and one not in marks:
                gone.append(one)
        self._clear(self.bit(worker.name), gone)

    def _clear(self, bit: int, hashes: Iterable[int]) -> None:
        masks = self.masks
        for one in hashes:
            left = masks.get(one, 0) & ~bit
            if left:
                masks[one] = left
            else:
                masks.pop(one, None)


def index_of(fleet: Fleet) -> Index:
    """The index over all workers, built on the first call."""
    found: Index | None = fleet.__dict__.get("prefixes")
    if found is None:
        found = fleet.__dict__["prefixes"] = Index(fleet)
    return found


def forget_index(fleet: Fleet) -> None:
    """The fold was replaced: what followed from it is void."""
    fleet.__dict__.pop("prefixes", None)


# --- the fold ------------------------------------------------------------------------


_TELLS = taken_in(v.PrefixBlocksChanged)


def changed(fleet: Fleet, stream: str, epoch: int, event: v.PrefixBlocksChanged) -> None:
    """An engine reported what its prefix cache gained and lost."""
    worker = fleet.workers.get(stream[2:])
    if worker is None or event.incarnation != worker.incarnation:
        return
    if worker.engine not in _TELLS:
        return
    cached, index = worker.cached, fleet.__dict__.get("prefixes")
    marks = cached.marks
    if not event.reset and not cached.block_tokens:
        return
    if event.reset:
        _forget_all(index, worker)
        marks = cached.marks
        cached.block_tokens = event.block_tokens
    if event.removed:
        gone = unpack(event.removed)
        deque(map(marks.pop, gone, repeat(None)), 0)
        if index is not None:
            index.lost(worker, gone)
    if event.stored:
        new = unpack(event.stored)
        space = min(MAX_REPORTED, max(SHARE, TOTAL // len(fleet.workers))) - len(marks)
        if len(new) > space:
            new = new[: max(space, 0)]
        for one in new:
            marks[one] = None
        if index is not None:
            index.gained(worker, new)
    worker.prefix_marks = len(marks)


def _forget_all(index: Index | None, worker: Worker) -> None:
    gone, worker.cached.marks, worker.prefix_marks = worker.cached.marks, {}, 0
    if index is not None and gone:
        index.lost(worker, gone)


def dispatched(fleet: Fleet, worker: Worker, key: str, prefix: bytes) -> None:
    """The attempt was sent there: its prompt's blocks will be there soon."""
    cached = worker.cached
    if not cached.block_tokens or not prefix or key in cached.expected:
        return
    cached.expected[key] = prefix
    index = fleet.__dict__.get("prefixes")
    if index is not None:
        index.expected(worker, unpack(prefix))


def settled(fleet: Fleet, worker: Worker, key: str) -> None:
    """The attempt made its prompt's blocks, or never will."""
    prefix = worker.cached.expected.pop(key, None)
    if prefix is not None:
        index = fleet.__dict__.get("prefixes")
        if index is not None:
            index.settled(worker, unpack(prefix))


def settled_beyond(fleet: Fleet, worker: Worker) -> None:
    """Only attempts that are still accounted for will."""
    for key in [key for key in worker.cached.expected if key not in worker.attempts]:
        settled(fleet, worker, key)


def cleared(fleet: Fleet, worker: Worker) -> None:
    """The engine that held it all is gone."""
    cached = worker.cached
    for key in list(cached.expected):
        settled(fleet, worker, key)
    _forget_all(fleet.__dict__.get("prefixes"), worker)


def forgotten(fleet: Fleet, worker: Worker) -> None:
    """The worker itself is."""
    cleared(fleet, worker)
    index = fleet.__dict__.get("prefixes")
    if index is not None:
        index.forget(worker.name)
