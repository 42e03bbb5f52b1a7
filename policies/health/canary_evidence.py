"""Canaries as evidence about workers, the quarantine that follows, and how an operator ends it.

Handlers as those of `relume.policies.health.evidence`, which calls them.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import (
    AdminCommand,
    EnginePhase,
    FailureClass,
    HealthState,
)
from relume.policies.canary import answers
from relume.policies.canary.canary_state import CanaryRecord
from relume.policies.crosscheck import disputes
from relume.policies.health import canary_pace
from relume.policies.health.judgement import Review
from relume.policies.health.prefix_caches import is_verdict
from relume.policies.health.worker_reviews import (
    all_know,
    all_living_know,
    decides,
    health_of,
    leave,
    review_worker,
)
from relume.policies.state.fleet import Fleet, Worker


def on_canary(fleet: Fleet, stream: str, epoch: int, event: v.CanaryReported) -> None:
    """A canary is evidence about a worker, also about one of which nothing is known."""
    worker = fleet.workers.get(stream[2:])
    if worker is None or worker.incarnation != event.incarnation:
        return
    if worker.engine != EnginePhase.READY:
        return
    if not decides(fleet):
        if fleet.leader not in fleet.replicas and not event.error:
            answers.store_answer(fleet, worker, event)  # for the leader to come
        return
    review = Review(fleet)
    if review.by_canary:
        _take_canary(fleet, worker, event, review)


def _take_canary(fleet: Fleet, worker: Worker, event: v.CanaryReported, review: Review) -> None:
    """One without an answer says nothing about what the engine computes, but fails the probe of a
    worker that is probed. A right one is a probe that succeeded, after a quarantine."""
    health = worker.health
    probing = (
        health
        if not isinstance(health, UnsetType) and health.state == HealthState.PROBING
        else None
    )
    if event.error:
        if probing is not None:
            probing.failed = True
            review_worker(fleet, worker)
        return
    decision = answers.take_answer(fleet, worker, event, review.canary)
    if decision is not None:
        review.owed.append(decision)
        leave(fleet, review)
    record = answers.record_of(worker)
    if record is None:
        return
    _measure(fleet, worker, record, event, review)
    for other in answers.mark_undecided(fleet, record.kind, event.canary, review.canary):
        if other is not worker:
            health_of(fleet, other)
            review_worker(fleet, other)
    if record.wrong or record.doubtful:
        known = health_of(fleet, worker)
        if record.wrong and known is not None and known.state == HealthState.QUARANTINED:
            known.quarantined = worker.incarnation  # this engine is no better
    elif record.good:
        if review.by_checks:
            disputes.answered_canary(worker)
        if probing is not None and probing.failure == FailureClass.CORRUPTION:
            probing.passes += 1
    review_worker(fleet, worker)


def _measure(
    fleet: Fleet, worker: Worker, record: CanaryRecord, event: v.CanaryReported, review: Review
) -> None:
    """Its time is evidence too."""
    if all_living_know(fleet, canary_pace.VERSION):
        canary_pace.note(fleet, record, event, review.config)
        if canary_pace.has_slow_canaries(record, fleet.tick, review.config):
            health_of(fleet, worker)


def on_canary_values(fleet: Fleet, stream: str, epoch: int, event: v.CanaryValuesDecided) -> None:
    """The answers of its class are compared with the golden values from here on."""
    if all_know(fleet, 9):
        _note_unproven(fleet, event)
    compared = answers.record_values(fleet, event, Review(fleet).canary, dated=all_know(fleet, 10))
    for worker, is_right_now in compared:
        record = answers.record_of(worker)
        if record is not None and (record.wrong or record.doubtful):
            health_of(fleet, worker)
        health = worker.health
        if is_right_now and not isinstance(health, UnsetType):
            if health.quarantined == worker.incarnation:
                health.quarantined -= 1  # it was wrong by values that hold no longer
    for worker, _ in compared:
        review_worker(fleet, worker)


def _note_unproven(fleet: Fleet, event: v.CanaryValuesDecided) -> None:
    """The next engine of a quarantined worker is in another class, such as with other weights, and in
    that one alone. Then its answers are right by definition, and end no quarantine. Since version 10 the
    values say so themselves (`CanaryValues.since`), also to the engines after it."""
    classes = {} if isinstance(fleet.canaries, UnsetType) else fleet.canaries
    is_new = (known := classes.get(event.kind)) is None or not known.values
    for name in event.witnesses:
        worker = fleet.workers.get(name)
        if worker is None or isinstance(health := worker.health, UnsetType):
            continue
        if len(event.witnesses) > 1:
            health.unproven = UNSET
        elif is_new and health.state == HealthState.QUARANTINED:
            health.unproven = worker.incarnation


def cannot_be_trusted(worker: Worker) -> str:
    """Why no operator can end the quarantine of the worker now; empty if one can."""
    health = worker.health
    state = HealthState.HEALTHY if isinstance(health, UnsetType) else health.state
    if state != HealthState.QUARANTINED:
        return f"{worker.name} is not quarantined, it is {state}"
    if worker.engine != EnginePhase.READY or not worker.present:
        return f"the engine of {worker.name} is not ready; try again when it is"
    return ""


def trust_worker(fleet: Fleet, name: str, principal: str) -> None:
    """An operator ends a quarantine. What the engine answered so far does not count; while the worker
    is probed, one more wrong answer quarantines it again."""
    worker = fleet.workers.get(name)
    if worker is None or cannot_be_trusted(worker) or isinstance(worker.health, UnsetType):
        return
    worker.health.released_by = principal
    if (record := answers.record_of(worker)) is not None:
        record.wrong.clear()
        record.doubtful.clear()
    if (checks := disputes.record_of(worker)) is not None:
        checks.disputed.clear()
        checks.outvoted.clear()


def on_commanded(fleet: Fleet, stream: str, epoch: int, event: v.AdminCommanded) -> None:
    """An operator may have said that a worker can be trusted."""
    command = fleet.open_commands.get(event.command_id)
    if command is not None and command.late is not UNSET:
        return
    if event.command == AdminCommand.TRUST and decides(fleet):
        trust_worker(fleet, event.target, event.principal)
        if (worker := fleet.workers.get(event.target)) is not None:
            review_worker(fleet, worker)


def doubt_requests(fleet: Fleet, event: v.HealthDecided) -> None:
    """What a corrupt worker gave to live requests is in doubt."""
    if is_verdict(event):
        for request in fleet.requests.values():
            names = {request.worker, *(name for name, _ in request.places)}
            if event.worker in names:  # a place is missing where the end came before the dispatch
                request.doubted = True
