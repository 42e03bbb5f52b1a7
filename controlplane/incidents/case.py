"""A record with what the fold must remember to continue it."""

from __future__ import annotations

from msgspec import Struct, field

from relume.controlplane.incidents.incident import (
    MOST_EVENTS,
    MOST_OF_STREAMS,
    CausalEvent,
    Incident,
)
from relume.controlplane.replay.rendering import brief
from relume.events.log.entries import Entry
from relume.events.vocabulary.enums import FailureClass, HealthState

MILD = (FailureClass.REPORTS, FailureClass.ERRORS, FailureClass.UNREACHABLE)
"""Classes whose evidence comes piece by piece, and may pause."""
SAME_FAILURE_MS = 30_000
"""Mild evidence that follows earlier mild evidence within this time is of the same failure."""
EXCLUDED = (
    HealthState.UNHEALTHY,
    HealthState.PROBING,
    HealthState.QUARANTINED,
    HealthState.DEAD,
)
"""Decided health with which a worker's capacity is not back."""

_SEVERITY = {
    failure: rank
    for rank, failure in enumerate(
        (
            FailureClass.NONE,
            FailureClass.SLOW,
            FailureClass.REPORTS,
            FailureClass.ERRORS,
            FailureClass.UNREACHABLE,
            FailureClass.CRASH,
            FailureClass.HANG,
            FailureClass.CORRUPTION,
            FailureClass.HOST,
        )
    )
}
"""A class later in the row explains the evidence of the earlier ones: connections to a dead engine
break, and an engine that hung is killed. The record has the latest."""


class Case(Struct, kw_only=True):
    """`last`: the last incarnation it is about (a successor that dies before it is ready belongs to
    it), `dead`: the last one known dead, `ready_ms`: when a successor was ready. `judges` hold the
    engine for failed: replicas, and its agent. `confirmed`: more than broken connections speak
    against it. `health`: as decided last, empty if not decided. `evidence_ms`: the latest evidence.
    `served`: requests that got tokens from a corrupt worker.
    """

    record: Incident
    last: int = 0
    dead: int = 0
    lost: bool = False
    ready_ms: int = -1
    judges: dict[str, None] = field(default_factory=dict)
    confirmed: bool = False
    health: HealthState | None = None
    evidence_ms: int = 0
    waiting: int = 0
    of_streams: int = 0
    served: set[str] = field(default_factory=set)

    def link(self, entry: Entry, request: str = "") -> None:
        """Put `entry` into the causal chain, if there is room."""
        events = self.record.events
        if len(events) >= MOST_EVENTS or (request and self.of_streams >= MOST_OF_STREAMS):
            self.record.events_left_out += 1
            return
        self.of_streams += bool(request)
        events.append(
            CausalEvent(
                id=f"{entry.revision}.{entry.index}",
                at_ms=entry.at_ms,
                stream=entry.stream,
                type=entry.kind,
                request=request,
                text=brief(entry.event),
            )
        )

    def decided(self, at_ms: int) -> None:
        """A decision was taken because of it; the first counts."""
        if self.record.decided_ms < 0:
            self.record.decided_ms = at_ms

    def note_health(self, state: HealthState) -> None:
        """The leader decided this."""
        self.health = state
        if state != HealthState.QUARANTINED:
            self.record.not_released = ""

    def explain(self, failure: FailureClass, reason: str) -> None:
        """More evidence: the gravest class explains all of it."""
        record = self.record
        if _SEVERITY.get(failure, 0) > _SEVERITY.get(record.failure, 0):
            record.failure, record.reason = failure, reason

    def reopen(self) -> None:
        """It was not over."""
        self.record.open = True
        self.record.capacity_back_ms = -1

    def close(self, back_ms: int) -> None:
        """It is over. `back_ms` -1: capacity does not come back."""
        self.record.open = False
        self.record.capacity_back_ms = back_ms
        self.judges.clear()

    def settle(self, at_ms: int) -> None:
        """Close it if nothing speaks against the worker any more."""
        record = self.record
        if not record.open or self.lost or self.health in EXCLUDED:
            return
        if self.dead:
            if self.ready_ms >= 0:
                self.close(self.ready_ms if self.health is None else at_ms)
            return
        suspect = self.health == HealthState.SUSPECT and record.failure in MILD
        if not (self.judges or suspect or (record.failure in MILD and self.waiting)):
            self.close(at_ms)
