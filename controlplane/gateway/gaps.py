"""Where the time of a failover went, as the gateway saw it.

Times are seconds of the gateway's monotonic clock, which is CLOCK_MONOTONIC: a bench on
the same machine can set them beside the moment it killed something.
"""

from __future__ import annotations

import structlog
from msgspec import Struct

log = structlog.get_logger("relume.failover")


class Failover(Struct):
    """One attempt lost and the next one found; 0 means not reached yet."""

    kind: str
    noticed: float
    decided: float = 0.0
    sent: float = 0.0

    def over(self, about: dict[str, str], now: float) -> None:
        """The first new token is here: say how it went, and of which request (`about`)."""
        log.info(
            "failover",
            kind=self.kind,
            noticed=self.noticed,
            decided=self.decided,
            sent=self.sent,
            resumed=now,
            **about,
        )
