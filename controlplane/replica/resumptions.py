"""Clients of resumable streams that come back: which replica serves them from then on.

A resumption is the replica's own event. At the replica that owns the request it is a fact and
nothing waits for it. At another one it claims the request, and the position of the event in the log
decides which replica owns it. A replica that sees another one claim a request releases it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import structlog

from relume.controlplane.replica.decision_writer import DecisionWriter
from relume.controlplane.replica.former_log.former_streams import FormerStreams
from relume.controlplane.replica.live_requests import LiveRequest, LiveRequests
from relume.controlplane.stream.arrival import Arrival, Assignment, arrived_event
from relume.controlplane.stream.stream_events import Owned
from relume.events import vocabulary as v
from relume.events.log.errors import LogError
from relume.events.vocabulary.enums import (
    AttemptMode,
    EnginePhase,
    Guarantee,
    RequestOutcome,
    TransportKind,
)
from relume.policies.health.health_life import is_quarantined
from relume.policies.state import coverage
from relume.policies.state.fleet import Fleet
from relume.policies.state.lifecycles.stream_resumption import later_attempts, newest_attempt

log = structlog.get_logger("relume.returns")

UNSERVED_TICKS = 20
"""For how long another replica may report the end of a stream that is ours and has no client here:
what it wrote while the log was away lands when ours does."""

BEHIND_S = 2.0
"""Time without anything new in the log, which has a tick each second, after which this replica may lack
streams of others."""

SETTLED_S = 5.0
"""Time after the log came back, or this replica began, within which others write what they held back
meanwhile."""


class RecordFailure(Protocol):
    """Records that an attempt failed (`SchedulerPort.observed`)."""

    def __call__(
        self, request: str, attempt: int, kind: TransportKind, delivered: int, detail: str = ""
    ) -> None: ...


class StreamResumptions:
    """Resumes streams of this replica and adopts those of others. `observed` records a failed
    attempt, `changed` waits until the fold advances. `let_go` is called with a request that
    another replica took; `is_absent` says whether a stream is here and its client is not."""

    def __init__(
        self,
        decisions: DecisionWriter,
        live: LiveRequests,
        observed: RecordFailure,
        changed: Callable[[], Awaitable[None]],
        microseconds: Callable[[], int],
    ) -> None:
        self.former = FormerStreams(decisions)
        self._decisions = decisions
        self._live = live
        self._observed = observed
        self._changed = changed
        self._microseconds = microseconds
        self._advanced_us = microseconds()
        self._settled_us = self._advanced_us + SETTLED_S * 1e6
        self._unserved: dict[str, int] = {}
        self._ending: dict[str, tuple[int, v.ClientReturned]] = {}
        self._sent_late: dict[str, v.RouteDecided] = {}
        """Of streams of ours, the last dispatch that another replica wrote after it had lost them."""
        self.let_go: Callable[[str], None] = lambda request: None
        self.is_absent: Callable[[str], bool] = lambda request: False

    def advanced(self) -> None:
        """The fold advanced."""
        now_us = self._microseconds()
        if now_us - self._advanced_us > BEHIND_S * 1e6:
            self._settled_us = now_us + SETTLED_S * 1e6
        self._advanced_us = now_us

    @property
    def is_behind(self) -> bool:
        """Whether there may be streams that are not known here: nothing new came from the log, as when
        it is away, or after this process stood still; or that was so a moment ago, and others may not
        have written yet what they held back."""
        now_us = self._microseconds()
        return now_us < self._settled_us or now_us - self._advanced_us > BEHIND_S * 1e6

    def known(self, request: str) -> tuple[Arrival, str] | None:
        """A live stream that may be resumed: as it arrived, and the digest of its claim. It may have
        arrived in a former log."""
        found = self._decisions.view.fleet.requests.get(request)
        if found is None:
            former = self.former.known(request)
            return (former.arrival, former.arrival.resumable) if former is not None else None
        if not found.resumable or found.expired:
            return None
        arrival = Arrival(
            request=found.request,
            model=found.model,
            route=found.route,
            stream=found.stream,
            prompt_tokens=found.prompt_tokens,
            max_tokens=found.max_tokens,
            verdict=found.verdict,
            tenant=found.tenant,
            client_id=found.client_id,
            resumable=found.resumable,
            grace_ticks=found.grace_ticks,
            log=self._decisions.log_id,
        )
        return arrival, found.resumable

    def is_sought(self, request: str) -> bool:
        """Whether an engine is requested to say what it has of a stream that the log does not name."""
        return self.former.is_sought(request)

    def is_moving(self, request: str) -> bool:
        """Whether another replica, which serves, has the stream without an engine, and it alone has what
        it takes to continue it: what was sampled without a seed is generated by nobody else."""
        fleet = self._decisions.view.fleet
        found = fleet.requests.get(request)
        if found is None or found.owner == self._decisions.view.stream:
            return False
        owner = fleet.replicas.get(found.owner.removeprefix("r."))
        if owner is None or not owner.alive or owner.boot != found.boot:
            return False
        is_lost = bool(found.worker) and not _serves(fleet, found.worker, found.incarnation)
        return is_lost and found.verdict == Guarantee.SAMPLED

    def came_back(self, request: str, tokens: int, events: int) -> None:
        """The client of one of our own streams is here again. Raises LogError."""
        live = self._live[request]
        claim = self._decisions.decision_id()
        event = v.ClientReturned(
            request=request, claim=claim, attempt=live.attempt, tokens=tokens, events=events
        )
        live.claimed_at, live.claimed = self._decisions.emit(event), tokens

    def adopt(self, arrival: Arrival, tokens: int, events: int) -> None:
        """Claim another replica's stream through the log. `owned` tells where it runs: the other
        replica continues until our claim has its place in the log. One of a former log arrives in this
        one now. Raises LogError."""
        self._ending.pop(arrival.request, None)
        live = LiveRequest(arrival, is_adopted=True)
        former = self.former.take(arrival.request)
        if former is not None and arrival.request not in self._decisions.view.fleet.requests:
            self._decisions.emit(arrived_event(arrival))
            live.begin_attempt(former.attempt, former.worker, former.incarnation)
        self._live[arrival.request] = live
        self._look_up(live)
        self.came_back(arrival.request, tokens, events)
        log.info(
            "stream_adopted", request=arrival.request, worker=live.worker,
            attempt=live.attempt, holders=live.envelopes, tokens=tokens,
        )  # fmt: skip
        live.running = True

    def _look_up(self, live: LiveRequest) -> None:
        """What the log says of it so far."""
        fleet, name = self._decisions.view.fleet, live.arrival.request
        found = fleet.requests.get(name)
        if found is not None and (found.attempt or not live.attempt):
            live.attempt, live.worker = found.attempt, found.worker
            live.incarnation = found.incarnation
            placed = fleet.placed.get(name)
            live.envelopes = placed.holders if placed is not None else ()

    def _where(self, live: LiveRequest) -> Assignment | None:
        """The attempt, if its engine is there."""
        fleet = self._decisions.view.fleet
        if not _serves(fleet, live.worker, live.incarnation):
            return None
        worker = fleet.workers[live.worker]
        return Assignment(
            request=live.arrival.request,
            attempt=live.attempt,
            worker=worker.name,
            incarnation=worker.incarnation,
            host=worker.host,
            port=worker.port,
            mode=AttemptMode.ATTACH,
            dispatch=b"",
        )

    def _is_doubted(self, live: LiveRequest) -> bool:
        """Whether an attempt of a former owner ran on a worker that computes wrong results."""
        found = self._decisions.view.fleet.requests.get(live.arrival.request)
        return found is not None and found.doubted is True

    def holders(self, request: str, worker: str = "") -> tuple[str, ...]:
        """State daemons that may have the envelope of an adopted request, chosen or, if the choice is not
        in the log, with blocks of it; with `worker`, where its engine reaches them."""
        live, fleet = self._live.get(request), self._decisions.view.fleet
        names = list(live.envelopes) if live is not None else []
        if live is not None:
            covers = (site.name for site in fleet.holders.values() if request in site.covered)
            names += [name for name in covers if name not in names]
        alive = [n for n in names if n in fleet.holders and fleet.holders[n].alive]
        if not worker:
            return tuple(alive)
        return tuple(e for n in alive if (e := coverage.endpoint(fleet, n, worker)))

    async def owned(self, request: str, timeout_s: float) -> Owned:
        """Wait until the log holds our return."""
        try:
            async with asyncio.timeout(timeout_s):
                while (live := self._live.get(request)) is not None:
                    if self._folded() >= live.claimed_at:
                        return self._taken(live) if self._ours(request) else Owned(False)
                    await self._changed()
        except TimeoutError:
            return Owned(False, late=True)
        return Owned(False)

    async def later_attempt(self, request: str, timeout_s: float) -> Owned:
        """Wait for an attempt of a stream of ours which a former owner sent and did not write before
        it died, or before we took the stream: its engine reports it, or that one writes it late."""
        try:
            async with asyncio.timeout(timeout_s):
                while (live := self._live.get(request)) is not None:
                    if (left := self._later(live)) is not None:
                        return Owned(True, left, self._is_doubted(live))
                    await self._changed()
        except TimeoutError:
            return Owned(True)
        return Owned(False)

    def _later(self, live: LiveRequest) -> Assignment | None:
        fleet, name = self._decisions.view.fleet, live.arrival.request
        written = fleet.requests[name].attempt if name in fleet.requests else live.attempt
        tried = max(written, live.found)
        later = [(n, w.name, w.incarnation) for n, w in later_attempts(fleet, name, tried)]
        sent = self._sent_late.get(name)  # its engine may have finished it meanwhile
        if sent is not None and sent.attempt > tried:
            later.append((sent.attempt, sent.worker, sent.incarnation))
        if not later:
            return None
        live.found, worker, incarnation = max(later)
        live.newest = max(live.newest, live.found)
        live.begin_attempt(live.found, worker, incarnation)
        log.info("attempt_found", request=name, worker=worker, attempt=live.found)
        return self._where(live)

    def _taken(self, live: LiveRequest) -> Owned:
        self._look_up(live)
        left, is_doubted = self._where(live), self._is_doubted(live)
        fleet, request = self._decisions.view.fleet, live.arrival.request
        live.newest = newest_attempt(fleet, request, live.attempt)
        if left is None or is_doubted:
            if live.attempt:
                gone = "its engine was gone when its client came back"
                kind = TransportKind.ENGINE_DEAD
                if is_doubted:
                    gone = "a worker that computes wrong results had it"
                    kind = self._why_left(live)
                self._observed(request, live.attempt, kind, live.claimed, gone)
            live.lose_attempt()
        return Owned(True, left, is_doubted)

    def _why_left(self, live: LiveRequest) -> TransportKind:
        """The worker where a doubted stream runs is to blame only if it is the corrupt one."""
        is_corrupt = is_quarantined(self._decisions.view.fleet.workers.get(live.worker))
        return TransportKind.CORRUPT if is_corrupt else TransportKind.MOVED

    def left_unserved(self, live: LiveRequest) -> None:
        """We let go of a request, perhaps before our event that its client returned has landed."""
        if live.claimed_at > self._folded():
            self._unserved[live.arrival.request] = live.claimed_at

    def seen(self, stream: str, position: int, event: Any) -> None:
        """Called with every event after it was folded."""
        kind = type(event)
        if kind is v.ClientReturned:
            self._seen_return(stream, position, event)
        elif kind is v.RouteDecided:
            if stream != self._decisions.view.stream and event.worker:
                self._seen_dispatch(event)
        elif kind is v.RequestEnded:
            if event.request not in self._decisions.view.fleet.requests:
                self._sent_late.pop(event.request, None)
                self._leave_ended(stream, event.request)
            if stream != self._decisions.view.stream and event.outcome == RequestOutcome.COMPLETED:
                self._seen_end(event)
        elif kind is v.Tick and self._ending:
            self._end_overdue()

    def _seen_return(self, stream: str, position: int, event: v.ClientReturned) -> None:
        live = self._live.get(event.request)
        if stream != self._decisions.view.stream:
            if not self._ours(event.request):
                self._ending.pop(event.request, None)
            # A return of ours that is still on its way will be the later one.
            pending = live is not None and live.claimed_at > self._folded()
            if live is not None and not pending and not self._ours(event.request):
                self.let_go(event.request)
                live.running = False
        elif position >= self._unserved.get(event.request, position + 1):
            del self._unserved[event.request]
            if live is None and self._ours(event.request):
                until = self._decisions.view.fleet.tick + UNSERVED_TICKS
                self._ending[event.request] = (until, event)
        elif live is not None and position >= live.claimed_at and not self._ours(event.request):
            if self.is_absent(event.request):  # another replica ended it before our event landed
                self.let_go(event.request)
                live.running = False

    def _seen_dispatch(self, event: v.RouteDecided) -> None:
        """Another replica sent a stream on: one that is ours, or one that our return has yet to take."""
        if self._ours(event.request):
            self._sent_late[event.request] = event
        elif (live := self._live.get(event.request)) is not None:
            live.newest = max(live.newest, event.attempt)

    def _leave_ended(self, stream: str, request: str) -> None:
        """The stream has ended. A return of ours that is still on its way comes too late: without its
        client, nothing is to be sent to a worker any more."""
        live = self._live.get(request)
        if stream == self._decisions.view.stream or live is None:
            return
        if live.claimed_at > self._folded() and self.is_absent(request):
            self.let_go(request)
            live.running = False

    def _seen_end(self, event: v.RequestEnded) -> None:
        """Another replica gave a stream of ours all that its client lacked, before it knew of our
        claim: the end is as it says."""
        if not self._ours(event.request):
            return
        if event.request in self._live:
            if self.is_absent(event.request):
                is_written = self._emit_end(event)
                self.let_go(event.request)
                if is_written:  # behind our return, if that is still on its way
                    self._unserved.pop(event.request, None)
        elif self._ending.pop(event.request, None) is not None:
            self._emit_end(event)

    def _end_overdue(self) -> None:
        tick = self._decisions.view.fleet.tick
        for request, (until, event) in list(self._ending.items()):
            if tick >= until:
                del self._ending[request]
                if request not in self._live and self._ours(request):
                    self._end_unserved(event)

    def _end_unserved(self, event: v.ClientReturned) -> None:
        """Our claim landed after we had given the client up: no other replica will end it."""
        verdict = self._decisions.view.fleet.requests[event.request].verdict
        ended = v.RequestEnded(
            request=event.request,
            outcome=RequestOutcome.FAILED,
            status=0,
            tokens=-1,
            finish="error",
            attempts=event.attempt,
            verdict=verdict,
            detail="its client came back, and the log was too late",
        )
        self._emit_end(ended)

    def _emit_end(self, ended: v.RequestEnded) -> bool:
        try:
            self._decisions.emit(ended)
        except LogError as error:
            log.error("end_not_written", reason=str(error), request=ended.request)
            return False
        return True

    def _folded(self) -> int:
        head = self._decisions.view.fleet.streams.get(self._decisions.view.stream)
        return head.position if head is not None else 0

    def _ours(self, request: str) -> bool:
        found = self._decisions.view.fleet.requests.get(request)
        return (
            found is not None
            and found.owner == self._decisions.view.stream
            and found.boot == self._decisions.boot
        )


def _serves(fleet: Fleet, name: str, incarnation: int) -> bool:
    """Whether that engine does."""
    worker = fleet.workers.get(name)
    if worker is None or worker.incarnation != incarnation:
        return False
    return worker.engine == EnginePhase.READY
