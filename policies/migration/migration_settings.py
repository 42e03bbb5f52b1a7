"""Settings that decisions about live migration depend on. Recorded in the log."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from relume.events.settings.declared import option
from relume.events.settings.recorded import RecordedSettings

MOVES = ("off", "drain", "all")
PREFIX = "migration."


class MigrationConfig(Struct, frozen=True, kw_only=True):
    """When running requests migrate. A drain moves each request once a holder has caught up,
    and is refused if fewer than `drain_floor` workers stay open.
    A worker is overloaded when it has had at least `gap` requests more than another worker for
    `ticks`; then at most `at_once` requests leave it, each only if its gain exceeds its pause by
    `margin_percent`. The workers are then not examined for `cool_ticks`, and a request that moved,
    for whatever cause, stays for `dwell_ticks`."""

    moves: Annotated[
        str,
        option(
            "When to migrate running requests. off: never; drain: from draining workers; all: "
            "also from persistently overloaded workers",
            choices=MOVES,
        ),
    ] = "drain"
    pause_ms: Annotated[
        int,
        option(
            "Drain: maximum predicted pause of a migrated stream", unit="ms", ge=0, le=3_600_000
        ),
    ] = 2000
    wait_ticks: Annotated[
        int, option("Drain: maximum wait for a holder to catch up", unit="ticks", ge=0, le=3600)
    ] = 5
    slack_blocks: Annotated[
        int,
        option(
            "Drain: missing KV blocks up to which a holder counts as caught up", ge=0, le=1 << 20
        ),
    ] = 4
    drain_floor: Annotated[
        int,
        option(
            "Drain: minimum number of other workers of the model that are open for requests; with "
            "fewer, a drain is refused unless it is forced (0: never refused)",
            ge=0,
            le=10_000,
        ),
    ] = 1
    gap: Annotated[
        int,
        option("Overload: requests more than another worker has", ge=2, le=1 << 20),
    ] = 4
    ticks: Annotated[
        int, option("Overload: how long the gap must persist", unit="ticks", ge=1, le=32)
    ] = 5
    cool_ticks: Annotated[
        int, option("Overload: cool-down after a migration", unit="ticks", ge=1, le=86_400)
    ] = 30
    dwell_ticks: Annotated[
        int,
        option(
            "Overload: minimum time that a migrated request stays on its worker",
            unit="ticks",
            ge=0,
            le=86_400,
        ),
    ] = 120
    trust_percent: Annotated[
        int,
        option(
            "Overload: maximum ratio between a worker's measured prefill time and the median of its "
            "model and hardware; beyond it, it counts as that much (0: no maximum; 1 to 99 as 100)",
            unit="percent",
            ge=0,
            le=10_000,
        ),
    ] = 200
    at_once: Annotated[
        int, option("Overload: maximum number of requests per migration", ge=1, le=4096)
    ] = 4
    margin_percent: Annotated[
        int,
        option(
            "Overload: minimum gain beyond the cost of the pause", unit="percent", ge=0, le=10_000
        ),
    ] = 100


SETTINGS = RecordedSettings(
    PREFIX,
    MigrationConfig,
    unrecorded=MigrationConfig(dwell_ticks=0, trust_percent=0, drain_floor=0),
)
LIMITS = SETTINGS.limits
settings_of, config_of = SETTINGS.recorded, SETTINGS.config_of
