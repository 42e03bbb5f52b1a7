"""What the leader decides about degradation, from the fold alone, so that replay decides it again.

At each tick the figures of each model say which level is due (`levels`). The fold remembers since
when a higher or a lower one has been; the leader writes `DegradationDecided` when the level changes.
Until that is folded, the next tick would find the same decision due.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET, Struct, UnsetType

from relume.events import vocabulary as v
from relume.policies.degradation import batch_limits, capacity, demand, levels
from relume.policies.degradation.capacity import Capacity, Workload
from relume.policies.degradation.degradation_settings import OFF, DegradationConfig
from relume.policies.degradation.degradation_state import ModelDemand
from relume.policies.state.fleet import Fleet


class Figures(Struct, frozen=True, kw_only=True):
    """What a decision goes by: the mean request, what the serving workers can do of such requests,
    and the demand. `capacity` is all of it, of which `usable_per_ks` requests in 1000 seconds count.
    `wanted`: workers that would serve the demand."""

    workload: Workload
    capacity: Capacity
    usable_per_ks: int
    demand_per_ks: int
    wanted: int

    @property
    def share(self) -> int:
        """The part of the demand that is served, in thousandths."""
        return levels.share_of(self.usable_per_ks, self.demand_per_ks)

    @property
    def demand_tokens_per_s(self) -> int:
        """The demand in prompt and output tokens."""
        tokens = self.workload.prompt_tokens + self.workload.output_tokens
        return self.demand_per_ks * tokens // 1000


def figures_of(fleet: Fleet, model: str, config: DegradationConfig) -> Figures | None:
    """The figures now; None: the window is not full, or a part of them is not learnt yet."""
    known = demand.models_of(fleet).get(model)
    workload = demand.workload_of(known) if known is not None else None
    if known is None or workload is None:
        return None
    arriving = demand.requests_per_ks(known, config.window_ticks)
    serving = capacity.capacity_of(fleet, model, workload)
    if arriving < 0 or serving is None:
        return None
    every = capacity.capacity_of_all(fleet, model, workload)
    return Figures(
        workload=workload,
        capacity=serving,
        usable_per_ks=_usable(serving, config),
        demand_per_ks=arriving,
        wanted=levels.workers_wanted(arriving, _usable(every, config), every.workers),
    )


def _usable(found: Capacity, config: DegradationConfig) -> int:
    return found.requests_per_ks * config.usable_percent // 100


def owed(fleet: Fleet) -> list[Any]:
    """The decisions that are due, to be called when a tick was folded."""
    config = demand.leader_config(fleet)
    is_deciding = demand.decides(fleet) and config.mode != OFF
    found = (
        _decision(fleet, model, known, config) if is_deciding else _end(fleet, model, known)
        for model, known in demand.models_of(fleet).items()
    )
    return [decision for decision in found if decision is not None]


def _decision(
    fleet: Fleet, model: str, known: ModelDemand, config: DegradationConfig
) -> v.DegradationDecided | None:
    figures = figures_of(fleet, model, config)
    share = figures.share if figures is not None else levels.UNBOUNDED
    higher, lower = (
        fleet.tick - since if since >= 0 else -1
        for since in (known.higher_since, known.lower_since)
    )
    level = levels.next_level(
        known.level, share, higher, lower, config.rise_ticks, config.fall_ticks
    )
    if level == known.level:
        return None
    due_ticks = higher if level > known.level else lower
    return _recorded(fleet, model, known, level, due_ticks, figures)


def _end(fleet: Fleet, model: str, known: ModelDemand) -> v.DegradationDecided | None:
    """Levels are no longer decided: the model returns to normal at once."""
    return _recorded(fleet, model, known, 0, -1, None) if known.level else None


def _recorded(
    fleet: Fleet,
    model: str,
    known: ModelDemand,
    level: int,
    due_ticks: int,
    figures: Figures | None,
) -> v.DegradationDecided:
    if figures is None:
        return v.DegradationDecided(
            model=model, level=level, was=known.level, since=fleet.tick, due_ticks=due_ticks
        )
    return v.DegradationDecided(
        model=model,
        level=level,
        was=known.level,
        since=fleet.tick,
        due_ticks=due_ticks,
        share=figures.share,
        workers=figures.capacity.workers,
        wanted=figures.wanted,
        sequences=figures.capacity.sequences,
        requests_per_ks=figures.capacity.requests_per_ks,
        tokens_per_s=figures.capacity.tokens_per_s,
        usable_per_ks=figures.usable_per_ks,
        demand_per_ks=figures.demand_per_ks,
        prompt_tokens=figures.workload.prompt_tokens,
        output_tokens=figures.workload.output_tokens,
    )


# --- the fold


def _on_tick(fleet: Fleet, stream: str, epoch: int, event: v.Tick) -> None:
    """Since when another level is due follows from each tick's figures."""
    demand.on_tick(fleet, event)
    known_models = demand.models_of(fleet)
    if not known_models:
        return
    config = demand.leader_config(fleet)
    for model, known in known_models.items():
        figures = figures_of(fleet, model, config)
        share = figures.share if figures is not None else levels.UNBOUNDED
        is_higher = levels.level_due(share) > known.level
        is_lower = levels.may_fall(known.level, share)
        known.higher_since = _since(known.higher_since, is_higher, event.number)
        known.lower_since = _since(known.lower_since, is_lower, event.number)


def _since(since: int, is_due: bool, tick: int) -> int:
    if not is_due:
        return -1
    return since if since >= 0 else tick


def _on_decided(fleet: Fleet, stream: str, epoch: int, event: v.DegradationDecided) -> None:
    """The level holds from here on."""
    if isinstance(fleet.demand, UnsetType):
        fleet.demand = {}
    known = fleet.demand.get(event.model)
    if known is None:
        known = fleet.demand[event.model] = ModelDemand()
    known.level, known.since = event.level, event.since
    known.higher_since = known.lower_since = -1
    known.usable_per_ks, known.demand_per_ks = event.usable_per_ks, event.demand_per_ks
    if not event.level and not (demand.decides(fleet) and demand.leader_config(fleet).mode != OFF):
        del fleet.demand[event.model]
        if not fleet.demand:
            fleet.demand = UNSET


HANDLERS: dict[type, Callable[[Fleet, str, int, Any], None]] = {
    **demand.HANDLERS,
    v.Tick: _on_tick,
    v.DegradationDecided: _on_decided,
    v.EffectsDecided: batch_limits.on_effects,
}
"""Called after the fold's own handler, if there is one."""
