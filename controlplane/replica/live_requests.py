"""What the replica must remember of its open requests beyond the log."""

from __future__ import annotations

from collections.abc import Container

from relume.controlplane.stream.arrival import Arrival


class LiveRequest:
    """One open request. `running`: its attempt is under way; `failure`: how the last attempt
    ended; `delivered`: the tokens delivered then. `envelopes`: holders that may have its
    envelope. `newest`: the last attempt that engines or holders know, which a former owner may not
    have written. `claimed_at`: position of our event that its client returned, 0 for none, and
    `claimed` the tokens which that client had. `served`: engines (`worker:incarnation`) whose
    earlier attempts brought tokens; `had`: the tokens delivered before the present one. `doubted`:
    a former owner's attempts ran on a worker that computes wrong results."""

    __slots__ = (
        "arrival",
        "attempt",
        "avoid",
        "claimed",
        "claimed_at",
        "delivered",
        "doubted",
        "envelopes",
        "failure",
        "had",
        "incarnation",
        "newest",
        "running",
        "served",
        "worker",
    )

    def __init__(self, arrival: Arrival) -> None:
        self.arrival = arrival
        self.attempt = self.newest = 0
        self.avoid: tuple[str, ...] = ()
        self.worker = ""
        self.incarnation = 0
        self.running = False
        self.failure = ""
        self.delivered = self.had = 0
        self.served: tuple[str, ...] = ()
        self.doubted = False
        self.claimed = self.claimed_at = 0
        self.envelopes: tuple[str, ...] = ()

    @property
    def engine(self) -> str:
        """That of the latest attempt."""
        return f"{self.worker}:{self.incarnation}"

    def begin_attempt(self, number: int, worker: str, incarnation: int) -> None:
        """An attempt begins after the tokens delivered so far."""
        self.attempt, self.worker, self.incarnation = number, worker, incarnation
        self.running, self.had = True, self.delivered

    def note_served(self, delivered: int) -> None:
        """The attempt ended after `delivered` tokens in all."""
        if delivered > self.had and self.engine not in self.served:
            self.served = (*self.served, self.engine)

    def is_doubted(self, corrupt: Container[str]) -> bool:
        """Whether a corrupt engine served it."""
        return self.doubted or any(engine in corrupt for engine in self.served)

    def lose_attempt(self) -> None:
        """The attempt is over: the next one gets a number that no attempt has."""
        self.running = False
        self.attempt = max(self.attempt, self.newest)


LiveRequests = dict[str, LiveRequest]
"""Open requests of this replica by name."""
