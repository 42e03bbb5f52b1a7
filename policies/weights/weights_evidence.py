"""Digests of model files as evidence, and the leader's comparison of them.

Handlers as those of `relume.policies.health.evidence`, which calls them. Their events are of feature
level 2: a fleet with a replica that does not decide by them has none.
"""

from __future__ import annotations

from msgspec import UnsetType

from relume.events import vocabulary as v
from relume.policies.health.health_life import is_quarantined
from relume.policies.health.worker_reviews import review_worker
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.weights import comparison
from relume.policies.weights.weights_state import WeightsRecord


def on_read_started(fleet: Fleet, stream: str, epoch: int, event: v.WeightsReadStarted) -> None:
    """Its agent reads the files: a digest will come."""
    if (worker := _worker_of(fleet, stream, event.incarnation)) is not None:
        record = WeightsRecord(
            incarnation=event.incarnation, weights=event.weights, since=fleet.tick
        )
        _replace(fleet, worker, record)


def on_digested(fleet: Fleet, stream: str, epoch: int, event: v.WeightsDigested) -> None:
    """The digest of a worker's files. Others may be compared with it."""
    worker = _worker_of(fleet, stream, event.incarnation)
    if worker is None:
        return
    before = comparison.record_of(worker)
    record = WeightsRecord(
        incarnation=event.incarnation,
        weights=event.weights,
        since=fleet.tick if before is None else before.since,
        digest=event.digest,
        files=() if comparison.files_of(fleet, event.digest, worker) else event.files,
        reread=event.reread,
        error=event.error,
    )
    _replace(fleet, worker, record)
    for other in fleet.workers.values():
        if other.model == worker.model and is_quarantined(other):
            review_worker(fleet, other)


def _replace(fleet: Fleet, worker: Worker, record: WeightsRecord) -> None:
    """The worker's record from now on. Another one with the digest of the former one takes its names."""
    before, worker.weights = worker.weights, record
    if isinstance(before, UnsetType) or not before.files or before.digest == record.digest:
        return
    for other in fleet.workers.values():
        other_record = other.weights
        if not isinstance(other_record, UnsetType) and other_record.digest == before.digest:
            other_record.files = before.files
            return


def on_compared(fleet: Fleet, stream: str, epoch: int, event: v.WeightsCompared) -> None:
    """The decision holds from here on, if it is about the present incarnation."""
    worker = _worker_of(fleet, f"w.{event.worker}", event.incarnation)
    if worker is None or not is_quarantined(worker) or isinstance(worker.health, UnsetType):
        return
    worker.health.weights = event
    review_worker(fleet, worker)


def _worker_of(fleet: Fleet, stream: str, incarnation: int) -> Worker | None:
    worker = fleet.workers.get(stream[2:])
    return worker if worker is not None and worker.incarnation == incarnation else None
