"""What the leader decides because of a failure of a worker, above all the worker's health.

A decision follows evidence, so it joins the record of that evidence. Slowness is the exception: the
decision is the first event that tells of it. It is a record of its own, beside other failures.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relume.controlplane.incidents.case import EXCLUDED, MILD, SAME_FAILURE_MS, Case
from relume.controlplane.incidents.case_book import CaseBook
from relume.controlplane.incidents.served_requests import ServedRequests
from relume.events import vocabulary as v
from relume.events.log.entries import Entry
from relume.events.vocabulary.enums import (
    EffectKind,
    FailedPart,
    FailureClass,
    HealthState,
    WeightsOutcome,
)
from relume.policies.recovery.lineage import TRUSTED
from relume.policies.weights import comparison

Evidence = Callable[[Entry, str, int, FailureClass, str], Case | None]
"""`WorkerFailures.evidence`: the case that evidence belongs to, opened if need be."""


class DecidedHealth:
    """The leader's decisions about workers in `book`; `served` are the requests of each engine."""

    def __init__(self, book: CaseBook, evidence: Evidence, served: ServedRequests) -> None:
        self._book = book
        self._evidence = evidence
        self._served = served
        self.handlers: dict[type, Callable[[Entry, Any], None]] = {
            v.HealthDecided: self._on_health,
            v.VerdictsWithheld: self._on_withheld,
            v.EffectsDecided: self._on_effects,
            v.WeightsCompared: self._on_weights,
        }

    def _on_health(self, entry: Entry, event: v.HealthDecided) -> None:
        worker, incarnation, state = event.worker, event.incarnation, event.state
        slow = state == HealthState.SUSPECT and event.failure == FailureClass.SLOW
        self._slowness(entry, event, slow)
        if state in TRUSTED:
            self._served.acquit(worker, incarnation)
        if slow:
            return
        case = self._book.of_engine(worker, incarnation)
        if state in EXCLUDED and state != HealthState.DEAD:
            case = self._excluded(entry, event)
        elif case is None:
            latest = self._book.latest(FailedPart.WORKER, worker)
            case = latest if latest is not None and latest.record.open else None
        if case is None:
            return
        if state == HealthState.QUARANTINED and event.failure == FailureClass.CORRUPTION:
            self._served.blame(case, worker, incarnation, event.good_tick)
        if state == HealthState.SUSPECT and case.record.failure in MILD and not case.dead:
            if entry.at_ms - case.evidence_ms <= SAME_FAILURE_MS:
                case.reopen()
        if state != HealthState.HEALTHY:
            case.decided(entry.at_ms)
        elif not case.record.open:
            return  # of something else, or said again
        case.note_health(state)
        if state == HealthState.HEALTHY:
            case.judges.clear()
        case.link(entry)
        case.settle(entry.at_ms)

    def _excluded(self, entry: Entry, event: v.HealthDecided) -> Case | None:
        """The case for which the leader excludes the worker. What it decides follows evidence,
        unless that is older than this log."""
        case = self._book.of_engine(event.worker, event.incarnation)
        failure = event.failure
        if failure == FailureClass.CRASH:
            failure = FailureClass.UNREACHABLE  # no agent says that it died
        latest = self._book.latest(FailedPart.WORKER, event.worker)
        if case is None and latest is not None and latest.health == HealthState.QUARANTINED:
            case, latest.last = latest, event.incarnation  # a quarantine outlives a restart
        if case is None:
            return self._evidence(entry, event.worker, event.incarnation, failure, event.evidence)
        if not case.record.open and not case.dead:
            case.reopen()
        case.confirmed = True
        case.explain(failure, event.evidence)
        return case

    def _slowness(self, entry: Entry, event: v.HealthDecided, slow: bool) -> None:
        """A slow worker may be suspected for something else in between."""
        case = self._book.slow(event.worker)
        if slow:
            if case is None or not _is_recent(case, entry):
                case = self._book.open(
                    entry,
                    FailedPart.WORKER,
                    event.worker,
                    event.incarnation,
                    FailureClass.SLOW,
                    event.evidence,
                )
            elif not case.record.open:
                case.reopen()
            case.evidence_ms = entry.at_ms
            case.decided(entry.at_ms)
            case.link(entry)
        elif event.state == HealthState.HEALTHY and case is not None and case.record.open:
            case.evidence_ms = entry.at_ms
            case.link(entry)
            case.close(entry.at_ms)

    def _on_withheld(self, entry: Entry, event: v.VerdictsWithheld) -> None:
        for worker in event.workers:
            case = self._book.latest(FailedPart.WORKER, worker)
            if case is not None and case.record.open:
                case.link(entry)

    def _on_weights(self, entry: Entry, event: v.WeightsCompared) -> None:
        case = self._book.latest(FailedPart.WORKER, event.worker)
        if case is not None and case.record.open:
            is_held = event.outcome == WeightsOutcome.DIFFERENT
            case.record.not_released = comparison.in_words(event) if is_held else ""
            case.link(entry)

    def _on_effects(self, entry: Entry, event: v.EffectsDecided) -> None:
        for effect in event.effects:
            case = self._book.latest(FailedPart.WORKER, effect.worker)
            if effect.kind == EffectKind.RESTART and case is not None and case.record.open:
                case.link(entry)


def _is_recent(case: Case, entry: Entry) -> bool:
    """Whether `case` is open, or capacity came back not long ago."""
    record = case.record
    was_back = record.capacity_back_ms >= 0 and entry.at_ms - case.evidence_ms <= SAME_FAILURE_MS
    return record.open or was_back
