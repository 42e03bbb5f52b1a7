"""Settings that decisions about checkpoints depend on. In the log, as those of `stall`."""

from __future__ import annotations

from msgspec import Struct

from relume.policies import placement, recovery_plan
from relume.policies.view import View

PLACEMENTS = placement.POLICIES
RECOVERIES = (*recovery_plan.POLICIES, "recompute")
PREFIX = "checkpoints."


class CheckpointConfig(Struct, frozen=True):
    """`placement` and `recovery` name policies, `holders` is how many a request gets. `alpha`,
    `beta`: Eq. 4's factors of a block and a request; `theta_percent` of the mean load and
    `tau` tokens: Eq. 6's thresholds. `output_tokens` a request is expected to make at most.

    Before anything was measured a prompt token takes `prefill_ns`, and links move so many
    bytes a millisecond: `link_machine` in shared memory, `link_domain` within a failure
    domain, `link_network` beyond; `latency_us` once a restore.
    """

    placement: str = "load_aware"
    recovery: str = "least_total"
    holders: int = 1
    alpha: int = 1
    beta: int = 4
    theta_percent: int = 200
    tau: int = 512
    output_tokens: int = 256
    prefill_ns: int = 50_000
    link_machine: int = 4_000_000
    link_domain: int = 1_000_000
    link_network: int = 500_000
    latency_us: int = 500


NAMES = CheckpointConfig.__struct_fields__
CHOICES = {f"{PREFIX}placement": PLACEMENTS, f"{PREFIX}recovery": RECOVERIES}
INTEGERS = tuple(PREFIX + name for name in NAMES if PREFIX + name not in CHOICES)
_UNTOLD = CheckpointConfig(recovery="completion")
"""What logs that tell nothing of a setting were decided with."""
_DEFAULTS = [(n, PREFIX + n, str(getattr(_UNTOLD, n))) for n in NAMES]
_TEXTS = frozenset(key.removeprefix(PREFIX) for key in CHOICES)


def settings_of(config: CheckpointConfig) -> tuple[tuple[str, str], ...]:
    """The settings as a replica records them when it starts."""
    return tuple((PREFIX + name, str(getattr(config, name))) for name in NAMES)


def config_of(view: View) -> CheckpointConfig:
    """The settings in force at `view`, from the log alone. Raises ValueError for a number
    that is none."""
    told = {name: view.setting(key, default) for name, key, default in _DEFAULTS}
    return CheckpointConfig(**{n: t if n in _TEXTS else int(t) for n, t in told.items()})
