"""Departed workers are garbage-collected. Otherwise the state would grow without bound: with
autoscaling, host names do not repeat.

A name stays for a while, because a worker that returns under it continues its state: its
incarnations count on, and an operator's drain or hold stays in force. Workers with such a command
stay longest, and so do engines that fell silent without a recorded death: one that was only cut off
continues to write where it stopped, and does not describe itself again. How long a stream has no
owner is what etcd shows, as with losses: the leader's word (`WorkerForgotten`) is a fact to replay,
and void if the worker is there again when it lands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EnginePhase
from relume.policies.state import account, prefix_cache
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.lifecycles.worker_life import declared_away

FORGET_TICKS = 3_600
"""Time without an owner after which a worker that left, or died with its host, is removed."""
REMEMBER_TICKS = 86_400
"""The same for one whose engine may live, or with an operator's command in force."""


def due(fleet: Fleet, tick: int) -> list[v.WorkerForgotten]:
    """The workers to remove at `tick`, for the leader to record."""
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
    silent = worker.engine in (EnginePhase.STARTING, EnginePhase.READY)
    return REMEMBER_TICKS if silent or worker.draining or worker.held else FORGET_TICKS


def _gone(fleet: Fleet, worker: Worker) -> bool:
    """Whether nothing is left of it that anybody waits for."""
    site = fleet.holders.get(worker.name)
    return not (worker.present or worker.attempts or (site is not None and site.alive))


def _on_forgotten(fleet: Fleet, stream: str, epoch: int, event: v.WorkerForgotten) -> None:
    name = event.worker
    worker = declared_away(fleet, event)
    if worker is None or not _gone(fleet, worker):
        return
    account.clear(worker)
    prefix_cache.forgotten(fleet, worker)
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
