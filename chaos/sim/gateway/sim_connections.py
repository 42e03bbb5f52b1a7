"""The gateway's connections to simulated engines: the real pool over `Wires`."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from relume.chaos.sim.message_ports import Dispatch, Endpoint, Stretch
from relume.chaos.sim.world.endpoints import AnswerSender
from relume.chaos.sim.world.network import End, Refused, Wires
from relume.chaos.sim.world.virtual_loop import NS, Process
from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.gateway.errors import UpstreamError
from relume.controlplane.gateway.http.upstream import EngineKey, Upstream, UpstreamPool
from relume.controlplane.gateway.ports import Activity
from relume.controlplane.stream.arrival import Assignment
from relume.events.wire.worker_calls import Attach

STALE_S = 0.1
"""Age at which the time of an engine's last byte is refreshed."""


class Receiver(Protocol):
    """Receiver of an engine's answers to a dispatch; `sim_session.SimSession` is one."""

    def on_stretch(self, stretch: Stretch) -> None: ...
    def on_cut_frame(self, sent: int, at_ns: int) -> None: ...
    def on_end(self, finish: str, sent: int) -> None: ...
    def on_moved(self) -> None: ...
    def on_attached(self, base: int, known: int) -> None: ...
    def on_refused(self, status: int) -> None: ...
    def on_broken(self, kind: str) -> None: ...
    def on_taken(self) -> None: ...
    def worker_lost(self, cause: str, detail: str = "") -> None: ...


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
    """A connection to an engine; `endpoint` answers there."""

    __slots__ = ("_answer", "_attempt", "_end", "_endpoint")

    def __init__(
        self, pool: SimPool, key: EngineKey, activity: Activity, end: End, endpoint: Endpoint
    ) -> None:
        super().__init__(pool, key, activity)
        transport: Any = _Transport(end, lambda: pool.forget(self))
        self.transport = transport
        self._end = end
        self._endpoint = endpoint
        self._attempt: tuple[str, int] | None = None
        self._answer: _Reply | None = None
        end.lost = self._gone

    def dispatch(self, consumer: Receiver, what: Dispatch) -> None:
        """Send an attempt."""
        answer = self._expect(consumer, what.request, what.attempt, what.delivered)
        self._end.send(self._endpoint.dispatch, what, answer)

    def attach(self, consumer: Receiver, what: Attach) -> None:
        """Attach to a stream that runs already."""
        answer = self._expect(consumer, what.request, what.attempt, 0)
        self._end.send(self._endpoint.attach, what, answer)

    def send(
        self, consumer: Any, head: bytes, body: bytes, tail: bytes = b"", generates: bool = True
    ) -> None:
        """Make a call without waiting for its answer; the connection serves others at once."""
        path = head.split(b" ", 2)[1].decode()
        self._end.send(self._endpoint.call, path, msgspec.json.decode(body))
        self._complete = True
        self.release()

    def _expect(self, consumer: Receiver, request: str, attempt: int, sent: int) -> AnswerSender:
        """The engine's side of the answer that goes to `consumer`."""
        end, endpoint = self._end, self._endpoint
        port: Any = consumer  # the part of `upstream.Consumer` that is used here
        self.consumer = port
        self._expecting, self._complete, self.untouched = True, False, True
        self._count(True)
        self.heard = self._clock()
        self.deadline = self.heard + self._pool.silence_s
        self._attempt = request, attempt
        self._answer = _Reply(self, consumer, sent)
        answer = AnswerSender(end.peer, self._answer)

        def gone(*_: str) -> None:
            endpoint.drop(request, attempt, answer)

        end.peer.lost = gone
        return answer

    def look(self) -> None:
        """Have the engine report its progress."""
        if self._attempt is not None and self.consumer is not None:
            self._end.look(self._endpoint.flush, *self._attempt)

    def last_byte(self) -> float:
        """Loop time of the last token that the engine has sent by now, reported or not."""
        if self._attempt is None or not self._end.would_come():
            return 0.0
        return self._endpoint.last_ns(*self._attempt) / NS

    def refresh(self) -> None:
        """Note the time of the last token that came by now, reported or not."""
        self.heard = max(self.heard, self.last_byte())

    def newest_byte(self) -> float:
        """Loop time of the last token of any stream of its engine."""
        return self._endpoint.newest_ns() / NS

    def reset(self) -> None:
        """Break the connection."""
        self._end.reset()

    def frame_copies(self) -> int:
        """Number of times that the next frame arrives."""
        return self._end.frame_copies()

    def heard_of(self, stretch: Stretch) -> None:
        """Bytes came."""
        self.untouched = False
        self.heard = self._clock()
        self.activity.last_byte = stretch.last_ns / NS

    def done(self) -> None:
        """The response is complete: the engine gets no notice of an end."""
        self._complete = True
        self._attempt = self._answer = None
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
        if self._answer is not None:
            self._answer.cut()
        self._lose(kind, detail)
        self.transport = None


class _Reply:
    """The `Answer` to one dispatch; it drops late messages. `sent`: number of tokens that its engine
    has sent."""

    def __init__(self, upstream: SimUpstream, consumer: Receiver, sent: int) -> None:
        self._upstream = upstream
        self._consumer = consumer
        self.sent = sent

    @property
    def _late(self) -> bool:
        upstream = self._upstream
        return upstream._answer is not self or upstream.consumer is not self._consumer

    def tokens(self, stretch: Stretch) -> None:
        if self._late:
            return
        self.sent = stretch.start + stretch.count
        self._upstream.heard_of(stretch)
        self._consumer.on_stretch(stretch)

    def end(self, finish: str) -> None:
        if not self._late:
            self._upstream.done()
            self._consumer.on_end(finish, self.sent)

    def moved(self) -> None:
        if not self._late:
            self._upstream.done()
            self._consumer.on_moved()

    def attached(self, base: int, known: int) -> None:
        if not self._late:
            self.sent = known
            self._upstream.untouched = False
            self._consumer.on_attached(base, known)

    def refused(self, status: int) -> None:
        if not self._late:
            self._upstream.done()
            self._consumer.on_refused(status)

    def broken(self, kind: str) -> None:
        if not self._late:
            self._upstream.done()
            self._consumer.on_broken(kind)

    def taken(self) -> None:
        if not self._late:
            self._upstream.done()
            self._consumer.on_taken()

    def cut(self) -> None:
        """The connection broke."""
        if not self._late:
            self._consumer.on_cut_frame(self.sent, round(self._upstream._clock() * NS))

    def lost(self, kind: str, detail: str) -> None:
        if self._late:
            return
        upstream = self._upstream
        upstream.done()
        if kind in ("stale", "engine_error"):
            self._consumer.worker_lost(kind, detail)
        else:
            upstream._lose(kind, detail)


class SimActivity(Activity):
    """An account that refreshes the time of its last byte when it is old."""

    __slots__ = ("_at", "_now", "upstreams")

    def __init__(self, clock: Any) -> None:
        self._now = clock
        self.upstreams: dict[SimUpstream, None] = {}
        super().__init__(clock())

    @property
    def last_byte(self) -> float:
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
    """The real pool, with connections over the simulated network."""

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
