"""Measured and predicted TTFT, on the clock of the replica that sent the request: its decision says
when it began, its receipts when it learned of the token."""

from __future__ import annotations

from msgspec import Struct, field

from relume.events import vocabulary as v
from relume.policies.state.fleet import Receipts
from relume.policies.state.overlay import receive_clock


class FirstTokens(Struct):
    """Of one request. `after_us`: of each attempt, from its decision to its first token."""

    after_us: dict[int, int] = field(default_factory=dict)
    _decided: dict[int, tuple[str, int]] = field(default_factory=dict)
    _revisions: dict[int, int] = field(default_factory=dict)
    _received: dict[str, Receipts] = field(default_factory=dict)

    def decided(self, stream: str, event: v.RouteDecided) -> None:
        """An attempt was sent by the replica of `stream`."""
        if event.worker and event.at_us >= 0:
            self._decided[event.attempt] = stream, event.at_us
            self._settle(event.attempt)

    def reported(self, revision: int, change: v.FirstToken) -> None:
        """Its engine reported the first token in this revision."""
        if change.attempt not in self._revisions:
            self._revisions[change.attempt] = revision
            self._settle(change.attempt)

    def received(self, stream: str, event: v.GroupsReceived | v.ReplicaStarted) -> None:
        """What a replica received, and when; another life of it has another clock."""
        if isinstance(event, v.ReplicaStarted):
            self._received[stream] = Receipts()
            return
        receive_clock.take(self._received.setdefault(stream, Receipts()), event)
        for attempt in self._revisions:
            self._settle(attempt)

    def _settle(self, attempt: int) -> None:
        if (
            attempt in self.after_us
            or attempt not in self._revisions
            or attempt not in self._decided
        ):
            return
        stream, decided_us = self._decided[attempt]
        known, revision = self._received.get(stream), self._revisions[attempt]
        if known is not None and known.revisions and known.revisions[-1] >= revision:
            if known.revisions[0] <= revision:
                self.after_us[attempt] = receive_clock.received_us(known, revision) - decided_us
