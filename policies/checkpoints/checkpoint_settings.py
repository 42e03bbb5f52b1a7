"""Settings that decisions about checkpoints depend on. Recorded in the log."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from relume.events.settings.declared import option
from relume.events.settings.recorded import RecordedSettings
from relume.policies.checkpoints import placement
from relume.policies.recovery import plan

PLACEMENTS = placement.POLICIES
RECOVERIES = (*plan.POLICIES, "recompute")
PREFIX = "checkpoints."


class CheckpointConfig(Struct, frozen=True, kw_only=True):
    """Where checkpoints go and how interrupted requests continue. `prefill_ns` and the links'
    rates (bytes per millisecond) are used until they have been measured."""

    placement: Annotated[
        str, option("Policy that chooses the holder of a checkpoint", choices=PLACEMENTS)
    ] = "load_aware"
    recovery: Annotated[
        str, option("Policy that plans how interrupted requests continue", choices=RECOVERIES)
    ] = "least_total"
    holders: Annotated[
        int,
        option("Number of holders per request, in different failure domains", ge=1, le=4),
    ] = 1
    alpha: Annotated[
        int, option("LUMEN Eq. 4: recovery load of one block to restore", ge=0, le=10_000)
    ] = 1
    beta: Annotated[
        int, option("LUMEN Eq. 4: recovery load of one queued request", ge=0, le=10_000)
    ] = 4
    theta_percent: Annotated[
        int,
        option(
            "LUMEN Eq. 6: holder load that counts as overload, relative to the mean",
            unit="percent",
            ge=0,
            le=1_000_000,
        ),
    ] = 200
    tau: Annotated[
        int,
        option(
            "LUMEN Eq. 6: a longer prefix is restored even from an overloaded holder",
            unit="tokens",
            ge=0,
            le=1 << 31,
        ),
    ] = 512
    output_tokens: Annotated[
        int,
        option(
            "Maximum output length assumed for a request without a limit of its own",
            unit="tokens",
            ge=0,
            le=1 << 20,
        ),
    ] = 256
    headroom_percent: Annotated[
        int,
        option(
            "Minimum share of a worker's KV blocks that recovery plans and moves leave free on it "
            "(0: KV room is not checked)",
            unit="percent",
            ge=0,
            le=100,
        ),
    ] = 5
    restore_budget_ms: Annotated[
        int,
        option(
            "Recovery: maximum predicted time for the KV blocks of an interrupted request to arrive; "
            "beyond it the request is computed again if that is sooner (0: no maximum)",
            unit="ms",
            ge=0,
            le=3_600_000,
        ),
    ] = 500
    prefill_ns: Annotated[int, option("Prefill time per token before it is measured")] = 50_000
    link_machine: Annotated[int, option("Rate of shared memory before it is measured")] = 4_000_000
    link_domain: Annotated[int, option("Rate within a failure domain before it is measured")] = (
        1_000_000
    )
    link_network: Annotated[int, option("Rate between failure domains before it is measured")] = (
        500_000
    )
    latency_us: Annotated[int, option("Fixed time of one restore")] = 500


SETTINGS = RecordedSettings(
    PREFIX,
    CheckpointConfig,
    CheckpointConfig(recovery="completion", headroom_percent=0, restore_budget_ms=0),
)
settings_of, config_of = SETTINGS.recorded, SETTINGS.config_of
