"""The resumable streams of one gateway: begun, taken up again, let go of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from relume.controlplane.gateway import event_ids
from relume.controlplane.gateway.config import ResumeConfig
from relume.controlplane.gateway.context import ClientPort, Context
from relume.controlplane.gateway.deliveries import Deliveries
from relume.controlplane.gateway.ports import Arrival
from relume.controlplane.gateway.reading import Request
from relume.controlplane.gateway.releases import Releases
from relume.controlplane.gateway.replies import Reply
from relume.controlplane.gateway.resumable import Resumable, gone


class Streams:
    """`open`: by request. `deliveries`: those of them that are on their last way. `wall_clock`
    gives unix seconds."""

    def __init__(self, config: ResumeConfig, wall_clock: Callable[[], float]) -> None:
        self.open: dict[str, Resumable] = {}
        self.deliveries = Deliveries()
        self.releases = Releases()
        self._config = config
        self._wall_clock = wall_clock

    def new(
        self, context: Context, connection: ClientPort, arrival: Arrival, *at: Any
    ) -> Resumable:
        """An exchange for a stream that may be resumed; `at` as of `Exchange`."""
        self.deliveries.asked(connection)
        claim = event_ids.new_claim()
        arrival = msgspec.structs.replace(
            arrival, resumable=event_ids.digest(claim), grace_ticks=self._config.grace_ticks
        )
        return Resumable(
            context, connection, arrival, *at,
            claim=claim, created=str(int(self._wall_clock())), streams=self,
        )  # fmt: skip

    def returned(
        self,
        context: Context,
        connection: ClientPort,
        shown: event_ids.EventId,
        request: Request,
        tenant: str,
    ) -> Reply | Resumable:
        """A client comes back to its stream, which may have been another replica's. Raises
        LogError."""
        exchange = self.open.get(shown.request)
        if exchange is not None:
            if not exchange.holds(shown.claim, tenant):
                return gone("no such stream")
            exchange.came_back(connection, shown.position)
            return exchange
        known = context.scheduler.returns.known(shown.request)
        if (
            known is None
            or not event_ids.proves(shown.claim, known[1])
            or known[0].tenant != tenant
        ):
            return gone("no such stream, or it has ended")
        exchange = Resumable(
            context, connection, known[0], request.path, request.request_id, b"",
            claim=shown.claim, created="", streams=self,
        )  # fmt: skip
        exchange.take_over(shown.position)
        return exchange

    def expire(self, now: float) -> None:
        """End those whose clients stayed away too long."""
        for exchange in [e for e in self.open.values() if now > e.detached_until]:
            exchange.expire()

    def let_go(self, whose: Callable[[Resumable], bool]) -> None:
        """Leave streams to whichever replica their clients come to."""
        for exchange in [e for e in self.open.values() if whose(e)]:
            exchange.let_go()

    def away_on(self, worker: str, incarnation: int) -> dict[str, int]:
        """See GatewayPort."""
        away = (e for e in self.open.values() if e.away_on(worker, incarnation))
        return {e.arrival.request: e.delivered for e in away}

    def given_up(self, request: str, attempt: int) -> None:
        """See GatewayPort."""
        if (exchange := self.open.get(request)) is not None:
            exchange.given_up(attempt)
