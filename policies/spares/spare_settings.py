"""Settings that decisions about spares depend on. Recorded in the log."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from relume.events.settings.declared import option
from relume.events.settings.recorded import RecordedSettings

SHARE = "spares.share_percent"


class SparesConfig(Struct, frozen=True, kw_only=True):
    """How many workers of a model are spares, and how soon a promoted one is replaced."""

    share_percent: Annotated[
        int,
        option(
            "Share of a model's workers that are spares, at least one, from four workers on "
            "(0: no spares)",
            unit="percent",
            ge=0,
            le=50,
        ),
    ] = 0
    dwell_ticks: Annotated[
        int,
        option(
            "Time for which a model must have a spare too few before a worker becomes one",
            unit="ticks",
            ge=1,
            le=3600,
        ),
    ] = 5


SETTINGS = RecordedSettings("spares.", SparesConfig)
settings_of, config_of = SETTINGS.recorded, SETTINGS.config_of
