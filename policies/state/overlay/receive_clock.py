"""When a replica received which revisions, on its own clock.

It records this in its stream (`GroupsReceived`), before each decision, so that replay has the age
of each status at the decision. Times count from a beginning of the replica's life; they are
compared with times of the same replica only.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque

from relume.events import vocabulary as v
from relume.policies.state.fleet import Receipts

MAX_TIMES = 1024
"""Number of stored times; an older revision counts as received with the oldest of them."""
UNSAID = 256
"""Maximum number of times not yet recorded."""
TOGETHER_US = 1000
"""Revisions received within this time share one entry."""


class UnrecordedReceipts:
    """What a replica received and has not recorded yet. Its receive clock has it immediately, so
    that worker indexes can follow the fold; the record before the next decision says the same."""

    __slots__ = ("_pairs", "_recorded_us")

    def __init__(self) -> None:
        self._pairs: deque[tuple[int, int]] = deque()
        self._recorded_us = 0

    def received(self, known: Receipts, revision: int, at_us: int) -> bool:
        """`revision` is there. False if the oldest had to be dropped for it: then nothing computed
        from that may stay."""
        pairs, revisions, times = self._pairs, known.revisions, known.times
        if pairs and at_us - pairs[-1][1] < TOGETHER_US:
            pairs[-1] = revision, pairs[-1][1]
            revisions[-1] = revision
            return True
        whole = len(pairs) < UNSAID
        if not whole:
            at = len(revisions) - len(pairs)
            del pairs[0], revisions[at], times[at]
        pairs.append((revision, at_us))
        revisions.append(revision)
        times.append(at_us)
        _trim(known)
        return whole

    def record(self) -> v.GroupsReceived | None:
        """The record of it; None when there is nothing to say. `said` when it is written."""
        if not self._pairs:
            return None
        base, recorded = self._pairs[0][0], self._recorded_us
        deltas: list[int] = []
        for revision, at_us in self._pairs:
            deltas += (revision - base, at_us - recorded)
            recorded = at_us
        return v.GroupsReceived(base, tuple(deltas))

    def recorded(self, known: Receipts) -> None:
        """The record was written: `take` would find all of it known."""
        known.clock_us += self._pairs[-1][1] - self._recorded_us
        self._recorded_us = self._pairs[-1][1]
        self._pairs.clear()


def take(receipts: Receipts, event: v.GroupsReceived) -> None:
    """Note what one record says. Time does not run backwards, nor do revisions."""
    deltas = event.deltas
    revisions, times = receipts.revisions, receipts.times
    last = revisions[-1] if revisions else -1
    clock = receipts.clock_us
    for at in range(0, len(deltas) - 1, 2):
        revision = event.revision + deltas[at]
        clock += max(deltas[at + 1], 0)
        if revision <= last:
            continue
        revisions.append(revision)
        times.append(clock)
        last = revision
    receipts.clock_us = clock
    _trim(receipts)


def _trim(receipts: Receipts) -> None:
    over = len(receipts.revisions) - MAX_TIMES
    if over > 0:
        del receipts.revisions[:over], receipts.times[:over]


def received_us(receipts: Receipts, revision: int) -> int:
    """When `revision` was there; -1 if nothing says so."""
    revisions = receipts.revisions
    if not revisions:
        return -1
    return receipts.times[min(bisect_left(revisions, revision), len(revisions) - 1)]
