"""Settings that decisions about health depend on. Recorded in the log."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from relume.events.settings.declared import option
from relume.events.settings.recorded import RecordedSettings

MOST_ERRORS = 100
"""Failed requests that are stored per worker."""


class HealthConfig(Struct, frozen=True, kw_only=True):
    """Breakers and suspects. A breaker opens after `errors` different requests failed on the worker
    within `window_ticks`; it holds for `hold_ticks`, twice as long each further time up to
    `longest_ticks`, each with a jitter; then `passes` of at most `probes` requests at once must
    succeed. No breaker opens while more than `share_percent` of a model's workers fail. A worker gets
    no requests if reports of its engine could not be read in `dropped_ticks` of the ticks within
    `window_ticks`."""

    errors: Annotated[
        int,
        option("Breaker: number of different failed requests that open it", ge=1, le=MOST_ERRORS),
    ] = 3
    window_ticks: Annotated[
        int, option("Breaker: time in which they count", unit="ticks", ge=1, le=3600)
    ] = 30
    hold_ticks: Annotated[
        int, option("Breaker: time that it stays open at first", unit="ticks", ge=1, le=3600)
    ] = 5
    longest_ticks: Annotated[
        int, option("Breaker: maximum time that it stays open", unit="ticks", ge=1, le=86_400)
    ] = 120
    probes: Annotated[
        int, option("Breaker: maximum requests at once while it is half open", ge=1, le=1000)
    ] = 1
    unjudged: Annotated[
        int,
        option(
            "Number of different failed requests on a worker after which a replica prefers others "
            "until the leader has decided (0: never)",
            ge=0,
            le=MOST_ERRORS,
        ),
    ] = 3
    unanswered: Annotated[
        int,
        option(
            "Number of requests without a first token, from which a replica prefers others to a "
            "worker whose last request failed (0: never)",
            ge=0,
            le=1000,
        ),
    ] = 2
    passes: Annotated[int, option("Breaker: successful probes that close it", ge=1, le=1000)] = 2
    share_percent: Annotated[
        int,
        option(
            "Maximum share of a model's workers that may be excluded by verdicts; beyond it, none is",
            unit="percent",
            ge=0,
            le=100,
        ),
    ] = 50
    slow_percent: Annotated[
        int,
        option(
            "Step time of a worker, relative to its class, from which it is a suspect (0: never)",
            unit="percent",
            ge=0,
            le=100_000,
        ),
    ] = 250
    dropped_ticks: Annotated[
        int,
        option(
            "Number of ticks with unreadable reports of an engine, from which its worker gets no "
            "requests (0: never)",
            unit="ticks",
            ge=0,
            le=MOST_ERRORS,
        ),
    ] = 3
    price_percent: Annotated[
        int,
        option(
            "Factor of the cost of a suspect worker in routing", unit="percent", ge=100, le=10_000
        ),
    ] = 200


SETTINGS = RecordedSettings("health.", HealthConfig)
settings_of, config_of = SETTINGS.recorded, SETTINGS.config_of
