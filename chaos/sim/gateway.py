"""The gateway in virtual time: the real one's decisions, with stretches of tokens for bytes.

`SimGateway` is the real `Gateway` without a socket, `SimExchange` an exchange on the real
`Attempts`, `SimPool` the real pool of connections over `Wires`. Streams are told late: whoever
needs to know how far one is (`look`) has its engine tell what has left it by now.
"""

from __future__ import annotations

import asyncio
import base64
import time
from collections.abc import Callable
from typing import Any

from relume.chaos.sim.doors import AnswerSender
from relume.chaos.sim.loop import NS, Process
from relume.chaos.sim.network import End, Refused, Wires
from relume.chaos.sim.ports import Ask, Caller, Dispatch, Endpoint, Stretch
from relume.chaos.sim.prefixes import of_prompt
from relume.controlplane.gateway.attempts import Attempts
from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.gateway.context import Context
from relume.controlplane.gateway.errors import UpstreamError
from relume.controlplane.gateway.gateway import Gateway
from relume.controlplane.gateway.ports import Activity, Arrival, Assignment, SchedulerPort
from relume.controlplane.gateway.replies import Reply
from relume.controlplane.gateway.upstream import EngineKey, Upstream, UpstreamPool

PATH = "/v1/completions"
STALE_S = 0.1
"""What an engine was last heard of is looked up again after so long."""


class SimGateway(Gateway):
    """A `Door` for clients, and the real `GatewayPort`. Clients mean the fleet's one model."""

    def __init__(
        self,
        scheduler: SchedulerPort,
        wires: Wires,
        process: Process,
        config: GatewayConfig | None = None,
    ) -> None:
        clock = wires.loop.time
        super().__init__(
            scheduler, config or GatewayConfig(max_requests=1 << 20), clock=clock,
            wall_clock=lambda: time.time(),
        )  # fmt: skip
        self._asked: dict[str, SimExchange] = {}
        self._pool = SimPool(wires, process, self.config)
        self.activity = self._pool.activity
        self._context = Context(
            scheduler, self._pool, self.config, clock, self._spawn, self.counters, self._attempts
        )

    async def start(self) -> None:
        """Without a socket: whoever serves it on the network gives it an address."""
        ready = asyncio.Event()
        self._runner = asyncio.create_task(self._run(ready), name="gateway")
        await ready.wait()

    # --- Door

    def ask(self, what: Ask, caller: Caller) -> None:
        """A client's request."""
        if self.counters.in_flight >= self.config.max_requests:
            caller.refused(429, "too many requests are under way; try again")
            return
        models = self._scheduler.models()
        model, marks = models[0] if models else "", b""
        if what.prefix:
            size = self._scheduler.block_tokens(model)
            marks = of_prompt(what.prefix, what.prefix_block, what.prompt_tokens, size)
        arrival = Arrival(
            self._new_id(), model, PATH, True, what.prompt_tokens,
            what.output_tokens, what.verdict, client_id=what.client_id, priority=what.priority,
            prefix=marks, tier=what.tier, share=what.tenant,
        )  # fmt: skip
        exchange = SimExchange(self._context, arrival, what, caller, self._asked)
        self._asked[what.client_id] = exchange
        refused = self._started(exchange)
        if isinstance(refused, Reply):
            self._asked.pop(what.client_id, None)
            caller.refused(refused.status, "not taken")

    def flush(self, client_id: str) -> None:
        """Tell now what of the answer is there."""
        exchange = self._asked.get(client_id)
        if exchange is not None:
            exchange.look()

    def hang_up(self, client_id: str) -> None:
        """The client closed its connection."""
        exchange = self._asked.get(client_id)
        if exchange is not None:
            exchange.look()
            exchange.client_gone()

    # --- GatewayPort

    def delivered_on(self, worker: str, incarnation: int) -> dict[str, int]:
        """See GatewayPort; brought up to date first."""
        self._look_at(worker, incarnation)
        return super().delivered_on(worker, incarnation)

    def movable_on(self, worker: str, incarnation: int) -> dict[str, int]:
        """See GatewayPort; brought up to date first."""
        self._look_at(worker, incarnation)
        return super().movable_on(worker, incarnation)

    def _look_at(self, worker: str, incarnation: int) -> None:
        for attempt in list(self._attempts.get((worker, incarnation), ())):
            if isinstance(attempt, SimExchange):
                attempt.look()


class _Port:
    """What `Attempts` needs of a connection: it breaks off where a request went wrong."""

    chunked = True

    def __init__(self, caller: Caller) -> None:
        self._caller = caller

    def break_off(self) -> None:
        """See ClientPort."""
        self._caller.cut()


class SimExchange(Attempts):
    """One request from arrival to its terminal event."""

    __slots__ = ("_asked", "_caller", "_count", "_finish", "_first_ns", "_gap_ns", "_last_ns",
                 "what")  # fmt: skip

    def __init__(
        self,
        ctx: Context,
        arrival: Arrival,
        what: Ask,
        caller: Caller,
        asked: dict[str, SimExchange],
    ) -> None:
        port: Any = _Port(caller)
        super().__init__(ctx, port, arrival, PATH, what.client_id, b"")
        self.what = what
        self._caller = caller
        self._asked = asked
        self._count = 0
        self._finish = ""
        self._first_ns = -1
        self._last_ns = -1
        self._gap_ns = 0

    @property
    def delivered(self) -> int:
        """Tokens the client has."""
        return self._count

    def look(self) -> None:
        """Take what has left the engine by now."""
        upstream = self.upstream
        if isinstance(upstream, SimUpstream):
            upstream.look()

    def send(self, to: Assignment, upstream: Upstream) -> None:
        """See Attempts."""
        assert isinstance(upstream, SimUpstream)
        if to.mode == "new" and self._count:
            self.fail(502, "the stream cannot begin anew: the client has a part of it")
            return
        what = self.what
        padding = b"=" * (-len(to.dispatch) % 4)
        upstream.dispatch(
            self,
            Dispatch(
                to.request, to.attempt, to.incarnation, to.mode, what.asked, what.prompt_tokens,
                what.output_tokens, self._count, base64.urlsafe_b64decode(to.dispatch + padding),
                to.checkpoint, to.restore, to.priority, what.prefix, what.prefix_block,
            ),
        )  # fmt: skip

    # --- from the engine

    def on_stretch(self, stretch: Stretch) -> None:
        """More tokens; they join what is there, or the engine is at fault."""
        if self.over or self.assignment is None:
            return
        if stretch.start != self._count:
            due = f"frames: token {stretch.start} came where {self._count} was due"
            self.attempt_failed("engine_error", due)
            return
        self._count += stretch.count
        self._failover = None
        if self._first_ns < 0:
            self._first_ns = stretch.first_ns
        else:
            self._gap_ns = max(self._gap_ns, stretch.first_ns - self._last_ns)
        if stretch.count > 1:
            within = (stretch.last_ns - stretch.first_ns) // (stretch.count - 1)
            self._gap_ns = max(self._gap_ns, within)
        self._last_ns = stretch.last_ns
        self._caller.tokens(stretch)

    def on_end(self, finish: str) -> None:
        """The end frame."""
        if self.over or self.assignment is None:
            return
        if not self._count:
            self.attempt_failed("engine_error", "ended without a response")
            return
        self._finish = finish
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.release()
        if self._end("completed", 200, finish=finish):
            self._caller.end(finish)

    def on_moved(self) -> None:
        """The engine gave it up as asked."""
        self.handed_over()

    def broken_from_outside(self, cause: str, detail: str = "") -> None:
        """See Attempts; what had come by then counts."""
        self.look()
        super().broken_from_outside(cause, detail)

    # --- endings

    def may_retry(self) -> str:
        """See Attempts."""
        if self._count and self.arrival.verdict == "restart":
            return f"the worker failed and this request cannot be continued ({self.arrival.reason})"
        return ""

    def tell_failure(self, reply: Reply, message: str) -> None:
        """See Attempts."""
        self._caller.refused(reply.status, message)

    def tell_scheduler(self, outcome: str, status: int, finish: str, detail: str) -> None:
        """See Attempts."""
        self._asked.pop(self.what.client_id, None)
        self.ctx.counters.tokens += self._count
        begun = self._first_ns >= 0
        self.ctx.scheduler.ended(
            self.arrival.request, outcome, status, self._count, finish,
            int((self._first_ns - self._arrived_at * NS) / 1000) if begun else -1,
            self._gap_ns // 1000 if begun else -1,
            detail,
        )  # fmt: skip


class _Transport:
    """A connection as `Upstream` uses its transport."""

    def __init__(self, end: End, lost: Callable[[], None]) -> None:
        self._end = end
        self._lost = lost

    def is_closing(self) -> bool:
        return self._end.closed

    def abort(self) -> None:
        self._end.close()
        self._lost()

    close = abort

    def pause_reading(self) -> None:
        pass

    resume_reading = pause_reading


class SimUpstream(Upstream):
    """A connection to an engine; `endpoint` is what answers there."""

    __slots__ = ("_answer", "_dispatched", "_end", "_endpoint")

    def __init__(
        self, pool: SimPool, key: EngineKey, activity: Activity, end: End, endpoint: Endpoint
    ) -> None:
        super().__init__(pool, key, activity)
        transport: Any = _Transport(end, lambda: pool.forget(self))
        self.transport = transport
        self._end = end
        self._endpoint = endpoint
        self._dispatched: Dispatch | None = None
        self._answer: _Reply | None = None
        end.lost = self._gone

    def dispatch(self, consumer: SimExchange, what: Dispatch) -> None:
        """Send an attempt."""
        end, endpoint = self._end, self._endpoint
        port: Any = consumer
        self.consumer = port
        self._expecting, self._complete, self.untouched = True, False, True
        self._count(True)
        self.heard = self._clock()
        self.deadline = self.heard + self._pool.silence_s
        self._dispatched = what
        self._answer = _Reply(self, consumer)

        def gone(*_: str) -> None:
            endpoint.drop(what.request, what.attempt)

        end.peer.lost = gone
        end.send(endpoint.dispatch, what, AnswerSender(end.peer, self._answer))

    def look(self) -> None:
        """Have the engine tell how far it is."""
        what = self._dispatched
        if what is not None and self.consumer is not None:
            self._end.look(self._endpoint.flush, what.request, what.attempt)

    def last_byte(self) -> float:
        """When the last token came that the engine has sent by now, told or not; loop time."""
        what = self._dispatched
        if what is None or not self._end.would_come():
            return 0.0
        return self._endpoint.last_ns(what.request, what.attempt) / NS

    def newest_byte(self) -> float:
        """The same of all that its engine sends."""
        return self._endpoint.newest_ns() / NS

    def heard_of(self, stretch: Stretch) -> None:
        """Bytes came."""
        self.untouched = False
        self.heard = self._clock()
        self.activity.last_byte = stretch.last_ns / NS

    def done(self) -> None:
        """The response is complete: the engine is not told of an end."""
        self._complete = True
        self._dispatched = self._answer = None
        self._end.peer.lost = _nobody

    def _count(self, waiting: bool) -> None:
        super()._count(waiting)
        assert isinstance(self.activity, SimActivity)
        if waiting:
            self.activity.upstreams[self] = None
        else:
            self.activity.upstreams.pop(self, None)

    def _gone(self, kind: str, detail: str) -> None:
        self._pool.forget(self)
        self._lose(kind, detail)
        self.transport = None


class _Reply:
    """The `Answer` to one dispatch; late ones go nowhere."""

    def __init__(self, upstream: SimUpstream, consumer: SimExchange) -> None:
        self._upstream = upstream
        self._consumer = consumer

    @property
    def _late(self) -> bool:
        upstream = self._upstream
        return upstream._answer is not self or upstream.consumer is not self._consumer

    def tokens(self, stretch: Stretch) -> None:
        if not self._late:
            self._upstream.heard_of(stretch)
            self._consumer.on_stretch(stretch)

    def end(self, finish: str) -> None:
        if not self._late:
            self._upstream.done()
            self._consumer.on_end(finish)

    def moved(self) -> None:
        if not self._late:
            self._upstream.done()
            self._consumer.on_moved()

    def lost(self, kind: str, detail: str) -> None:
        if self._late:
            return
        upstream = self._upstream
        upstream.done()
        if kind in ("stale", "engine_error"):
            self._consumer.attempt_failed(kind, detail)
        else:
            upstream._lose(kind, detail)


class SimActivity(Activity):
    """An account whose last byte is looked up when it is old."""

    __slots__ = ("_at", "_now", "upstreams")

    def __init__(self, clock: Any) -> None:
        self._now = clock
        self.upstreams: dict[SimUpstream, None] = {}
        super().__init__(clock())

    @property
    def last_byte(self) -> float:  # type: ignore[override]
        """Loop time of the last byte."""
        stale = self._now() - STALE_S
        if self._at < stale:
            for upstream in self.upstreams:
                self.last_byte = upstream.last_byte()
                if self._at >= upstream.newest_byte():
                    break
        return self._at

    @last_byte.setter
    def last_byte(self, at: float) -> None:
        self._at = max(at, getattr(self, "_at", 0.0))


class SimPool(UpstreamPool):
    """The real pool; connections are made over the network."""

    def __init__(self, wires: Wires, process: Process, config: GatewayConfig) -> None:
        super().__init__(
            wires.loop.time,
            keepalive_s=config.upstream_keepalive_s,
            connect_timeout_s=config.connect_timeout_s,
            silence_s=config.upstream_silence_s,
            max_idle_per_engine=config.max_idle_per_engine,
        )
        self._wires = wires
        self._process = process

    def new_activity(self) -> Activity:
        """See UpstreamPool."""
        return SimActivity(self.clock)

    async def open(self, to: Assignment) -> Upstream:
        """A new connection. Raises UpstreamError (refused, unreachable)."""
        address = f"{to.host}:{to.port}"
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                end, endpoint = await self._wires.connect(self._process, address, "gateway")
        except TimeoutError:
            raise UpstreamError("unreachable", "no connection in time") from None
        except Refused as error:
            raise UpstreamError("refused", str(error)) from None
        activity = self.activity_of(to.worker, to.incarnation)
        upstream = SimUpstream(self, (to.host, to.port, to.incarnation), activity, end, endpoint)
        upstream.deadline = float("inf")
        self._all[upstream] = None
        return upstream


def _nobody(kind: str, detail: str) -> None:
    pass
