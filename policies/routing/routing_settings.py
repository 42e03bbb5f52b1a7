"""Settings that routing decisions depend on. Recorded in the log: what a replica started with,
and what operators change while it runs."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from relume.events.settings.declared import option
from relume.events.settings.recorded import RecordedSettings
from relume.events.vocabulary.enums import Tier

PREFIX = "routing."
POLICY = f"{PREFIX}policy"
OLD = ("least_load", "round_robin")
"""In every log so far; they choose, and record, as they always did."""
NEW = ("predicted_ttft", "prefix_first", "session_affinity", "jsq", "power_of_two")
POLICIES = (*OLD, *NEW)
TIERS = (Tier.INTERACTIVE, Tier.STANDARD, Tier.BATCH)
USUAL_TIER = Tier.STANDARD
_HOUR_MS = 3_600_000


class RoutingConfig(Struct, frozen=True, kw_only=True):
    """Which worker takes a request. Where no worker is predicted to meet a tier's TTFT goal, the
    request goes to the best worker, or with `shed` on is rejected. With `overfill` off, a worker
    that is full by the limits of the admission queue gets nothing while another is not."""

    policy: Annotated[
        str, option("Policy that chooses the worker of a request", choices=POLICIES)
    ] = "predicted_ttft"
    slo_interactive_ms: Annotated[
        int,
        option("TTFT goal of interactive requests (0: none)", unit="ms", ge=0, le=_HOUR_MS),
    ] = 0
    slo_standard_ms: Annotated[
        int, option("TTFT goal of standard requests (0: none)", unit="ms", ge=0, le=_HOUR_MS)
    ] = 0
    slo_batch_ms: Annotated[
        int, option("TTFT goal of batch requests (0: none)", unit="ms", ge=0, le=_HOUR_MS)
    ] = 0
    shed: Annotated[
        str,
        option(
            "on: reject a request with 429 if no worker is predicted to meet its tier's TTFT goal",
            choices=("off", "on"),
        ),
    ] = "off"
    kv_reserve_percent: Annotated[
        int,
        option(
            "Minimum share of KV blocks that must stay free on a worker",
            unit="percent",
            ge=0,
            le=100,
        ),
    ] = 0
    affinity_percent: Annotated[
        int,
        option(
            "session_affinity: load of a worker, relative to the mean, above which its sessions "
            "go elsewhere",
            unit="percent",
            ge=100,
            le=10_000,
        ),
    ] = 125
    overfill: Annotated[
        str,
        option("on: full workers get requests even if others have capacity", choices=("off", "on")),
    ] = "off"

    def slo_us(self, tier: str) -> int:
        """The TTFT goal of a tier in microseconds, 0 for none. An unknown tier has the goal of
        the standard tier."""
        if tier in TIERS:
            return int(getattr(self, f"slo_{tier}_ms")) * 1000
        return self.slo_standard_ms * 1000


SETTINGS = RecordedSettings(
    PREFIX, RoutingConfig, RoutingConfig(policy="least_load", overfill="on")
)
settings_of, config_of = SETTINGS.recorded, SETTINGS.config_of
