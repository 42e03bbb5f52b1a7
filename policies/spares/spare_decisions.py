"""Which workers are spares, decided by the leader from the fold alone, so that replay decides it
again.

Theory of operation. A model with W workers has a number of spares due: a share of W, less one for
each worker that has failed. So a failure promotes a spare at once, and the return of the failed
worker makes one due again. Then another worker becomes a spare: the least loaded, which is the one
that returned, unless it has got requests meanwhile. It has to be due for some ticks first, so that
a worker that fails again and again does not make workers spares and promote them in turns.

A worker counts while it is registered, whether its engine runs or not, and for `LOST_TICKS` after its
host was lost. One that left in good order, as when the fleet is made smaller, does not count.

While a level of degradation limits requests, no spare is due: requests are not refused while a
worker is idle. Capacity counts spares for the same reason, and so the level does not depend on them.

Spares are decided at each tick, and when a worker's health changes: the fold of a death brings a
`HealthDecided`, so that a promotion does not wait for the next tick. A decision follows the last
one, also while that one is written and not yet folded: when etcd returns after an outage, the leader
folds a `HealthDecided` of each worker before the first decision that it took.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EnginePhase, HealthState
from relume.policies.agreement import decided_for_all, leaders_version
from relume.policies.degradation import degradation_settings
from relume.policies.health.judgement import LeaderSettings
from relume.policies.health.open_workers import is_open
from relume.policies.spares.spare_settings import SparesConfig, config_of
from relume.policies.spares.spare_state import ModelSpares
from relume.policies.state.fleet import Fleet, Worker

VERSION = "version.spares"
"""The setting by which replicas record that they follow decisions about spares."""
LEAST_WORKERS = 4
"""Workers of a model from which on it has spares."""
LOST_TICKS = 600
"""Time for which a worker whose host was lost counts as failed."""
PROMOTED_TICKS = 30
"""Time for which a promotion is remembered: requests that may not stay leave in this time."""
WRITTEN = "spares_written"
"""Where `owed` leaves its decisions at the fleet, outside of its state, until they are folded."""


class Figures(Struct, frozen=True, kw_only=True):
    """What a decision goes by. `workers` count, of which `failed` are not open. `due`: number of
    spares that the model should have."""

    workers: int
    failed: int
    due: int


def models_of(fleet: Fleet) -> dict[str, ModelSpares]:
    """By model; empty without spares."""
    known = fleet.spares
    return {} if isinstance(known, UnsetType) else known


def is_spare(fleet: Fleet, worker: Worker) -> bool:
    """Whether the worker is a spare of the model that it serves."""
    known = models_of(fleet).get(worker.model)
    return known is not None and worker.name in known.workers


def leader_config(fleet: Fleet) -> SparesConfig:
    """The settings in force for the leader's decisions."""
    return config_of(LeaderSettings(fleet))


def decides(fleet: Fleet) -> bool:
    """Whether there is a leader that decides spares, and every living replica follows."""
    return decided_for_all(fleet, VERSION)


def figures_of(fleet: Fleet, model: str, config: SparesConfig) -> Figures:
    """The figures now."""
    known = models_of(fleet).get(model) or ModelSpares()
    counted = [w for w in fleet.workers.values() if w.model == model and _counts(w, known)]
    count = len(counted)
    failed = sum(not is_open(fleet, worker) for worker in counted)
    due = 0
    if config.share_percent and count >= LEAST_WORKERS and not _is_degraded(fleet, model):
        due = max(count * config.share_percent // 100, 1)
    return Figures(workers=count, failed=failed, due=max(min(due - failed, count - failed - 1), 0))


def _counts(worker: Worker, known: ModelSpares) -> bool:
    return worker.present or worker.name in known.lost


def _is_degraded(fleet: Fleet, model: str) -> bool:
    """Whether a level limits requests for the model."""
    known = {} if isinstance(fleet.demand, UnsetType) else fleet.demand
    if model not in known or not known[model].level:
        return False
    config = degradation_settings.config_of(LeaderSettings(fleet))
    return config.mode == degradation_settings.ON


def owed(fleet: Fleet) -> list[Any]:
    """The decisions that are due."""
    known_models = models_of(fleet)
    config = leader_config(fleet)
    if not known_models and not config.share_percent:
        return []
    if not decides(fleet):
        return []
    models = dict.fromkeys([*known_models, *_models(fleet)])
    decisions = [found for model in models if (found := _decision(fleet, model, config))]
    if (
        leaders_version(fleet, VERSION) > 1
    ):  # version 1 does not know which are written and not yet folded
        for decision in decisions:
            _written(fleet).setdefault(decision.model, deque()).append(decision)
    return decisions


def _written(fleet: Fleet) -> dict[str, deque[v.SparesDecided]]:
    """By model, this leader's decisions that are not folded."""
    written: dict[str, deque[v.SparesDecided]] = fleet.__dict__.setdefault(WRITTEN, {})
    return written


def _last(fleet: Fleet, model: str, known: ModelSpares) -> tuple[tuple[str, ...], int]:
    """The model's spares by the last decision, whether it is folded or not; and since which tick there
    was a spare too few (-1: not since that decision)."""
    written = _written(fleet).get(model)
    return (written[-1].spares, -1) if written else (known.workers, known.short_since)


def _models(fleet: Fleet) -> list[str]:
    return [worker.model for worker in fleet.workers.values() if worker.model]


def _decision(fleet: Fleet, model: str, config: SparesConfig) -> v.SparesDecided | None:
    known = models_of(fleet).get(model) or ModelSpares()
    was, short_since = _last(fleet, model, known)
    figures = figures_of(fleet, model, config)
    spares = tuple(name for name in was if _may_stay(fleet, model, name))
    short_ticks = fleet.tick - short_since if short_since >= 0 else -1
    if len(spares) > figures.due:
        spares = spares[len(spares) - figures.due :]
    elif len(spares) < figures.due and short_ticks >= config.dwell_ticks:
        spares += _chosen(fleet, model, spares, figures.due - len(spares))
    if spares == was:
        return None
    return v.SparesDecided(
        model=model,
        spares=spares,
        was=was,
        since=fleet.tick,
        workers=figures.workers,
        failed=figures.failed,
        due=figures.due,
        short_ticks=short_ticks,
    )


def _may_stay(fleet: Fleet, model: str, name: str) -> bool:
    worker = fleet.workers.get(name)
    return worker is not None and worker.model == model and is_open(fleet, worker)


def _chosen(fleet: Fleet, model: str, spares: tuple[str, ...], count: int) -> tuple[str, ...]:
    """The workers that become spares: healthy ones of a failure domain with the fewest, and of these
    the least loaded."""
    rest = [
        worker
        for worker in fleet.workers.values()
        if worker.model == model and worker.name not in spares and _is_fit(fleet, worker)
    ]
    domains = [fleet.workers[name].domain for name in spares]
    found: list[str] = []
    while rest and len(found) < count:
        best = min(rest, key=lambda worker: (domains.count(worker.domain), len(worker.attempts)))
        rest.remove(best)
        domains.append(best.domain)
        found.append(best.name)
    return tuple(found)


def _is_fit(fleet: Fleet, worker: Worker) -> bool:
    """Whether nothing is known against the worker, so that it will serve when it is needed."""
    health = worker.health
    if not isinstance(health, UnsetType) and health.state != HealthState.HEALTHY:
        return False
    return is_open(fleet, worker)


# --- the fold


def _on_tick(fleet: Fleet, stream: str, epoch: int, event: v.Tick) -> None:
    """Since when a spare is missing follows from each tick's figures; old notes go."""
    config = leader_config(fleet)
    if not config.share_percent and not models_of(fleet):
        return
    is_deciding = config.share_percent > 0 and decides(fleet)
    for model in dict.fromkeys(_models(fleet)) if is_deciding else ():
        _of(fleet, model)
    for model, known in list(models_of(fleet).items()):
        known.lost = {
            name: tick
            for name, tick in known.lost.items()
            if event.number - tick < LOST_TICKS and not fleet.workers[name].present
        }
        known.promoted = {
            name: tick
            for name, tick in known.promoted.items()
            if event.number - tick < PROMOTED_TICKS
        }
        due = figures_of(fleet, model, config).due
        is_short = sum(_may_stay(fleet, model, name) for name in known.workers) < due
        if not is_short:
            known.short_since = -1
        elif known.short_since < 0:
            known.short_since = event.number
        if not is_deciding and not known.workers:
            _forget(fleet, model)


def _of(fleet: Fleet, model: str) -> ModelSpares:
    if isinstance(fleet.spares, UnsetType):
        fleet.spares = {}
    return fleet.spares.setdefault(model, ModelSpares())


def _forget(fleet: Fleet, model: str) -> None:
    known = models_of(fleet)
    known.pop(model, None)
    if not known:
        fleet.spares = UNSET


def _on_decided(fleet: Fleet, stream: str, epoch: int, event: v.SparesDecided) -> None:
    """They hold from here on. A former spare that is open is promoted."""
    if written := _written(fleet).get(event.model):
        written.popleft()
    known = _of(fleet, event.model)
    for name in known.workers:
        if name not in event.spares and _may_stay(fleet, event.model, name):
            known.promoted[name] = fleet.tick
    for name in event.spares:
        known.promoted.pop(name, None)
    known.workers, known.since, known.short_since = event.spares, event.since, -1


def _on_lost(fleet: Fleet, stream: str, epoch: int, event: v.WorkerLost) -> None:
    worker = fleet.workers.get(event.worker)
    if worker is None or worker.present or worker.engine == EnginePhase.NONE:
        return
    if (known := models_of(fleet).get(worker.model)) is not None:
        known.lost[worker.name] = fleet.tick


def _on_forgotten(fleet: Fleet, stream: str, epoch: int, event: v.WorkerForgotten) -> None:
    if event.worker not in fleet.workers:
        for known in models_of(fleet).values():
            known.lost.pop(event.worker, None)
            known.promoted.pop(event.worker, None)


def _on_elected(fleet: Fleet, stream: str, epoch: int, event: v.LeaderElected) -> None:
    """What an earlier leader wrote is folded; the rest never comes."""
    fleet.__dict__.pop(WRITTEN, None)


HANDLERS: dict[type, Callable[[Fleet, str, int, Any], None]] = {
    v.Tick: _on_tick,
    v.LeaderElected: _on_elected,
    v.SparesDecided: _on_decided,
    v.WorkerLost: _on_lost,
    v.WorkerForgotten: _on_forgotten,
}
"""Called after the fold's own handler, if there is one."""
