"""Workers that have left for good are forgotten, so that what is kept of workers is bounded by
who is there, not by who ever was: where each new host brings a new name, they are without end.

A name is kept for a while, because whoever comes back under it goes on where it was: its
incarnations count on, and an operator's drain or hold still stands. Kept longest are those of
whom that is so, and engines that fell silent without a word of their death: one that was only
cut off goes on writing where it stopped, and tells no second time what it is. How long a stream
has no owner is what etcd shows, as with losses: the leader's word (`WorkerForgotten`) is a fact
to replay, and void if the worker is there again when it lands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relume.events import vocabulary as v
from relume.policies import account, cached
from relume.policies.state import Fleet, Worker

FORGET_TICKS = 3_600
"""A worker that left, or died with its host, is forgotten after so long without an owner."""
REMEMBER_TICKS = 86_400
"""One whose engine may live, or of whom an operator's word stands, after so long."""


def due(fleet: Fleet, tick: int) -> list[v.WorkerForgotten]:
    """Who is to be forgotten at `tick`, for the leader to say."""
    found = []
    for worker in fleet.workers.values():
        if worker.present:
            continue
        stream = f"w.{worker.name}"
        since = fleet.gone.get(stream, tick)
        if stream not in fleet.owners and tick - since >= _patience(worker):
            if _gone(fleet, worker):
                found.append(v.WorkerForgotten(worker.name, worker.epoch))
    return found


def _patience(worker: Worker) -> int:
    silent = worker.engine in ("starting", "ready")
    return REMEMBER_TICKS if silent or worker.draining or worker.held else FORGET_TICKS


def _gone(fleet: Fleet, worker: Worker) -> bool:
    """Whether nothing is left of it that anybody waits for."""
    site = fleet.holders.get(worker.name)
    return not (worker.present or worker.attempts or (site is not None and site.alive))


def _on_forgotten(fleet: Fleet, stream: str, epoch: int, event: v.WorkerForgotten) -> None:
    name = event.worker
    worker = fleet.workers.get(name)
    if worker is None or worker.epoch != event.epoch or not _gone(fleet, worker):
        return
    account.clear(worker)
    cached.forgotten(fleet, worker)
    del fleet.workers[name]
    fleet.gone.pop(f"w.{name}", None)
    fleet.holders.pop(name, None)
    for site in fleet.holders.values():
        site.rates.pop(name, None)
    for replica in fleet.replicas.values():
        replica.suspects.pop(name, None)
    for key in [k for k, p in fleet.pending_effects.items() if p.effect.worker == name]:
        del fleet.pending_effects[key]


HANDLERS: dict[type, Callable[[Fleet, str, int, Any], None]] = {v.WorkerForgotten: _on_forgotten}
