"""Which engines may have blocks of a corrupt worker in their prefix caches.

An engine that restores blocks puts them into its own prefix cache, where requests that begin alike read
them. Nothing says which of its blocks came from which worker, since a third engine may have restored what the
second one computed after them. So once a worker is quarantined for wrong results, each engine of its
model that has restored anything since the last right answers has its prefix cache emptied. A restore
may have been under way then: LATE_TICKS later the same is done once more. A worker that is away gets the
order when it returns: its engine may have served on.
"""

from __future__ import annotations

from msgspec import UNSET, UnsetType

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind, FailureClass, HealthState
from relume.policies.health.canary_pace import VERSION
from relume.policies.health.worker_reviews import all_living_know, decides
from relume.policies.state.fleet import Fleet, Worker

LATE_TICKS = 10
"""After so long no restore that began before a verdict was known is under way, with the connector's
default bound of 5 s (`load_timeout_s`)."""
DECISION = "prefixes."
"""Decisions begin so; worker, incarnation and tick follow."""


def on_restore_started(fleet: Fleet, stream: str, epoch: int, event: v.RestoreStarted) -> None:
    """Blocks of another engine, or of an earlier one, come into the cache."""
    worker = fleet.workers.get(stream[2:])
    if worker is not None and worker.incarnation == event.incarnation and _applies(fleet):
        worker.restored = fleet.tick


def on_health_decided(fleet: Fleet, event: v.HealthDecided) -> None:
    """A worker's results are wrong."""
    worker = fleet.workers.get(event.worker)
    if worker is not None and is_verdict(event) and _applies(fleet):
        worker.convicted = fleet.tick


def _applies(fleet: Fleet) -> bool:
    return decides(fleet) and all_living_know(fleet, VERSION)


def is_verdict(event: v.HealthDecided) -> bool:
    """Whether it says that the worker's results are wrong."""
    return event.state == HealthState.QUARANTINED and event.failure == FailureClass.CORRUPTION


def on_effects(fleet: Fleet, event: v.EffectsDecided) -> None:
    """These caches are emptied; soon after a verdict, wrong blocks may still come into them."""
    if event.again >= 0 or not event.decision.startswith(DECISION):
        return
    is_recent = any(_is_recent(fleet, worker) for worker in fleet.workers.values())
    for effect in event.effects:
        worker = fleet.workers.get(effect.worker)
        if worker is not None and effect.incarnation == worker.incarnation:
            worker.restored = fleet.tick if is_recent else UNSET


def _is_recent(fleet: Fleet, corrupt: Worker) -> bool:
    convicted = corrupt.convicted
    return not isinstance(convicted, UnsetType) and fleet.tick - convicted < LATE_TICKS


def owed(fleet: Fleet, corrupt: Worker, since: int, until: int) -> list[v.EffectsDecided]:
    """Empty the caches of engines whose last restore is from the ticks `since` to `until`."""
    effects = tuple(
        v.Effect(EffectKind.RESET_PREFIX_CACHE, worker.name, worker.incarnation, corrupt.name)
        for worker in fleet.workers.values()
        if worker is not corrupt
        and worker.model == corrupt.model
        and not isinstance(worker.restored, UnsetType)
        and since <= worker.restored <= until
    )
    if not effects:
        return []
    return [
        v.EffectsDecided(
            decision=f"{DECISION}{corrupt.name}.{corrupt.incarnation}.{fleet.tick}",
            basis=v.Basis(fleet.revision, 0),
            cause=f"they may hold blocks of {corrupt.name}, whose results are wrong",
            effects=effects,
        )
    ]


def left_undone(fleet: Fleet, corrupt: Worker) -> list[v.EffectsDecided]:
    """What an earlier leader had to write. Restores of long after the verdict have nothing wrong."""
    if isinstance(convicted := corrupt.convicted, UnsetType):
        return []
    return owed(fleet, corrupt, -1, convicted + LATE_TICKS)


def owed_late(fleet: Fleet) -> list[v.EffectsDecided]:
    """The same at a tick, for restores that were under way at a verdict."""
    return [
        decision
        for worker in fleet.workers.values()
        if not isinstance(since := worker.convicted, UnsetType) and fleet.tick - since == LATE_TICKS
        for decision in owed(fleet, worker, since, fleet.tick)
    ]
