"""When a replica received which revisions, on its own clock.

It says so in its stream (`GroupsReceived`), ahead of each decision, so that replay knows how old
a status was for whoever decided on it. Times count from a beginning of the replica's life; they
are compared with times of the same replica only.
"""

from __future__ import annotations

from bisect import bisect_left

from events import vocabulary as v
from policies.state import Receipts

KEPT = 1024
"""So many are remembered; what is older counts as received with the oldest of them."""


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
    del revisions[:-KEPT], times[:-KEPT]


def received_us(receipts: Receipts, revision: int) -> int:
    """When `revision` was there; -1 if nothing says so."""
    revisions = receipts.revisions
    if not revisions:
        return -1
    return receipts.times[min(bisect_left(revisions, revision), len(revisions) - 1)]
