"""From what the daemon tells its agent to what the agent writes into the log.

A request's child is covered as far as its worst rank is. One object follows one daemon;
another boot begins anew. Pure: the agent asks, and appends what comes out.
"""

from __future__ import annotations

from collections.abc import Iterator

from relume.engine_shim.kv_stream import messages as m
from relume.events.vocabulary import (
    CheckpointAcknowledged,
    CheckpointDropped,
    CheckpointEvicted,
    CheckpointsAcknowledged,
    Event,
    HeldPrefix,
)

REASONS = {"dropped": "finished", "expired": "expired", "evicted": "evicted"}


class CoverageReports:
    """Events of one holder."""

    def __init__(self, holder: str) -> None:
        self._holder = holder
        self._boot = ""
        self.cursor = 0
        self._known: dict[tuple[str, int], dict[int, m.Change]] = {}
        self._written: dict[tuple[str, int], tuple[int, int]] = {}

    def take(self, changed: m.Changed) -> list[Event]:
        """Events for one answer; `cursor` is where to ask from next. After another boot the
        answer is not used: ask again from 0."""
        if changed.boot != self._boot:
            fresh = not self._boot and self.cursor == 0
            self._boot, self.cursor = changed.boot, 0
            self._known.clear()
            self._written.clear()
            if not fresh:
                return []
        self.cursor = changed.cursor
        touched: dict[tuple[str, int], m.Change] = {}
        for change in changed.changes:
            key = change.request, change.child
            self._known.setdefault(key, {})[change.rank] = change
            touched[key] = change
        return [event for key, last in touched.items() for event in self._events(key, last)]

    def _events(self, key: tuple[str, int], last: m.Change) -> Iterator[Event]:
        ranks = self._known[key]
        if all(change.reason for change in ranks.values()):
            del self._known[key]
            if self._written.pop(key, None) is not None:
                reason = REASONS.get(last.reason, last.reason)
                yield CheckpointDropped(self._holder, self._boot, *key, reason)
            return
        complete = len(ranks) >= last.ranks
        worst = min(ranks.values(), key=lambda change: change.tokens)
        tokens = worst.tokens if complete else 0
        held = sum(change.bytes for change in ranks.values())
        before = self._written.get(key)
        if before == (tokens, last.attempt) or (before is None and not tokens):
            return
        self._written[key] = tokens, last.attempt
        if before is not None and before[1] == last.attempt and tokens < before[0]:
            yield CheckpointEvicted(self._holder, self._boot, *key, tokens, held)
            return
        blocks = worst.blocks if complete else 0
        yield CheckpointAcknowledged(
            self._holder, self._boot, *key, last.attempt, blocks, tokens, held
        )


def together(events: list[Event]) -> list[Event]:
    """The same of one answer, its acknowledgements in one record behind what made room for
    them, so that what the log adds up is never more than was held. Of a request there is one
    event at most: no other order matters."""
    acks = [e for e in events if isinstance(e, CheckpointAcknowledged)]
    others = [e for e in events if not isinstance(e, CheckpointAcknowledged)]
    if len(acks) < 2:
        return [*others, *acks]
    held = tuple(
        HeldPrefix(e.request, e.child, e.attempt, e.blocks, e.tokens, e.bytes) for e in acks
    )
    return [*others, CheckpointsAcknowledged(acks[0].holder, acks[0].boot, held)]
