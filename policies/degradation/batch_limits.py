"""Engines run fewer requests at once while capacity is short: the effects that a level has on agents.

A smaller batch makes each step shorter, so that running requests get their tokens sooner; new ones wait
longer, and the engine computes less in all (seed 004 has it at levels 1 to 3). The leader tells the
agent of each ready engine once, and again when the level changes. An engine starts without limit.
"""

from __future__ import annotations

from collections.abc import Iterator

from msgspec import UNSET, UnsetType

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind, EnginePhase
from relume.policies.degradation import demand, levels
from relume.policies.degradation.degradation_settings import ON
from relume.policies.state.fleet import Fleet, Worker

UNLIMITED = 100
DECISION = "batch."
"""Decisions begin so; the tick follows."""


def limit_of(worker: Worker) -> int:
    """The limit that its engine has, in percent."""
    return UNLIMITED if isinstance(worker.batch_limit, UnsetType) else worker.batch_limit


def owed(fleet: Fleet) -> list[v.EffectsDecided]:
    """One decision with all effects that are due at a tick; none if each engine has its limit."""
    effects = tuple(_due(fleet))
    if not effects:
        return []
    return [
        v.EffectsDecided(
            decision=f"{DECISION}{fleet.tick}",
            basis=v.Basis(fleet.revision, 0),
            cause="the level of degradation limits batches",
            effects=effects,
        )
    ]


def _due(fleet: Fleet) -> Iterator[v.Effect]:
    known = demand.models_of(fleet)
    if not known and not any(w.batch_limit is not UNSET for w in fleet.workers.values()):
        return
    config = demand.leader_config(fleet)
    is_on = config.mode == ON and demand.decides(fleet)
    for worker in fleet.workers.values():
        if worker.engine != EnginePhase.READY or not worker.present or worker.plain:
            continue
        level = known[worker.model].level if is_on and worker.model in known else 0
        limit = levels.batch_percent(level, config.batch_percent)
        if limit != limit_of(worker):
            yield v.Effect(EffectKind.LIMIT_BATCH, worker.name, worker.incarnation, str(limit))


def on_effects(fleet: Fleet, stream: str, epoch: int, event: v.EffectsDecided) -> None:
    """The engines have these limits from here on."""
    for effect in event.effects if event.again < 0 else ():
        worker = fleet.workers.get(effect.worker)
        if effect.kind != EffectKind.LIMIT_BATCH or worker is None:
            continue
        if effect.incarnation == worker.incarnation:
            limit = int(effect.argument)
            worker.batch_limit = UNSET if limit == UNLIMITED else limit
