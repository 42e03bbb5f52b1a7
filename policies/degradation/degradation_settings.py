"""Settings that decisions about degradation depend on. Recorded in the log."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from relume.events.settings.declared import option
from relume.events.settings.recorded import RecordedSettings

MODE = "degradation.mode"
QUEUED = "degradation.queued"
OFF, OBSERVE, ON = "off", "observe", "on"
MODES = (OFF, OBSERVE, ON)
MOST_WINDOW = 600


class DegradationConfig(Struct, frozen=True, kw_only=True):
    """What the leader does when the workers of a model can serve less than its clients ask for."""

    mode: Annotated[
        str,
        option(
            "When capacity is short. off: nothing is decided; observe: levels are decided and "
            "shown, no request is touched; on: levels limit and refuse requests",
            choices=MODES,
        ),
    ] = OFF
    window_ticks: Annotated[
        int,
        option("Time over which demand is measured", unit="ticks", ge=2, le=MOST_WINDOW),
    ] = 20
    rise_ticks: Annotated[
        int,
        option(
            "Time for which a higher level must be due before it is decided",
            unit="ticks",
            ge=1,
            le=3600,
        ),
    ] = 3
    fall_ticks: Annotated[
        int,
        option(
            "Time for which a lower level must be due before the level falls by one",
            unit="ticks",
            ge=1,
            le=3600,
        ),
    ] = 15
    usable_percent: Annotated[
        int,
        option("Share of the computed capacity that counts", unit="percent", ge=1, le=100),
    ] = 90
    max_tokens: Annotated[
        int,
        option(
            "Maximum output of a request that arrives at level 1 or above (0: no limit)",
            unit="tokens",
            ge=0,
            le=1_000_000,
        ),
    ] = 2048
    batch_percent: Annotated[
        int,
        option(
            "Share of its maximum number of requests that an engine runs at once at levels 1 and 2; "
            "level 3 and 4 take as much again (100: levels do not limit batches)",
            unit="percent",
            ge=1,
            le=100,
        ),
    ] = 100
    queued: Annotated[
        int,
        option(
            "In mode on: maximum number of requests per worker that have not begun to decode, if "
            "`waiting.queued` allows more (0: it holds)",
            unit="requests",
            ge=0,
            le=1_000_000,
        ),
    ] = 2


SETTINGS = RecordedSettings("degradation.", DegradationConfig)
settings_of, config_of = SETTINGS.recorded, SETTINGS.config_of
