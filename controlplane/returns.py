"""Clients of resumable streams that come back: which replica serves them from then on.

A return is the replica's own event. At the replica that owns the request it is a fact and
nothing waits for it; at another one it asks for the request, and the place of the event in
the log decides who has it. A replica that sees another one take a request lets go of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import structlog

from relume.controlplane.gateway.ports import Arrival, Assignment
from relume.events import vocabulary as v
from relume.events.errors import LogError
from relume.policies import coverage

if TYPE_CHECKING:
    from relume.controlplane.scheduler import Scheduler

log = structlog.get_logger("relume.returns")


class Returns:
    """A part of `Scheduler`. `let_go` is called with a request that another replica took."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.let_go: Callable[[str], None] = lambda request: None

    def known(self, request: str) -> tuple[Arrival, str] | None:
        """A live stream that may be resumed: as it arrived, and the digest of its claim."""
        found = self._scheduler.view.fleet.requests.get(request)
        if found is None or not found.resumable or found.expired:
            return None
        arrival = Arrival(
            found.request,
            found.model,
            found.route,
            found.stream,
            found.prompt_tokens,
            found.max_tokens,
            found.verdict,
            tenant=found.tenant,
            client_id=found.client_id,
            resumable=found.resumable,
            grace_ticks=found.grace_ticks,
        )
        return arrival, found.resumable

    def came_back(self, request: str, tokens: int, events: int) -> None:
        """The client of one of our own streams is here again. Raises LogError."""
        live = self._scheduler.live[request]
        claim = self._scheduler.decision_id()
        event = v.ClientReturned(request, claim, live.attempt, tokens, events)
        live.claimed_at = self._scheduler.emit(event)

    def adopt(self, arrival: Arrival, tokens: int, events: int) -> Assignment | None:
        """Ask the log for another replica's stream. Returns where it runs; None where no
        attempt of it is known to. Raises LogError."""
        scheduler = self._scheduler
        live = scheduler.adopted(arrival)
        found = scheduler.view.fleet.requests.get(arrival.request)
        worker = None
        if found is not None:
            live.attempt, live.worker = found.attempt, found.worker
            live.incarnation = found.incarnation
            placed = scheduler.view.fleet.placed.get(arrival.request)
            live.envelopes = placed.holders if placed is not None else ()
            worker = scheduler.view.fleet.workers.get(found.worker)
        self.came_back(arrival.request, tokens, events)
        log.info(
            "stream_adopted", request=arrival.request, worker=live.worker,
            attempt=live.attempt, holders=live.envelopes, tokens=tokens,
        )  # fmt: skip
        live.running = True
        if worker is None or worker.incarnation != live.incarnation or worker.engine != "ready":
            if live.attempt:
                gone = "its engine was gone when its client came back"
                scheduler.observed(arrival.request, live.attempt, "engine_dead", tokens, gone)
            return None
        return Assignment(
            arrival.request,
            live.attempt,
            worker.name,
            worker.incarnation,
            worker.host,
            worker.port,
            "attach",
            b"",
        )

    def holders(self, request: str, worker: str = "") -> tuple[str, ...]:
        """State daemons that may have the envelope of an adopted request; with `worker`,
        where its engine reaches them."""
        live, fleet = self._scheduler.live.get(request), self._scheduler.view.fleet
        names = live.envelopes if live is not None else ()
        alive = [n for n in names if n in fleet.holders and fleet.holders[n].alive]
        if not worker:
            return tuple(alive)
        return tuple(e for n in alive if (e := coverage.endpoint(fleet, n, worker)))

    async def owned(self, request: str, timeout_s: float) -> bool:
        """Wait until the log holds our return; whether it made the request ours."""
        scheduler = self._scheduler
        try:
            async with asyncio.timeout(timeout_s):
                while (live := scheduler.live.get(request)) is not None:
                    if self._folded() >= live.claimed_at:
                        return self._ours(request)
                    await scheduler.changed()
        except TimeoutError:
            pass
        return False

    def seen(self, stream: str, position: int, event: Any) -> None:
        """Called with every event after it was folded."""
        if type(event) is not v.ClientReturned:
            return
        live = self._scheduler.live.get(event.request)
        if stream != self._scheduler.view.stream:
            # A return of ours that is still on its way will be the later one.
            pending = live is not None and live.claimed_at > self._folded()
            if live is not None and not pending and not self._ours(event.request):
                self.let_go(event.request)
        elif live is None and self._ours(event.request):
            self._end_unserved(event)

    def _end_unserved(self, event: v.ClientReturned) -> None:
        """Our return landed after we had given the client up: nobody else will end it."""
        verdict = self._scheduler.view.fleet.requests[event.request].verdict
        ended = v.RequestEnded(
            event.request, "failed", 0, -1, "error", event.attempt, verdict,
            detail="its client came back, and the log was too late",
        )  # fmt: skip
        try:
            self._scheduler.emit(ended)
        except LogError as error:
            log.error("end_not_written", reason=str(error), request=event.request)

    def _folded(self) -> int:
        head = self._scheduler.view.fleet.streams.get(self._scheduler.view.stream)
        return head.position if head is not None else 0

    def _ours(self, request: str) -> bool:
        found = self._scheduler.view.fleet.requests.get(request)
        return (
            found is not None
            and found.owner == self._scheduler.view.stream
            and found.boot == self._scheduler.boot
        )
