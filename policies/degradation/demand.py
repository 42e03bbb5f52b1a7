"""How much clients send, by model: what the fold notes of requests, and the figures from it.

Demand is counted in ticks of the leader, over a window of the last ones. A request counts when it
arrives, whether it is served or refused. Its size is not known then: the mean request is learnt from
dispatches (prompt tokens without those in prefix caches) and from completed requests (output).

After a time without log the events of that time land at once, and would look like a burst. So the
window begins anew, `SETTLE_TICKS` after the log works again.

A log of replicas that do not decide degradation, or have it off, has no demand: then nothing is
collected, and the state has no such part.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET, UnsetType

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EnginePhase
from relume.policies.agreement import decided_for_all, known_to_all
from relume.policies.degradation.capacity import Workload
from relume.policies.degradation.degradation_settings import OFF, DegradationConfig, config_of
from relume.policies.degradation.degradation_state import ModelDemand
from relume.policies.health.judgement import LeaderSettings
from relume.policies.state.fleet import Fleet

VERSION = "version.degradation"
"""The setting by which replicas record that they decide degradation, how, and follow it."""
SETTLE_TICKS = 8
"""As many as `relume.policies.leader.duties.HEALTHY_TICKS`."""
ENOUGH = 16
"""Requests from which a mean request is learnt."""
FADE = 256
"""After this number of requests, older ones count half."""
KS_MS = 1_000_000


def all_follow(fleet: Fleet) -> bool:
    """Whether every living replica knows levels, and follows them."""
    return known_to_all(fleet, VERSION)


def decides(fleet: Fleet) -> bool:
    """The same, and there is a leader that decides them."""
    return decided_for_all(fleet, VERSION)


def leader_config(fleet: Fleet) -> DegradationConfig:
    """The settings in force for the leader's decisions."""
    return config_of(LeaderSettings(fleet))


def models_of(fleet: Fleet) -> dict[str, ModelDemand]:
    """By model; empty where nothing is collected."""
    known = fleet.demand
    return {} if isinstance(known, UnsetType) else known


def workload_of(demand: ModelDemand) -> Workload | None:
    """The mean request; None: too few are known."""
    if demand.prompts < ENOUGH or demand.outputs < ENOUGH:
        return None
    return Workload(
        prompt_tokens=max(-(-demand.prompt_tokens // demand.prompts), 1),
        output_tokens=max(-(-demand.output_tokens // demand.outputs), 1),
    )


def requests_per_ks(demand: ModelDemand, window_ticks: int) -> int:
    """Requests that arrive in 1000 seconds, by the window; -1: it is not full yet."""
    if len(demand.arrivals) < window_ticks:
        return -1
    span_ms = sum(demand.spans_ms[-window_ticks:])
    return sum(demand.arrivals[-window_ticks:]) * KS_MS // max(span_ms, 1)


# --- the fold


def _on_arrived(fleet: Fleet, stream: str, epoch: int, event: v.RequestArrived) -> None:
    if (demand := _of(fleet, event.model)) is not None:
        demand.arrived += 1


def _on_routed(fleet: Fleet, stream: str, epoch: int, event: v.RouteDecided) -> None:
    if event.attempt != 1 or not event.worker:
        return
    if (demand := _of(fleet, event.model)) is None:
        return
    demand.prompts += 1
    demand.prompt_tokens += max(event.prompt_tokens - event.cached_tokens, 1)
    if demand.prompts > FADE:
        demand.prompts >>= 1
        demand.prompt_tokens >>= 1


def completed(fleet: Fleet, model: str, event: v.RequestEnded) -> None:
    """A request for `model` completed."""
    if (demand := _of(fleet, model)) is None or event.tokens < 0:
        return
    demand.outputs += 1
    demand.output_tokens += event.tokens
    if demand.outputs > FADE:
        demand.outputs >>= 1
        demand.output_tokens >>= 1


def _of(fleet: Fleet, model: str) -> ModelDemand | None:
    known = fleet.demand
    return None if isinstance(known, UnsetType) else known.get(model)


def on_tick(fleet: Fleet, event: v.Tick) -> None:
    """The arrivals since the last tick enter the window."""
    config = leader_config(fleet)
    if not decides(fleet) or config.mode == OFF:
        _stop(fleet)
        return
    if isinstance(fleet.demand, UnsetType):
        fleet.demand = {}
    for worker in fleet.workers.values():
        if worker.engine == EnginePhase.READY and worker.model not in fleet.demand:
            fleet.demand[worker.model] = ModelDemand()
    served = {worker.model for worker in fleet.workers.values()}
    for model in [name for name in fleet.demand if name not in served]:
        del fleet.demand[model]
    settled = event.number - fleet.healthy_since_tick >= SETTLE_TICKS
    for demand in fleet.demand.values():
        _advance(demand, event.unix_ms, config, settled)


def _stop(fleet: Fleet) -> None:
    """Nothing is decided any more: what was imposed ends with a decision, so that stays known."""
    imposed = {model: known for model, known in models_of(fleet).items() if known.level}
    if not isinstance(fleet.demand, UnsetType):
        fleet.demand = imposed or UNSET


def _advance(demand: ModelDemand, unix_ms: int, config: DegradationConfig, settled: bool) -> None:
    arrived, demand.arrived = demand.arrived, 0
    span_ms = unix_ms - demand.tick_unix_ms
    begun, demand.tick_unix_ms = demand.tick_unix_ms, unix_ms
    if not settled or not begun or span_ms < 0:
        demand.arrivals, demand.spans_ms = [], []
        return
    demand.arrivals.append(arrived)
    demand.spans_ms.append(span_ms)
    del demand.arrivals[: -config.window_ticks]
    del demand.spans_ms[: -config.window_ticks]


HANDLERS: dict[type, Callable[[Fleet, str, int, Any], None]] = {
    v.RequestArrived: _on_arrived,
    v.RouteDecided: _on_routed,
}
