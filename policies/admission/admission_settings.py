"""Settings of the admission queue. Recorded in the log: what a replica started with, and what
operators change while it runs."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from relume.events.settings.declared import option
from relume.events.settings.recorded import RecordedSettings

PREFIX = "waiting."


class WaitingConfig(Struct, frozen=True, kw_only=True):
    """When a worker is full, and how much may queue at a replica. Where every worker is full,
    arrivals queue. A request that has queued for `age_ms` gets a share of what higher tiers
    get."""

    queued: Annotated[
        int,
        option(
            "Maximum number of requests per worker that have not begun to decode (0: no limit)",
            ge=0,
            le=1_000_000,
        ),
    ] = 256
    ahead_ms: Annotated[
        int,
        option(
            "Maximum predicted time a worker needs for the prompts it already has (0: no limit)",
            unit="ms",
            ge=0,
            le=3_600_000,
        ),
    ] = 0
    requests: Annotated[
        int,
        option(
            "Maximum number of requests queued at a replica (0: reject instead of queueing)",
            ge=0,
            le=1_000_000,
        ),
    ] = 8192
    mb: Annotated[
        int, option("Maximum size of all queued bodies at a replica", unit="MiB", ge=1, le=65_536)
    ] = 256
    tenant_percent: Annotated[
        int, option("Maximum share of the queue per named tenant", unit="percent", ge=1, le=100)
    ] = 50
    age_ms: Annotated[
        int,
        option(
            "Queue time after which a lower tier gets a share of the capacity of higher tiers",
            unit="ms",
            ge=0,
            le=3_600_000,
        ),
    ] = 5_000
    most_ms: Annotated[
        int,
        option("Maximum time in the queue while a worker is open", unit="ms", ge=1, le=3_600_000),
    ] = 30_000


SETTINGS = RecordedSettings(PREFIX, WaitingConfig)
LIMITS = SETTINGS.limits
settings_of, config_of = SETTINGS.recorded, SETTINGS.config_of
