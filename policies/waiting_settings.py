"""Settings of the waiting room. In the log, as those of routing: what a replica started with, and
what operators change while it runs."""

from __future__ import annotations

from msgspec import Struct

from relume.policies.view import View

PREFIX = "waiting."


class WaitingConfig(Struct, frozen=True):
    """A worker takes no arrival while it has `queued` requests that it has not begun to decode, or
    is expected to compute prompts that it has for `ahead_ms` more (0: no such bound); where no
    worker takes any, arrivals wait. `requests` (0: nobody waits for that) and `mb` of bodies wait
    at most, of one named tenant `tenant_percent` of either; nobody longer than `most_ms`. Who has
    waited `age_ms` gets a share of what higher tiers get."""

    queued: int = 256
    ahead_ms: int = 0
    requests: int = 8192
    mb: int = 256
    tenant_percent: int = 50
    age_ms: int = 5_000
    most_ms: int = 30_000


NAMES = WaitingConfig.__struct_fields__
INTEGERS = tuple(PREFIX + name for name in NAMES)
LIMITS = {
    "queued": (0, 1_000_000, "requests a worker may hold that do not decode yet (0: any number)"),
    "ahead_ms": (0, 3_600_000, "prompts ahead of an arrival at a worker, in ms (0: any number)"),
    "requests": (0, 1_000_000, "so many wait at a replica (0: none for a busy worker)"),
    "mb": (1, 65_536, "MiB of bodies that wait at a replica"),
    "tenant_percent": (1, 100, "of these, what one named tenant may have"),
    "age_ms": (0, 3_600_000, "a wait from which on lower tiers get a share of what higher get"),
    "most_ms": (1, 3_600_000, "nobody waits longer for a busy worker"),
}
"""Of each: least, most, and what it means."""
_DEFAULTS = [(n, PREFIX + n, str(getattr(WaitingConfig(), n))) for n in NAMES]


def settings_of(config: WaitingConfig) -> tuple[tuple[str, str], ...]:
    """The settings as a replica records them when it starts."""
    return tuple((PREFIX + name, str(getattr(config, name))) for name in NAMES)


def config_of(view: View) -> WaitingConfig:
    """The settings in force at `view`, from the log alone. Raises ValueError for a number
    that is none."""
    return WaitingConfig(**{n: int(view.setting(key, text)) for n, key, text in _DEFAULTS})
