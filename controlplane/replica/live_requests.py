"""What the replica must remember of its open requests beyond the log."""

from __future__ import annotations

from relume.controlplane.stream.arrival import Arrival
from relume.policies.recovery.lineage import Lineage, engine_of
from relume.policies.state.account import key_of
from relume.policies.state.fleet import Fleet

HEAD_START_US = 250_000
"""Maximum time that queued requests stay back for attempts after a failure. Engines report a request
within milliseconds, or at the end of a long step."""


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


class Continuations:
    """Attempts after a failure that were sent, and that their engines have not reported yet. An engine
    serves its requests in the order in which they come, and connections keep no order between them:
    queued requests that are sent at once may come first."""

    def __init__(self) -> None:
        self._sent: LiveRequests = {}
        self._until_us = -1

    def sent(self, live: LiveRequest, now_us: int) -> None:
        """An attempt of `live` goes to its worker. Later ones do not extend the time."""
        if not self._sent:
            self._until_us = now_us + HEAD_START_US
        self._sent[live.arrival.request] = live

    def over(self, request: str) -> None:
        """The request ended, or left this replica."""
        self._sent.pop(request, None)

    def until_us(self, model: str, fleet: Fleet, now_us: int) -> int:
        """Time until which queued requests for `model` stay back at most; -1: they need not."""
        if now_us >= self._until_us:
            self._sent.clear()
        for request, live in list(self._sent.items()):
            if not live.running or _has_arrived(live, fleet):
                del self._sent[request]
        is_first = any(live.arrival.model == model for live in self._sent.values())
        return self._until_us if is_first else -1


def _has_arrived(live: LiveRequest, fleet: Fleet) -> bool:
    """Whether its engine reported the attempt, or is no more."""
    worker = fleet.workers.get(live.worker)
    if worker is None or worker.incarnation != live.incarnation:
        return True
    attempt = worker.attempts.get(key_of(live.arrival.request, live.attempt))
    return attempt is not None and attempt.queued
