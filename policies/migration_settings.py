"""Settings that decisions about live migration depend on. In the log, as those of `stall`."""

from __future__ import annotations

from msgspec import Struct

from relume.policies.view import View

MOVES = ("off", "drain", "all")
PREFIX = "migration."


class MigrationConfig(Struct, frozen=True):
    """`moves`: requests never leave a living engine, leave one that drains, or also one that
    has more to do than others.

    A drain waits `wait_ticks` for holders to come within `slack_blocks` of what a request has,
    and moves none whose pause is expected to exceed `pause_ms`. A worker is crowded when for
    `ticks` it had at least `gap` requests more than another; then at most `at_once` leave it,
    each if what it gains exceeds its pause by `margin_percent`, and for `cool_ticks` neither
    they nor the workers are looked at again.
    """

    moves: str = "drain"
    pause_ms: int = 2000
    wait_ticks: int = 5
    slack_blocks: int = 4
    gap: int = 4
    ticks: int = 5
    cool_ticks: int = 30
    at_once: int = 4
    margin_percent: int = 100


NAMES = MigrationConfig.__struct_fields__
CHOICES = {f"{PREFIX}moves": MOVES}
INTEGERS = tuple(PREFIX + name for name in NAMES if PREFIX + name not in CHOICES)
LIMITS = {
    "pause_ms": (0, 3_600_000, "drain: none is moved with a longer pause"),
    "wait_ticks": (0, 3600, "drain: holders that lag are waited for"),
    "slack_blocks": (0, 1 << 20, "blocks a holder may lack before it lags"),
    "gap": (2, 1 << 20, "imbalance: requests more than another worker has"),
    "ticks": (1, 32, "imbalance: for so long"),
    "cool_ticks": (1, 86_400, "imbalance: nothing moves again for so long"),
    "at_once": (1, 4096, "imbalance: so many leave together"),
    "margin_percent": (0, 10_000, "imbalance: gain beyond the pause's cost"),
}
"""Of each number: least, most, and what it means."""
_DEFAULTS = [(n, PREFIX + n, str(getattr(MigrationConfig(), n))) for n in NAMES]


def settings_of(config: MigrationConfig) -> tuple[tuple[str, str], ...]:
    """The settings as a replica records them when it starts."""
    return tuple((PREFIX + name, str(getattr(config, name))) for name in NAMES)


def config_of(view: View) -> MigrationConfig:
    """The settings in force at `view`, from the log alone. Raises ValueError for a number
    that is none."""
    told = {name: view.setting(key, default) for name, key, default in _DEFAULTS}
    return MigrationConfig(**{n: t if n == "moves" else int(t) for n, t in told.items()})
