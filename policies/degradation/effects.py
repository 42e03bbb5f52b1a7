"""What a decided level does to requests, as a replica has it at the basis of its own decisions.

The leader's level counts while the setting is on, and while every living replica follows levels.
"""

from __future__ import annotations

from relume.events.settings.recorded import number_in
from relume.policies.degradation import levels
from relume.policies.degradation.degradation_settings import MODE, OFF, ON, QUEUED, config_of
from relume.policies.degradation.degradation_state import ModelDemand
from relume.policies.degradation.demand import all_follow, models_of
from relume.policies.state.overlay.view import View

LEAST_RETRY_S, MOST_RETRY_S = 1, 60


def level_of(view: View, model: str) -> int:
    """The level that holds for arrivals for `model`."""
    known = models_of(view.fleet).get(model)
    if known is None or not known.level:
        return 0
    if view.setting(MODE, OFF) != ON or not all_follow(view.fleet):
        return 0
    return known.level


def refuses(view: View, model: str, tier: str) -> bool:
    """Whether an arrival of that tier is refused because of the level."""
    level = level_of(view, model)
    return level > 0 and levels.sheds(level, tier)


def slo_factor(view: View, model: str) -> int:
    """By what the TTFT goals of tiers are multiplied."""
    return levels.slo_factor(level_of(view, model))


def output_limit(view: View, model: str) -> int:
    """Maximum of output tokens of an arrival; 0: none."""
    level = level_of(view, model)
    return levels.output_limit(level, config_of(view).max_tokens) if level else 0


def queued_at_worker(view: View, queued: int) -> int:
    """`waiting.queued`, or less while levels act: a backlog is to wait where tiers count, also the one
    that grows until the level rises. 0: no bound."""
    if view.setting(MODE, OFF) != ON:
        return queued
    return min(queued, number_in(view, QUEUED, 0) or queued)


def retry_after_s(view: View, model: str) -> int:
    """When a refused client may retry: when the workers would have served what the demand of a
    window exceeds their capacity by, and not before the level may fall."""
    known = models_of(view.fleet).get(model)
    if known is None:
        return LEAST_RETRY_S
    window_ms, ticks = sum(known.spans_ms), len(known.spans_ms)
    tick_ms = window_ms // ticks if ticks else 1000
    wait_ms = max(_excess_ms(known, window_ms), _fall_ticks(view, known) * tick_ms)
    return min(max(-(-wait_ms // 1000), LEAST_RETRY_S), MOST_RETRY_S)


def _excess_ms(known: ModelDemand, window_ms: int) -> int:
    if not known.usable_per_ks:
        return MOST_RETRY_S * 1000
    excess = max(known.demand_per_ks - known.usable_per_ks, 0)
    return window_ms * excess // known.usable_per_ks


def _fall_ticks(view: View, known: ModelDemand) -> int:
    """Ticks until the level falls at the earliest."""
    due = view.fleet.tick - known.lower_since if known.lower_since >= 0 else 0
    return max(config_of(view).fall_ticks - due, 0)
