"""What the replica must remember of its open requests beyond the log."""

from __future__ import annotations

from relume.controlplane.stream.arrival import Arrival
from relume.policies.recovery.lineage import Lineage, engine_of


class LiveRequest:
    """One open request. `running`: its attempt is under way; `failure`: how the last attempt
    ended; `delivered`: the tokens delivered then. `envelopes`: holders that may have its
    envelope. `newest`: the last attempt that engines or holders know, which a former owner may not
    have written. `claimed_at`: position of our event that its client returned, 0 for none, and
    `claimed` the tokens which that client had. `found`: the last attempt of a former owner that was
    found by its engine's report. `lineage`: what its attempts left, by engine."""

    __slots__ = (
        "arrival",
        "attempt",
        "avoid",
        "claimed",
        "claimed_at",
        "delivered",
        "envelopes",
        "failure",
        "found",
        "incarnation",
        "lineage",
        "newest",
        "running",
        "worker",
    )

    def __init__(self, arrival: Arrival, is_adopted: bool = False) -> None:
        self.arrival = arrival
        self.attempt = self.newest = self.found = 0
        self.avoid: tuple[str, ...] = ()
        self.worker = ""
        self.incarnation = 0
        self.running = False
        self.failure = ""
        self.delivered = 0
        self.lineage = Lineage(is_adopted)
        self.claimed = self.claimed_at = 0
        self.envelopes: tuple[str, ...] = ()

    @property
    def engine(self) -> str:
        """That of the latest attempt."""
        return engine_of(self.worker, self.incarnation)

    def begin_attempt(self, number: int, worker: str, incarnation: int) -> None:
        """An attempt begins."""
        self.attempt, self.worker, self.incarnation = number, worker, incarnation
        self.running = True

    def lose_attempt(self) -> None:
        """The attempt is over: the next one gets a number that no attempt has."""
        self.running = False
        self.attempt = max(self.attempt, self.newest)


LiveRequests = dict[str, LiveRequest]
"""Open requests of this replica by name."""
