"""What changed in which sequence, until the host's agent has recorded it. Positions are coalesced:
each sequence has only its newest. Ends are in a bounded queue. A cursor counts changes; one that is
too old gets everything that is held.
"""

from __future__ import annotations

from collections import OrderedDict

from relume.events.wire.kv.kv_messages import Change

MAX_ENDS = 65_536


class Ledger:
    """Changes by cursor. One thread."""

    def __init__(self) -> None:
        self._count = 0
        self._changes: OrderedDict[tuple[str, int, int], tuple[int, Change]] = OrderedDict()
        self._ends = 0

    def note(self, change: Change) -> None:
        self._count += 1
        key = change.request, change.child, change.rank
        old = self._changes.pop(key, None)
        self._ends += bool(change.reason) - bool(old and old[1].reason)
        self._changes[key] = (self._count, change)
        if self._ends > MAX_ENDS:
            self._forget_oldest_end()

    def _forget_oldest_end(self) -> None:
        for key, (_, change) in self._changes.items():
            if change.reason:
                del self._changes[key]
                self._ends -= 1
                return

    def since(self, cursor: int, limit: int) -> tuple[int, list[Change], bool]:
        """(next cursor, changes after `cursor` oldest first, whether there are more)."""
        found: list[Change] = []
        last = cursor
        for number, change in reversed(self._changes.values()):
            if number <= cursor:
                break
            found.append(change)
        found.reverse()
        if len(found) <= limit:
            return self._count, found, False
        newest = found[:limit]
        change = newest[-1]
        last = self._changes[change.request, change.child, change.rank][0]
        return last, newest, True
