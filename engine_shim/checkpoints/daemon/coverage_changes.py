"""From what the daemon reports to its agent to what the agent writes into the log.

A request's child is covered as far as its worst rank is. One object follows one daemon;
another boot starts over. Pure: the agent polls, and appends the result.
"""

from __future__ import annotations

from collections.abc import Iterator

from relume.events.vocabulary import (
    CheckpointAcknowledged,
    CheckpointDropped,
    CheckpointEvicted,
    CheckpointsAcknowledged,
    Event,
    HeldPrefix,
)
from relume.events.vocabulary.enums import DropReason
from relume.events.wire.kv import kv_messages as m

REASONS = {
    "dropped": DropReason.FINISHED,
    "expired": DropReason.EXPIRED,
    "evicted": DropReason.EVICTED,
}


class CoverageReports:
    """Events of one holder."""

    def __init__(self, holder: str) -> None:
        self._holder = holder
        self._boot = ""
        self.cursor = 0
        self._known: dict[tuple[str, int], dict[int, m.Change]] = {}
        self._written: dict[tuple[str, int], tuple[int, int]] = {}

    def take(self, changed: m.ChangesAnswer) -> list[Event]:
        """Events for one answer; `cursor` is where the next poll starts. After another boot the
        answer is not used: poll again from 0."""
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
        request, child = key
        if all(change.reason for change in ranks.values()):
            del self._known[key]
            if self._written.pop(key, None) is not None:
                reason = REASONS.get(last.reason) or DropReason(last.reason)
                yield CheckpointDropped(
                    holder=self._holder,
                    boot=self._boot,
                    request=request,
                    child=child,
                    reason=reason,
                )
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
            yield CheckpointEvicted(
                holder=self._holder,
                boot=self._boot,
                request=request,
                child=child,
                tokens=tokens,
                bytes=held,
            )
            return
        blocks = worst.blocks if complete else 0
        yield CheckpointAcknowledged(
            holder=self._holder,
            boot=self._boot,
            request=request,
            child=child,
            attempt=last.attempt,
            blocks=blocks,
            tokens=tokens,
            bytes=held,
        )


def together(events: list[Event]) -> list[Event]:
    """The same of one answer, its acknowledgements in one record after the evictions that made room
    for them, so the sum in the log never exceeds what was held. Of a request there is one event at
    most: no other order matters."""
    acks = [e for e in events if isinstance(e, CheckpointAcknowledged)]
    others = [e for e in events if not isinstance(e, CheckpointAcknowledged)]
    if len(acks) < 2:
        return [*others, *acks]
    held = tuple(
        HeldPrefix(
            request=e.request,
            child=e.child,
            attempt=e.attempt,
            blocks=e.blocks,
            tokens=e.tokens,
            bytes=e.bytes,
        )
        for e in acks
    )
    return [*others, CheckpointsAcknowledged(acks[0].holder, acks[0].boot, held)]
