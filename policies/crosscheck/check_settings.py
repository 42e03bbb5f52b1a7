"""Settings that decisions about cross-checks depend on. Recorded in the log."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated

from msgspec import Struct

from relume.events.settings.declared import option
from relume.events.settings.recorded import RecordedSettings

WHOLE_PPM = 1_000_000


class CrossCheckConfig(Struct, frozen=True, kw_only=True):
    """Which finished requests another engine answers again, and what differences amount to."""

    share_ppm: Annotated[
        int,
        option(
            "Share of finished requests that an idle engine answers again (0: none)",
            unit="millionths",
            ge=0,
            le=WHOLE_PPM,
        ),
    ] = 10_000
    budget_ppm: Annotated[
        int,
        option(
            "Maximum share of an engine's time for these answers, saved before each; disputes do not count",
            unit="millionths",
            ge=1,
            le=WHOLE_PPM,
        ),
    ] = 2_000
    tokens: Annotated[
        int,
        option("Maximum length of an answer that is compared", unit="tokens", ge=1, le=1_000_000),
    ] = 1_024
    confirm: Annotated[
        int,
        option(
            "Different requests in which a worker contradicts a majority of engines that quarantine it",
            ge=1,
            le=16,
        ),
    ] = 2


def is_drawn(request: str, share_ppm: int) -> bool:
    """Whether the request is one of the share."""
    draw = int.from_bytes(blake2b(request.encode(), digest_size=8, person=b"check").digest(), "big")
    return draw % WHOLE_PPM < share_ppm


SETTINGS = RecordedSettings("crosscheck.", CrossCheckConfig, CrossCheckConfig(share_ppm=0))
settings_of, config_of = SETTINGS.recorded, SETTINGS.config_of
