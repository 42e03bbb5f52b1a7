"""Settings that decisions about canaries depend on. Recorded in the log."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from relume.events.settings.declared import option
from relume.events.settings.recorded import RecordedSettings


class CanaryConfig(Struct, frozen=True, kw_only=True):
    """When wrong answers to canaries quarantine a worker, and when right ones release it."""

    confirm: Annotated[
        int,
        option("Different canaries with a wrong answer that quarantine a worker", ge=1, le=4),
    ] = 2
    repeats: Annotated[
        int,
        option("Wrong answers in a row to one canary that quarantine a worker", ge=1, le=100),
    ] = 3
    release: Annotated[
        int,
        option(
            "Right answers in a row, after a restart, that end a quarantine; then probes follow",
            ge=1,
            le=100,
        ),
    ] = 4
    restart: Annotated[
        int,
        option("Whether the engine of a worker is restarted when it is quarantined", ge=0, le=1),
    ] = 1
    digest_ticks: Annotated[
        int,
        option(
            "Maximum time that the end of a quarantine waits until model files are read, to compare them",
            unit="ticks",
            ge=0,
            le=86_400,
        ),
    ] = 1800
    tolerance_milli: Annotated[
        int,
        option(
            "Tolerance of log probabilities where they are not exact, beyond the learnt range",
            unit="thousandths",
            ge=0,
            le=10_000,
        ),
    ] = 50


SETTINGS = RecordedSettings("canary.", CanaryConfig)
settings_of, config_of = SETTINGS.recorded, SETTINGS.config_of
