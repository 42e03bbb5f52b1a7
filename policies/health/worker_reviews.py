"""How handlers of evidence have a worker judged, and leave what the leader owes because of it.

What the leader has to write is left at the fleet, outside of its state, until `evidence.owed` takes
it.
"""

from __future__ import annotations

from msgspec import UnsetType

from relume.policies.agreement import decided_for_all, known_to_all
from relume.policies.health.health_state import WorkerHealth
from relume.policies.health.judgement import VERSION, Review
from relume.policies.state.fleet import Fleet, Worker


def decides(fleet: Fleet) -> bool:
    """Whether every living replica decides health and follows it."""
    return decided_for_all(fleet, VERSION)


def all_know(fleet: Fleet, version: int) -> bool:
    """Whether every living replica decides health by this version, or a later one."""
    return known_to_all(fleet, VERSION, version)


def all_living_know(fleet: Fleet, version: int) -> bool:
    """The same, and one lives. Without that, nothing says by which version a log was folded."""
    return any(replica.alive for replica in fleet.replicas.values()) and all_know(fleet, version)


def leave(fleet: Fleet, review: Review) -> None:
    """Leave at the fleet what the leader has to write because of one event."""
    if review.owed:
        if fleet.__dict__.get("health_owed_at") != fleet.revision:
            fleet.__dict__["health_owed_at"] = fleet.revision
            fleet.__dict__["health_owed"] = []
        fleet.__dict__.setdefault("health_owed", []).extend(review.owed)


def review_worker(fleet: Fleet, worker: Worker) -> None:
    """Judge one worker, and whether too many fail."""
    if isinstance(worker.health, UnsetType) or not decides(fleet):
        return
    review = Review(fleet)
    review.worker(worker)
    if review.guard(worker.model):
        for other in fleet.workers.values():
            if other.model == worker.model:
                review.worker(other)
    leave(fleet, review)


def review_all(fleet: Fleet, review: Review | None = None) -> None:
    """Judge every worker about which something is known."""
    if not decides(fleet):
        return
    known = [w for w in fleet.workers.values() if not isinstance(w.health, UnsetType)]
    if not known:
        return
    review = review or Review(fleet)
    for worker in known:
        review.worker(worker)
    for model in {worker.model: None for worker in known}:
        review.guard(model)
    leave(fleet, review)


def health_of(fleet: Fleet, worker: Worker) -> WorkerHealth | None:
    """The worker's, from now on; None where health is not decided."""
    health = worker.health
    if isinstance(health, UnsetType):
        if not decides(fleet):
            return None
        health = worker.health = WorkerHealth(incarnation=worker.incarnation)
    return health


def find_about(fleet: Fleet, name: str, incarnation: int) -> tuple[Worker, WorkerHealth] | None:
    """The worker whose present incarnation an event concerns."""
    worker = fleet.workers.get(name)
    if worker is None or worker.incarnation != incarnation:
        return None
    health = health_of(fleet, worker)
    return (worker, health) if health is not None else None
