"""Settings that differ from the defaults, for composed scenarios: routing policies, breakers, moves."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random

from msgspec.structs import replace

from relume.chaos.scenario.language import Fleet
from relume.policies.routing.routing_settings import POLICIES

_VALUES: dict[str, tuple[int | str, ...]] = {
    "routing.policy": POLICIES,
    "routing.overfill": ("off", "on"),
    "checkpoints.placement": ("load_aware", "neighbour"),
    "checkpoints.recovery": ("completion", "eq6", "least_delay", "least_total", "recompute"),
    "checkpoints.holders": (1, 2, 3),
    "migration.moves": ("drain", "all"),
    "migration.gap": (2, 4),
    "migration.ticks": (1, 2, 5),
    "migration.cool_ticks": (1, 5, 30),
    "migration.dwell_ticks": (1, 5, 120),
    "migration.margin_percent": (0, 100),
    "health.errors": (1, 2, 3, 5),
    "health.window_ticks": (3, 10, 30),
    "health.hold_ticks": (1, 2, 5),
    "health.longest_ticks": (2, 10, 120),
    "health.probes": (1, 2, 3),
    "health.passes": (1, 2, 4),
    "health.unjudged": (0, 1, 3),
    "health.unanswered": (0, 1, 2),
    "health.share_percent": (0, 34, 50),
    "health.price_percent": (100, 200, 400),
}
"""What a value may be; the default is among them."""


def other_settings(seed: int, fleet: Fleet) -> Fleet:
    """In one of five seeds, one to six settings may differ, and in half of these the routing policy.
    Drawn from random numbers of their own, so that the rest of the seed's scenario stays."""
    rng = Random(f"compose-settings:{seed}")
    names = rng.sample([name for name in _VALUES if name != "routing.policy"], rng.randint(1, 6))
    if rng.random() < 0.5:
        names.append("routing.policy")
    values = {name: rng.choice(_VALUES[name]) for name in names}
    return _with(fleet, values) if rng.random() < 0.2 else fleet


def with_part(fleet: Fleet, part: str, values: Mapping[str, int | str]) -> Fleet:
    """`fleet` with settings of one part, by their names without it."""
    return _with(fleet, {f"{part}.{name}": value for name, value in values.items()})


def without_part(fleet: Fleet, part: str) -> Fleet:
    """`fleet` with the defaults of one part."""
    left = {k: v for k, v in fleet.settings.items() if k.partition(".")[0] != part}
    return replace(fleet, settings=left)


def _with(fleet: Fleet, values: Mapping[str, int | str]) -> Fleet:
    return replace(fleet, settings={**fleet.settings, **values})
