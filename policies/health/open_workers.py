"""Whether a worker may get requests by the log alone, whichever replica asks."""

from __future__ import annotations

from collections.abc import Container

from msgspec import UNSET

from relume.events.vocabulary.enums import EnginePhase
from relume.policies.health.health_life import EXCLUDED
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.unreadable import has_unacknowledged


def is_open(fleet: Fleet, worker: Worker) -> bool:
    """Whether nothing is known against requests there: what counts as capacity, also when an operator
    drains another worker. What one replica suspects is no matter of the fleet."""
    return not worker.drains and could_serve(fleet, worker)


def could_serve(fleet: Fleet, worker: Worker) -> bool:
    """The same of a worker that drains: whether only that speaks against requests there."""
    if worker.engine != EnginePhase.READY or not worker.present:
        return False
    if has_unacknowledged(fleet, worker.name):
        return False
    return worker.health is UNSET or worker.health.state not in EXCLUDED


def open_without(fleet: Fleet, model: str, leaving: Container[str] = ()) -> int:
    """How many workers of the model may get requests, those named in `leaving` aside."""
    return sum(
        worker.model == model and worker.name not in leaving and is_open(fleet, worker)
        for worker in fleet.workers.values()
    )
