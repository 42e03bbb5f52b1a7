"""Settings that routing decisions depend on. In the log, as those of `stall`: what a replica
started with, and what operators change while it runs."""

from __future__ import annotations

from msgspec import Struct

from relume.policies.view import View

PREFIX = "routing."
POLICY = f"{PREFIX}policy"
OLD = ("least_load", "round_robin")
"""Told by every log there is: they choose, and record, as they always did."""
NEW = ("predicted_ttft", "prefix_first", "session_affinity", "jsq", "power_of_two")
POLICIES = (*OLD, *NEW)
TIERS = ("interactive", "standard", "batch")
USUAL_TIER = "standard"


class RoutingConfig(Struct, frozen=True):
    """`policy` chooses. `slo_*_ms`: a request of that tier is to have its first token within so
    long (0: whenever it comes); where no worker is expected to keep that, it goes to the best
    all the same, or with `shed` on is refused. A worker with less than `kv_reserve_percent` of
    its KV blocks left over, once all it holds have theirs, has no room. Affine sessions leave a
    worker that has `affinity_percent` of the mean number of requests. With `overfill` off, one
    that is full by the waiting room's bounds gets nothing while another is not."""

    policy: str = "predicted_ttft"
    slo_interactive_ms: int = 0
    slo_standard_ms: int = 0
    slo_batch_ms: int = 0
    shed: str = "off"
    kv_reserve_percent: int = 0
    affinity_percent: int = 125
    overfill: str = "off"

    def slo_us(self, tier: str) -> int:
        """Of a tier; 0 for none, and for tiers nobody knows."""
        if tier in TIERS:
            return int(getattr(self, f"slo_{tier}_ms")) * 1000
        return self.slo_standard_ms * 1000


NAMES = RoutingConfig.__struct_fields__
CHOICES = {POLICY: POLICIES, f"{PREFIX}shed": ("off", "on"), f"{PREFIX}overfill": ("off", "on")}
INTEGERS = tuple(PREFIX + name for name in NAMES if PREFIX + name not in CHOICES)
LIMITS = {
    "slo_interactive_ms": (0, 3_600_000, "first token of interactive requests within (0: none)"),
    "slo_standard_ms": (0, 3_600_000, "first token of usual requests within (0: none)"),
    "slo_batch_ms": (0, 3_600_000, "first token of batch requests within (0: none)"),
    "kv_reserve_percent": (0, 100, "a worker with less KV to spare has no room"),
    "affinity_percent": (100, 10_000, "session_affinity: load that sends a session elsewhere"),
}
"""Of each number: least, most, and what it means."""
_UNTOLD = RoutingConfig(policy="least_load", overfill="on")
"""What logs that tell nothing of a setting were decided with."""
_DEFAULTS = [(n, PREFIX + n, str(getattr(_UNTOLD, n))) for n in NAMES]
_TEXTS = frozenset(key.removeprefix(PREFIX) for key in CHOICES)


def settings_of(config: RoutingConfig) -> tuple[tuple[str, str], ...]:
    """The settings as a replica records them when it starts."""
    return tuple((PREFIX + name, str(getattr(config, name))) for name in NAMES)


def config_of(view: View) -> RoutingConfig:
    """The settings in force at `view`, from the log alone. Raises ValueError for a number
    that is none."""
    told = {name: view.setting(key, default) for name, key, default in _DEFAULTS}
    return RoutingConfig(**{n: t if n in _TEXTS else int(t) for n, t in told.items()})
