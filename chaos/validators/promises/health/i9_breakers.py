"""I9: nothing is sent to an open breaker, and at most k requests to a half-open one.

A dispatch is judged on what its basis knows: the latest decision about the worker's health up to
that revision, if it is about the same incarnation. A half-open breaker is for one replica, which has
at most as many requests there as the decision says; a request is there until its end, or the
failure of its connection, is in the log.

Cross-checks are checked in `i9_cross_checks`, exclusions of unreachable workers in `i9_exclusions`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Sequence

from relume.chaos.validators.promises.health import i9_cross_checks, i9_exclusions
from relume.chaos.validators.records import ClientRecord, Violation, events_of, log_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import HealthState

PROMISE = "I9"
_OPEN = (HealthState.UNHEALTHY, HealthState.QUARANTINED)


def check(
    groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord], unkept: Collection[str] = ()
) -> list[Violation]:
    """Dispatches that an open breaker, or a half-open one, does not allow, and cross-checks that may
    not be. `unkept`: requests, by their client's id, whose prompts may not be kept."""
    watch, log = _Breakers(), log_of(groups)
    for at in events_of(log):
        kind = type(at.event)
        if kind is v.HealthDecided:
            watch.decided(at.revision, at.event)
        elif kind is v.RouteDecided and at.event.worker:
            watch.dispatched(at.revision, at.stream[2:], at.event)
        elif kind is v.TransportObserved:
            watch.left(at.event.request, at.event.attempt)
        elif kind is v.RequestEnded:
            for attempt in range(1, at.event.attempts + 1):
                watch.left(at.event.request, attempt)
    excluded = (Violation(PROMISE, *about) for about in i9_exclusions.too_few(log))
    return [*watch.found, *excluded, *i9_cross_checks.check(log, unkept)]


class _Breakers:
    """Decisions about health by worker, in order, and the probes under way."""

    def __init__(self) -> None:
        self.found: list[Violation] = []
        self._decided: dict[str, tuple[list[int], list[v.HealthDecided]]] = {}
        self._probes: dict[str, dict[tuple[str, int], int]] = {}

    def decided(self, revision: int, event: v.HealthDecided) -> None:
        """The worker's health from `revision` on."""
        revisions, decisions = self._decided.setdefault(event.worker, ([], []))
        revisions.append(revision)
        decisions.append(event)

    def left(self, request: str, attempt: int) -> None:
        """The attempt is no longer on any worker."""
        for probes in self._probes.values():
            probes.pop((request, attempt), None)

    def dispatched(self, revision: int, replica: str, event: v.RouteDecided) -> None:
        """Judge a dispatch by the decision that its basis knows."""
        revisions, decisions = self._decided.get(event.worker, ([], []))
        at = bisect_right(revisions, event.basis.revision) - 1
        if at < 0 or decisions[at].incarnation != event.incarnation:
            return
        health = decisions[at]
        why = ""
        if health.state in _OPEN:
            why = f"sent to {event.worker} although it is {health.state}: {health.evidence}"
        elif health.state == HealthState.PROBING:
            why = self._probed(replica, health, revisions[at], event)
        if why:
            self.found.append(Violation(PROMISE, event.request, why, revision))

    def _probed(
        self, replica: str, health: v.HealthDecided, since: int, event: v.RouteDecided
    ) -> str:
        if replica != health.prober:
            return f"sent to {event.worker} by {replica}, but {health.prober} probes it"
        probes = self._probes.setdefault(event.worker, {})
        for key in [key for key, begun in probes.items() if begun != since]:
            del probes[key]  # of an earlier turn
        probes[event.request, event.attempt] = since
        if len(probes) > health.probes:
            return f"probe number {len(probes)} of {event.worker}, of at most {health.probes}"
        return ""
