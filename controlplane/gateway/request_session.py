"""A request's session: the stream machine (`relume.controlplane.stream`), and the shell around it.

The shell feeds in what sockets, timers, scheduler and client say, and carries out the effects. It
decides nothing. Everything happens in callbacks of the loop; only counting, connecting and waiting
are tasks.
"""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Protocol

import structlog

from relume.controlplane.gateway.client_effects import NO_CLIENT, TO_CLIENT
from relume.controlplane.gateway.context import ClientPort, Context
from relume.controlplane.gateway.deliveries import Deliveries
from relume.controlplane.gateway.errors import UpstreamError
from relume.controlplane.gateway.http import routes
from relume.controlplane.gateway.http.upstream import Upstream
from relume.controlplane.gateway.log_effects import TO_LOG, about, record_end
from relume.controlplane.gateway.releases import Releases, release
from relume.controlplane.gateway.scheduler_effects import TO_SCHEDULER
from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream.arrival import Arrival, Assignment, Rejected
from relume.controlplane.stream.handlers.endings import left_of
from relume.controlplane.stream.machine import StreamMachine
from relume.controlplane.stream.stream_data import NEVER, Stream
from relume.controlplane.stream.stream_states import Delivering, Queued
from relume.controlplane.stream.worker_requests import resume_claim
from relume.events.failpoints import failpoint_client
from relume.events.failpoints.points import Failpoint
from relume.events.vocabulary.enums import TransportKind

log = structlog.get_logger("relume.gateway")

OWNED_S = 10.0
"""Maximum time that a client's resumption at another replica waits for the log to record it."""
LATER_ATTEMPT_S = 3.0
"""Maximum time that a stream of a former owner, which nobody can generate again, waits for the report
of an engine that runs it: agents report within a second, and one that died is back within two."""


class ResumableStreams(Protocol):
    """Offered by `streams.Streams`."""

    open: dict[str, RequestSession]
    deliveries: Deliveries
    releases: Releases


class RequestSession:
    """One request from arrival to its terminal event.

    `delivering`: the connection on which its last bytes are. `streams`: the gateway's resumable
    streams, for one of them.
    """

    __slots__ = (
        "_handed_over",
        "_open_to",
        "_task",
        "_timer",
        "client",
        "ctx",
        "delivering",
        "machine",
        "paused",
        "stream",
        "streams",
        "upstream",
    )

    def __init__(
        self,
        ctx: Context,
        client: ClientPort,
        stream: Stream,
        streams: ResumableStreams | None = None,
    ) -> None:
        self.ctx = ctx
        self.client = client
        self.stream = stream
        self.machine = StreamMachine(stream)
        self.streams = streams
        self.upstream: Upstream | None = None
        self.delivering: ClientPort | None = None
        self.paused = False
        self._handed_over = 0
        """The attempt that its engine handed over, as far as its answer has not said so."""
        self._open_to: Assignment | None = None
        self._task: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def arrival(self) -> Arrival:
        """The request as it arrived."""
        return self.stream.arrival

    @property
    def delivered(self) -> int:
        """Tokens that the client has, or that are held of an answer in one piece."""
        return self.stream.delivered

    def about(self) -> dict[str, str]:
        """What log lines of this request carry."""
        return about(self.arrival)

    # --- life

    def start(self) -> None:
        """Accept the request, at once or when its prompt was counted. Raises LogError."""
        ctx, counts = self.ctx, self.ctx.tokens is not None and self.arrival.countable
        accepted = None if counts else ctx.scheduler.arrived(self.arrival)
        if self.streams is not None:
            self.streams.open[self.arrival.request] = self
        ctx.counters.requests += 1
        ctx.counters.in_flight += 1
        if accepted is None:
            self._spawn(self._count)
        else:
            self.feed_safely(e.Accepted(accepted))

    def take_over(self, have: e.Position) -> None:
        """The client of another replica's stream came here, with everything up to `have`. Raises
        LogError."""
        self.ctx.scheduler.returns.adopt(self.arrival, *have)
        assert self.streams is not None
        self.streams.open[self.arrival.request] = self
        self.ctx.counters.in_flight += 1
        self.feed_safely(e.Adopted(have))

    def came_back(self, client: ClientPort, have: e.Position) -> None:
        """The client is here again, with everything up to `have`. Raises LogError."""
        self.ctx.scheduler.returns.came_back(self.arrival.request, *have)
        old, self.client = self.client, client
        self.delivering = None
        old.break_off()
        self.feed_safely(e.ClientReturned(have))

    def holds(self, resume_token: str, tenant: str) -> bool:
        """Whether a client that shows `resume_token` may have this stream."""
        stream = self.stream
        same = hmac.compare_digest(resume_token.encode(), stream.resume_token.encode())
        may = same and tenant == self.arrival.tenant and stream.is_resumable
        return may and self.machine.accepts(e.ClientReturned)

    def feed(self, event: object, now: float | None = None) -> None:
        """Feed the machine, and carry out its effects."""
        self._carry_out(self.machine.handle(event, self.ctx.clock() if now is None else now))

    def _passing(self, effects: list[do.Effect]) -> Iterator[do.Effect]:
        """The effects, each behind its failpoint."""
        for effect in effects:
            failpoint_client.reach(
                Failpoint.STREAM_EFFECT,
                request=self.arrival.request,
                effect=type(effect).__name__,
            )
            yield effect

    def _carry_out(self, effects: list[do.Effect]) -> None:
        for effect in self._passing(effects) if failpoint_client.active else effects:
            kind = type(effect)
            if (carry_out := _CARRY_OUT.get(kind)) is not None:
                carry_out(self, effect)
            elif (tell_client := TO_CLIENT.get(kind)) is not None:
                tell_client(self.client, effect)
            elif (ask := TO_SCHEDULER.get(kind)) is not None:
                self.feed(ask(self.ctx, self.stream, self, effect))
            else:
                TO_LOG[kind](self.ctx, self.stream, effect)

    def feed_safely(self, event: object) -> None:
        """The same at the edge of one request: others must not suffer from its bug."""
        try:
            self.feed(event)
        except Exception as error:  # the edge of one request
            self.on_fault(error)

    def on_fault(self, error: Exception) -> None:
        """Our own code failed on this request: it ends, and the worker is not blamed."""
        log.error("request_broke", exc_info=error, **self.about())
        try:
            if not self.machine.is_over:
                self.feed(e.Fault())
                return
        except Exception:
            log.exception("request_could_not_be_ended", **self.about())
            if not self.machine.is_over:
                self._carry_out(self.machine.give_up())
        self.client.break_off()

    # --- http.upstream.Consumer

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        self.feed(e.Head(status, headers))

    def take_chunk(self, data: bytes, now: float) -> bool:
        client = self.client
        if not client.chunked:
            return False
        chunk = self.machine.state.take(data, now)
        if chunk is None:
            return False
        client.write_chunk(chunk)
        return True

    def on_data(self, data: bytes) -> None:
        upstream = self.upstream
        self.feed(e.Data(data), upstream.heard if upstream is not None else None)

    def on_complete(self) -> None:
        self.feed(e.ResponseEnded())

    def on_lost(self, kind: str, detail: str) -> None:
        upstream, self.upstream = self.upstream, None
        idle = upstream is not None and upstream.reused and upstream.untouched
        self.feed(e.ConnectionLost(TransportKind(kind), detail, idle))

    # --- http.server.ActiveExchange

    def client_gone(self) -> None:
        """The client closed its connection."""
        self.feed_safely(e.ClientGone())
        left = self.machine.placeable
        if left is not None and left.attempt == self._handed_over:
            self.feed_safely(e.HandoverNoticed())

    def pause(self) -> None:
        """The client reads too slowly."""
        self.paused = True
        if self.upstream is not None:
            self.upstream.pause()

    def resume(self) -> None:
        """The client caught up."""
        self.paused = False
        if self.upstream is not None:
            self.upstream.resume()

    # --- ports.Caller

    def called(self) -> bool:
        """See ports.Caller."""
        self.feed_safely(e.Called())
        return type(self.machine.state) is not Queued

    def refused(self, why: Rejected) -> None:
        """See ports.Caller."""
        self.feed_safely(why)

    # --- calls of the gateway

    @property
    def is_taken(self) -> bool:
        """Whether another replica owns the stream, of which the last bytes are on their way here."""
        state = self.machine.state
        return isinstance(state, Delivering) and state.is_taken

    @property
    def is_movable(self) -> bool:
        """Whether the attempt may be handed over now: it runs, and can resume elsewhere."""
        return self.upstream is not None and self.machine.is_movable

    @property
    def attempt(self) -> int:
        """Number of the attempt under way; 0: none."""
        to = self.machine.attempt
        return to.attempt if to is not None else 0

    def silence_began(self, before: float) -> float:
        """Time of the last byte, if that is before `before`, a token is due and the stream can
        resume elsewhere; else NEVER."""
        upstream = self.upstream
        if upstream is None or upstream.heard >= before or self.paused:
            return NEVER
        return upstream.heard if self.machine.owes_token else NEVER

    @property
    def withholds(self) -> bool:
        """Whether the attempt may send nothing before its engine is done, and can resume elsewhere."""
        return self.upstream is not None and not self.paused and self.machine.withholds

    def worker_lost(self, cause: str, detail: str = "") -> None:
        """Another part gave the engine up, or knows that it is dead."""
        if self.machine.accepts(e.EngineGivenUp):
            self.feed_safely(e.EngineGivenUp(TransportKind(cause), detail))

    def left_on(self, worker: str, incarnation: int) -> bool:
        """Whether the attempt there runs for an absent client."""
        left = left_of(self.machine.state)
        return left is not None and (left.worker, left.incarnation) == (worker, incarnation)

    def doubted(self, detail: str) -> None:
        """A worker that had the request before computes wrong results."""
        if self.machine.accepts(e.TokensDoubted):
            self.feed_safely(e.TokensDoubted(detail))

    def runs_unattended_on(self, worker: str, incarnation: int) -> bool:
        """Whether the attempt there runs for an absent client, and can resume after what that
        client has."""
        left = self.machine.placeable
        return left is not None and (left.worker, left.incarnation) == (worker, incarnation)

    def handover_noticed(self, attempt: int) -> None:
        """The engine handed that attempt over. Its client may be absent, or leave before the answer
        says so."""
        to = self.machine.placeable or self.machine.attempt
        if to is None or to.attempt != attempt:
            return
        if self.machine.accepts(e.HandoverNoticed):
            self.feed_safely(e.HandoverNoticed())
        else:
            self._handed_over = attempt

    def expire(self) -> None:
        """The client did not come back."""
        self.feed_safely(e.GraceOver())

    def let_go(self) -> None:
        """Another replica owns the request, or none does."""
        self.feed_safely(e.TakenOver())

    def shut_down(self) -> None:
        """The gateway stops."""
        self.feed_safely(e.ShutDown())

    def arrived_whole(self) -> None:
        """The client has all of it."""
        if self.delivering is not None:
            self.delivering = None
            self.feed_safely(e.Delivered())

    # --- tasks

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        self._task = self.ctx.spawn(self._guarded(work, *args))

    async def _guarded(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Run a task of this request."""
        try:
            await work(*args)
        except Exception as error:  # the edge of one request: all others share the task group
            self.on_fault(error)

    async def _count(self) -> None:
        """Count the prompt within the bound."""
        tokens, stream = self.ctx.tokens, self.stream
        assert tokens is not None
        model = self.arrival.model
        block_tokens = self.ctx.scheduler.block_tokens(model)
        is_chat = routes.PROTECTED[stream.path].is_chat
        found = await tokens.count(model, is_chat, block_tokens, stream.body)
        self.feed(e.Counted() if found is None else e.Counted(found.tokens, found.prefix))

    async def _connect(self, to: Assignment) -> None:
        try:
            upstream = await self.ctx.pool.open(to)
        except UpstreamError as error:
            if self._open_to is to and self.upstream is None:
                self.feed(e.ConnectFailed(TransportKind(error.kind), error.detail))
            return
        if self._open_to is to and self.upstream is None:
            self._connected(to, upstream)
        else:
            self.ctx.pool.give_back(upstream)

    async def _await_capacity(self, timeout_s: float) -> None:
        try:
            async with asyncio.timeout(timeout_s + 1):
                found = await self.ctx.scheduler.capacity(self.arrival.request, timeout_s)
        except TimeoutError:
            found = False
        self.feed(e.CapacityKnown(found))

    async def _until_owned(self) -> None:
        """The request is ours once the log says so."""
        self.feed(await self.ctx.scheduler.returns.owned(self.arrival.request, OWNED_S))

    async def _until_found(self) -> None:
        """Its engine reports an attempt that a former owner sent, if there is one."""
        returns = self.ctx.scheduler.returns
        self.feed(await returns.later_attempt(self.arrival.request, LATER_ATTEMPT_S))

    def _timer_fired(self) -> None:
        self._timer = None
        self._strike_out()
        self.feed_safely(e.TimerFired())

    # --- effects: the control plane

    def _start_waiting(self, effect: do.AwaitCapacity) -> None:
        if not effect.again:
            self.ctx.counters.waits += 1
        self._spawn(self._await_capacity, effect.timeout_s)

    def _await_ownership(self, effect: do.AwaitOwnership) -> None:
        self.ctx.spawn(self._guarded(self._until_owned))

    def _find_later_attempt(self, effect: do.FindLaterAttempt) -> None:
        self.ctx.spawn(self._guarded(self._until_found))

    def _set_timer(self, effect: do.SetTimer) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(effect.delay_s, self._timer_fired)
        if effect.planned is not None:
            self._enter(effect.planned)

    def _stop_waiting(self, effect: do.StopWaiting) -> None:
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
            self._strike_out()
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def _record_end(self, effect: do.RecordEnd) -> None:
        self._forget()
        record_end(self.ctx, self.stream, effect)

    def _let_go(self, effect: do.LetGo) -> None:
        self.delivering = None
        self.ctx.counters.in_flight -= 1
        self._forget()
        self.ctx.scheduler.let_go(self.arrival.request)

    def _forget(self) -> None:
        request = self.arrival.request
        if self.streams is not None and self.streams.open.get(request) is self:
            del self.streams.open[request]

    # --- effects: the worker

    def _open(self, effect: do.Open) -> None:
        to = effect.to
        self._enter(to)
        upstream = None if effect.fresh else self.ctx.pool.take(to)
        if upstream is None:
            self._spawn(self._connect, to)
        else:
            self._connected(to, upstream)

    def _enter(self, to: Assignment) -> None:
        """Into the books of its engine."""
        self._open_to = to
        self.ctx.attempts.setdefault((to.worker, to.incarnation), {})[self] = None

    def _strike_out(self) -> None:
        to, self._open_to = self._open_to, None
        if to is not None:
            key = (to.worker, to.incarnation)
            attempts = self.ctx.attempts.get(key)
            if attempts is not None:
                attempts.pop(self, None)
                if not attempts:
                    del self.ctx.attempts[key]

    def _connected(self, to: Assignment, upstream: Upstream) -> None:
        self.upstream = upstream
        envelope_at: tuple[str, ...] = ()
        if self.stream.again:
            envelope_at = self.ctx.scheduler.returns.holders(self.arrival.request, to.worker)
        self.feed(e.Connected(envelope_at))

    def _send(self, effect: do.Send) -> None:
        upstream = self.upstream
        assert upstream is not None
        upstream.send(self, effect.head, effect.body, effect.tail, effect.generates)
        if self.paused:
            upstream.pause()

    def _close(self, effect: do.Close) -> None:
        """Take the attempt out of its engine's books and let its connection go."""
        self._strike_out()
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            if effect.reuse:
                upstream.release()
            else:
                upstream.abandon()

    def _release(self, effect: do.Release) -> None:
        token = self.stream.resume_token
        if not effect.soon:
            claim = resume_claim(effect.to, token, effect.tokens)
            self.ctx.spawn(release(self.ctx, effect.to, claim))
        elif self.streams is not None:
            self.streams.releases.add(effect.to, token)

    # --- effects: the client

    def _detach(self, effect: do.Detach) -> None:
        self.client, self.delivering = NO_CLIENT, None
        self.paused = False

    def _await_delivery(self, effect: do.AwaitDelivery) -> None:
        client, self.client = self.client, NO_CLIENT
        self.delivering = client
        assert self.streams is not None
        self.streams.deliveries.add(self, client)


_CARRY_OUT: dict[type, Callable[[RequestSession, Any], None]] = {
    do.AwaitCapacity: RequestSession._start_waiting,
    do.AwaitOwnership: RequestSession._await_ownership,
    do.FindLaterAttempt: RequestSession._find_later_attempt,
    do.SetTimer: RequestSession._set_timer,
    do.StopWaiting: RequestSession._stop_waiting,
    do.RecordEnd: RequestSession._record_end,
    do.LetGo: RequestSession._let_go,
    do.Open: RequestSession._open,
    do.Send: RequestSession._send,
    do.Close: RequestSession._close,
    do.Release: RequestSession._release,
    do.Detach: RequestSession._detach,
    do.AwaitDelivery: RequestSession._await_delivery,
}
