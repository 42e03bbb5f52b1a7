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
from relume.policies.weights.comparison import record_of
from relume.policies.weights.weights_state import WeightsRecord


def on_read_started(fleet: Fleet, stream: str, epoch: int, event: v.WeightsReadStarted) -> None:
    """Its agent reads the files: a digest will come."""
    if (worker := _worker_of(fleet, stream, event.incarnation)) is not None:
        worker.weights = WeightsRecord(
            incarnation=event.incarnation, weights=event.weights, since=fleet.tick
        )


def on_digested(fleet: Fleet, stream: str, epoch: int, event: v.WeightsDigested) -> None:
    """The digest of a worker's files. Others may be compared with it."""
    worker = _worker_of(fleet, stream, event.incarnation)
    if worker is None:
        return
    before = record_of(worker)
    worker.weights = WeightsRecord(
        incarnation=event.incarnation,
        weights=event.weights,
        since=fleet.tick if before is None else before.since,
        digest=event.digest,
        files=event.files,
        reread=event.reread,
        error=event.error,
    )
    for other in fleet.workers.values():
        if other.model == worker.model and is_quarantined(other):
            review_worker(fleet, other)


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
