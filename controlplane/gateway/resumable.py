"""Clients that lose their connection to a stream and come back to it.

When the client is gone the exchange lets go of its engine, which goes on into a bounded
buffer (`engine_shim.detached`); whoever shows the last id attaches to that buffer, here or at
any other replica (`stamped`). While nobody is there the stream may still be handed over to
another worker: it is taken up there behind what the client has, and let go of again.

A stream that has come to its end ends when its client has it (`deliveries`); one that is lost
on its last way waits for its client like any other.
"""

from __future__ import annotations

import asyncio
import hmac
from typing import TYPE_CHECKING, Any

import structlog

from relume.controlplane.gateway.context import ClientPort
from relume.controlplane.gateway.event_ids import Position
from relume.controlplane.gateway.ports import Assignment
from relume.controlplane.gateway.relay import Exchange
from relume.controlplane.gateway.replies import Reply, error_reply
from relume.controlplane.gateway.stamped import Stamped

if TYPE_CHECKING:
    from relume.controlplane.gateway.streams import Streams

log = structlog.get_logger("relume.gateway")

NEVER = float("inf")
OWNED_S = 10.0
"""A client that comes to another replica waits so long until the log has it there."""


class _Nobody:
    """The client's side while there is none."""

    chunked = False
    lost = True
    undelivered = 0

    def reply(self, reply: Reply) -> None: ...
    def begin(self, head: bytes, first: bytes, last: bool = False) -> None: ...
    def write(self, data: bytes) -> None: ...
    def write_chunk(self, chunk: bytes) -> None: ...
    def finish(self, data: bytes = b"", close: bool = False) -> None: ...
    def break_off(self) -> None: ...


NOBODY = _Nobody()


def gone(message: str) -> Reply:
    """There is no such stream for this client."""
    return error_reply(410, message, code="stream_gone")


class Resumable(Stamped):
    """One request whose stream may go on on another connection of its client.

    `detached_until`: when it ends unless the client comes back; never while one is there.
    `delivering`: the connection on which its last bytes are. `streams`: all such exchanges of
    the gateway."""

    __slots__ = ("_left", "_owned", "_streams", "delivering", "detached_until")

    def __init__(self, *at: Any, streams: Streams, **stamped: str) -> None:
        """`at` and `stamped`: as of `Stamped`."""
        super().__init__(*at, **stamped)
        self._streams = streams
        self.delivering: ClientPort | None = None
        self._left: Assignment | None = None  # the attempt that goes on without us
        self._owned = True  # the log has the request at this replica
        self.detached_until = NEVER

    def start(self) -> None:
        self._streams.open[self.arrival.request] = self
        super().start()

    # --- the client goes and comes

    def holds(self, claim: str, tenant: str) -> bool:
        """Whether who shows `claim` may have this stream."""
        same = hmac.compare_digest(claim.encode(), self._claim.encode())
        return same and tenant == self.arrival.tenant and self.resumable

    @property
    def detached(self) -> bool:
        """Whether nobody is there."""
        return self.client is NOBODY and self.delivering is None

    def client_gone(self) -> None:
        if self.over:
            return
        if self.resumable and (self._begun or self._stamp.have > (0, 0)):
            self._detach()
        else:
            super().client_gone()

    def _detach(self) -> None:
        """Nobody is there: let go of the engine and wait."""
        self.client, self.delivering = NOBODY, None
        self.paused = False
        self._out.clear()
        self.detached_until = self.ctx.clock() + self.ctx.config.resume.grace_s
        self._let_engine_go()

    def _let_engine_go(self) -> None:
        to, self.assignment = self.assignment, None
        if to is not None:
            self._left = to
            self._leave(to)
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()

    def came_back(self, client: ClientPort, have: Position) -> None:
        """The client is here again, with everything up to `have`. The newest connection wins.
        Raises LogError."""
        self.ctx.scheduler.returns.came_back(self.arrival.request, *have)
        old, self.client = self.client, client
        old.break_off()
        self._let_engine_go()
        self._known = max(self._known, self._held.ids, key=len)
        self._rewind(have)
        if self._owned:
            self._go_on()

    def take_over(self, have: Position) -> None:
        """The client of another replica's stream came here, with everything up to `have`.
        Raises LogError."""
        self._left = self.ctx.scheduler.returns.adopt(self.arrival, *have)
        self._owned = False
        self._rewind(have)
        self._streams.open[self.arrival.request] = self
        self.ctx.counters.in_flight += 1
        self.ctx.spawn(self._until_owned())

    async def _until_owned(self) -> None:
        """The request is ours once the log says so."""
        try:
            owned = await self.ctx.scheduler.returns.owned(self.arrival.request, OWNED_S)
            if self.over:
                return
            if not owned:
                client, self.client = self.client, NOBODY
                self.let_go()
                client.reply(gone("the stream is over, or the log does not answer"))
                return
            self._owned = True
            if self.client is not NOBODY:
                self._go_on()
        except Exception as error:  # the edge of one request: all others share the task group
            self.on_fault(error)

    def _rewind(self, have: Position) -> None:
        """Stand where the client stands."""
        self._restore(have)
        self._begun = self._plain = self._done = False
        self._finish = ""
        self.delivering = None
        self.detached_until = NEVER

    def _go_on(self) -> None:
        """Take the stream up where it runs, else have it generated from here."""
        to, self._left = self._left, None
        if to is None:
            if refusal := self.may_retry():
                self.fail(502, refusal)
            else:
                self._assign("returned")
        else:
            self._attaching = True
            self._trials.tries -= 1
            self._dispatch(to)

    def expire(self) -> None:
        """The client did not come back."""
        seconds = self.ctx.config.resume.grace_s
        self._fired("grace")
        self._end("cancelled", 499, f"the client did not come back within {seconds} s")

    def let_go(self) -> None:
        """Another replica owns the request, or nobody does: end here without a word in the
        log. The client, if one is there, may connect again."""
        if self.over:
            return
        self.over = True
        self.delivering = None
        self.ctx.counters.in_flight -= 1
        self._forget()
        self._let_engine_go()
        self.ctx.scheduler.let_go(self.arrival.request)
        if self.client is not NOBODY and self._begun:
            self.client.break_off()

    # --- its worker drains while nobody is there

    def away_on(self, worker: str, incarnation: int) -> bool:
        """Whether the attempt there goes on without us, and can be taken up behind what the
        client has."""
        left = self._left
        if left is None or (left.worker, left.incarnation) != (worker, incarnation):
            return False
        if not self.detached or not self._owned or self.over or self._finish or self._done:
            return False
        if self._attaching or self._again or not self.body:
            return False
        return len(self._held.ids) >= self._stamp.have[0] and not Exchange.may_retry(self)

    def given_up(self, attempt: int) -> None:
        """The attempt that went on without us was handed over: let it be taken up elsewhere,
        and go on there without us."""
        to = self._left
        if to is None or to.attempt != attempt or not self.away_on(to.worker, to.incarnation):
            return
        self._release(to)
        self._left, self.assignment = None, to
        self.handed_over()

    def on_head(self, status: int, headers: dict[bytes, bytes]) -> None:
        to, fresh = self.assignment, not (self._attaching or self._again)
        super().on_head(status, headers)
        if fresh and self.detached and status == 200 and self.assignment is to:
            self._failover = None
            self._let_engine_go()  # it has begun there, and is kept

    def fail(self, status: int, message: str, why: str = "", **how: Any) -> None:
        """While nobody is there to be told, it waits for the client and is tried again then."""
        if self.detached and status >= 502 and not self.over:
            log.info("stream_waits", reason=message, **self.about())
            self._let_engine_go()
            self._left = None
        else:
            super().fail(status, message, why, **how)

    # --- ends

    def _complete(self) -> None:
        """The end frame is here: what is left is on its way to the client."""
        to, client = self.assignment, self.client
        shown = self._whole is None and (self._begun or self._out)
        if to is None or client is NOBODY or not shown or not self.resumable:
            super()._complete()
            return
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.release()
        self._left, self.assignment = to, None
        self._leave(to)
        self.client, self.delivering = NOBODY, client
        if self._begun:
            client.finish(self._pending())
        else:
            self._begun = True
            client.begin(self._head(), self._pending(), last=True)
        self._streams.deliveries.add(self, client)

    def arrived_whole(self) -> None:
        """The client has all of it."""
        if self.delivering is None:
            return
        to, self._left, self.delivering = self._left, None, None
        if self._end("completed", 200, finish=self._finish) and to is not None:
            self._streams.releases.add(to, self._claim)

    def on_broken(self, kind: str, message: str) -> None:
        if kind == "taken":  # the log will say by whom
            self.client.break_off()
            self._detach()
            return
        super().on_broken(kind, message)

    def _end(self, outcome: str, status: int, detail: str = "", finish: str = "-") -> bool:
        if not self.over and outcome != "completed":
            self._release(self.assignment or self._left)
        self._forget()
        self.detached_until = NEVER
        return super()._end(outcome, status, detail, finish)

    def _forget(self) -> None:
        others = self._streams.open
        if others.get(self.arrival.request) is self:
            del others[self.arrival.request]
