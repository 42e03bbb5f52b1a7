"""Part of I9: a worker that replicas cannot reach is excluded for all of them only if more than half of the
living ones, and two at least, suspect it.

The leader decides from the log up to some time before its decision lands, so a replica counts among those
that suspect for `SLACK_MS` after it found the worker well, and among the living ones only if it has lived as
long.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from relume.chaos.validators.known_facts import SUSPICIOUS
from relume.chaos.validators.records import Entry, Log, events_of
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import FailureClass, HealthState

SLACK_MS = 3000
NEVER = 1 << 62

Engine = tuple[str, int]


def too_few(log: Log) -> Iterator[tuple[str, str, int]]:
    """Workers that were excluded, why that was wrong, and the revision."""
    walk = _Suspicions()
    for at in events_of(log):
        if (note := _NOTES.get(type(at.event))) is not None:
            note(walk, at)
    return iter(walk.found)


class _Suspicions:
    """`found`: errors; the rest is what the log said up to here."""

    def __init__(self) -> None:
        self.found: list[tuple[str, str, int]] = []
        self._until: dict[Engine, dict[str, int]] = {}
        """By engine, the replicas that suspect it, and until when (wall ms) they count."""
        self._began: dict[str, int] = {}
        """Living replicas, and since when."""

    def began(self, at: Entry) -> None:
        """Its former life suspects nothing any more."""
        self._began[at.stream] = at.at_ms
        for suspecting in self._until.values():
            if suspecting.get(at.stream) == NEVER:
                suspecting[at.stream] = at.at_ms + SLACK_MS

    def ended(self, at: Entry) -> None:
        self._began.pop(f"r.{at.event.replica}", None)

    def suspected(self, at: Entry) -> None:
        event = at.event
        if type(event) is v.WorkerSuspected or event.kind in SUSPICIOUS:
            self._until.setdefault((event.worker, event.incarnation), {})[at.stream] = NEVER

    def cleared(self, at: Entry) -> None:
        suspecting = self._until.get((at.event.worker, at.event.incarnation), {})
        if at.stream in suspecting:
            suspecting[at.stream] = at.at_ms + SLACK_MS

    def decided(self, at: Entry) -> None:
        event = at.event
        by_replicas = (
            event.state == HealthState.UNHEALTHY and event.failure == FailureClass.UNREACHABLE
        )
        if not by_replicas:
            return
        counting = self._until.get((event.worker, event.incarnation), {})
        count = sum(until >= at.at_ms for until in counting.values())
        alive = sum(began <= at.at_ms - SLACK_MS for began in self._began.values())
        if count < 2 or 2 * count <= alive:
            why = f"is excluded for all, and {count} of {alive} replicas suspect it"
            self.found.append((event.worker, why, at.revision))


_NOTES: dict[type, Callable[[_Suspicions, Any], None]] = {
    v.ReplicaStarted: _Suspicions.began,
    v.ReplicaStopped: _Suspicions.ended,
    v.ReplicaLost: _Suspicions.ended,
    v.WorkerSuspected: _Suspicions.suspected,
    v.TransportObserved: _Suspicions.suspected,
    v.WorkerCleared: _Suspicions.cleared,
    v.HealthDecided: _Suspicions.decided,
}
