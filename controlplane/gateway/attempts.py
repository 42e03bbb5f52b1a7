"""The attempts of one request: assign, connect, and again elsewhere after a failure.

`Attempts` talks with the scheduler and owns the connection to the engine of the attempt
under way; its subclasses know what is sent and what comes back (`relay.Exchange` for
protected routes, `passthrough.Passthrough` for the others). Everything happens in
callbacks of the loop; only connecting and waiting for capacity are tasks.

One rule keeps the log honest: after `arrived` there is exactly one `ended`, whichever of
client, engine and scheduler goes first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import msgspec
import structlog

from relume.controlplane.gateway import routes
from relume.controlplane.gateway.context import ClientPort, Context
from relume.controlplane.gateway.errors import UpstreamError
from relume.controlplane.gateway.gaps import Failover
from relume.controlplane.gateway.ports import Arrival, Assignment, Hopeless
from relume.controlplane.gateway.replies import Reply, error_reply
from relume.controlplane.gateway.trials import DEATHS, Trials
from relume.controlplane.gateway.upstream import Upstream
from relume.events.errors import LogError

log = structlog.get_logger("relume.gateway")

# What an observed failure is called when it causes the next assignment.
CAUSES = {"eof": "reset", "timeout": "stall"}
KINDS = frozenset(
    "reset eof refused unreachable stale engine_dead engine_error declined stall timeout".split()
)


class Attempts:
    """Base of an exchange. Subclasses implement the hooks at the end."""

    __slots__ = (
        "_arrived_at",
        "_counting",
        "_failover",
        "_rejoin",
        "_sent_at",
        "_task",
        "_trials",
        "arrival",
        "assignment",
        "body",
        "client",
        "ctx",
        "over",
        "path",
        "paused",
        "response_id",
        "upstream",
    )

    def __init__(
        self,
        ctx: Context,
        client: ClientPort,
        arrival: Arrival,
        path: str,
        response_id: str,
        body: bytes,
    ) -> None:
        self.ctx = ctx
        self.client = client
        self.arrival = arrival
        self.path = path
        self.response_id = response_id
        self.body = body
        self.assignment: Assignment | None = None
        self.upstream: Upstream | None = None
        self.over = False
        self.paused = False
        self._counting = False  # not accepted yet
        self._task: asyncio.Task[None] | None = None
        self._arrived_at = self._sent_at = ctx.clock()
        self._trials = Trials()
        self._failover: Failover | None = None
        self._rejoin = ""  # how a reused connection died before it answered

    # --- towards the scheduler

    def start(self) -> None:
        """Accept the request, at once or when its prompt was counted. Raises LogError."""
        self._counting = self.ctx.tokens is not None and self.may_count()
        if not self._counting:
            self._accept()
        self.ctx.counters.requests += 1
        self.ctx.counters.in_flight += 1
        if self._counting:
            self._spawn(self._count)
        else:
            self._begin_attempts()

    def _accept(self) -> None:
        """The request is accepted: tell the scheduler. Raises LogError."""
        self.arrival = self.ctx.scheduler.arrived(self.arrival)
        self._counting = False

    def _begin_attempts(self) -> None:
        try:
            if not self._waits():
                self._assign("arrival")
        except Exception as error:  # it was accepted, so it must end
            self.on_fault(error)

    def _waits(self, nobody: bool = False) -> bool:
        """Whether it waits for a worker, or was refused. `nobody`: there was none to be had."""
        ctx = self.ctx
        try:
            held = ctx.scheduler.waiting.admit(
                self.arrival, self, len(self.body), ctx.config.wait_timeout_s, nobody
            )
        except LogError as error:
            log.error("decision_not_written", reason=str(error), **self.about())
            held = Hopeless(503, "the control plane cannot take decisions at present")
        if isinstance(held, Hopeless):
            self.refused(held)
        elif held:
            ctx.counters.waits += 1
        return held is not False

    async def _count(self) -> None:
        """Count the prompt within the bound, then accept the request."""
        tokens, arrival = self.ctx.tokens, self.arrival
        assert tokens is not None
        block_tokens = self.ctx.scheduler.block_tokens(arrival.model)
        told = await tokens.count(
            arrival.model, routes.PROTECTED[self.path], block_tokens, self.body
        )
        if self.over:
            return
        if told is not None:
            self.arrival = msgspec.structs.replace(
                arrival, prompt_tokens=told.tokens, estimated=False, prefix=told.prefix
            )
        try:
            self._accept()
        except LogError as error:
            log.error("arrival_not_written", reason=str(error), **self.about())
            self.fail(503, "the control plane cannot take requests at present")
            return
        self._begin_attempts()

    def _assign(self, cause: str) -> None:
        declined = cause == "declined"
        if self._trials.failures() >= self.ctx.config.max_attempts:
            if declined:
                self.declined_by_all()
            else:
                self.fail(502, f"gave up after {self._trials.tries} attempts")
            return
        decided = self._ask(cause)
        if isinstance(decided, Hopeless):
            self.refused(decided)
        elif decided is None and not declined:
            if cause != "arrival" or not self._waits(nobody=True):
                self.ctx.counters.waits += 1
                self._spawn(self._wait)
        elif decided is None:
            self.declined_by_all()
        elif (decided.worker, decided.incarnation) in self._trials.failed_on:
            if declined:
                self.declined_by_all()
            else:
                self._spawn(self._dispatch_later, decided)
        else:
            self._dispatch(decided)

    # --- called while it waits (ports.Caller)

    def called(self) -> bool:
        """See ports.Caller."""
        try:
            decided = self._ask("wait_over")
            if isinstance(decided, Hopeless):
                self.refused(decided)
            elif decided is not None:
                self._dispatch(decided)
            return decided is not None
        except Exception as error:  # the edge of one request: others wait behind it
            self.on_fault(error)
            return True

    def refused(self, why: Hopeless) -> None:
        """See ports.Caller."""
        try:
            self.fail(why.status, why.message, retry_after_s=why.retry_after_s, code=why.code)
        except Exception as error:  # the edge of one request: others wait beside it
            self.on_fault(error)

    def _spawn(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        self._task = self.ctx.spawn(self._guarded(work, *args))

    async def _guarded(self, work: Callable[..., Coroutine[Any, Any, None]], *args: Any) -> None:
        """Run a task of this exchange."""
        try:
            await work(*args)
        except Exception as error:  # the edge of one request: all others share the task group
            self.on_fault(error)

    def on_fault(self, error: Exception) -> None:
        """Our own code failed on this request: it ends, and nothing is said of the worker."""
        log.error("request_broke", exc_info=error, **self.about())
        try:
            if not self.over:
                self.fail(500, "the gateway failed on this request")
                return
        except Exception:
            log.exception("request_could_not_be_ended", **self.about())
        self.client.break_off()

    def about(self) -> dict[str, str]:
        """What log lines of this request carry."""
        arrival = self.arrival
        ids = {"request": arrival.request, "client_id": arrival.client_id}
        return {**ids, "trace": arrival.trace} if arrival.trace else ids

    def trace_header(self) -> str:
        """The client's trace context for the worker, as a line of the head."""
        trace = self.arrival.trace
        return f"traceparent: {trace}\r\n" if trace else ""

    def _fired(self, timer: str) -> None:
        try:
            self.ctx.scheduler.timer_fired(timer, self.arrival.request)
        except LogError as error:
            log.error("timer_not_written", reason=str(error), **self.about())

    def _ask(self, cause: str) -> Assignment | Hopeless | None:
        try:
            return self.ctx.scheduler.assign(self.arrival.request, cause, self.delivered)
        except LogError as error:
            log.error("decision_not_written", reason=str(error), **self.about())
            return Hopeless(503, "the control plane cannot take decisions at present")

    async def _dispatch_later(self, to: Assignment) -> None:
        """It failed there before and nobody else is left: give its death time to be known."""
        await asyncio.sleep(self._trials.next_pause())
        if not self.over:
            self._fired("retry")
            self._dispatch(to)

    async def _assign_later(self, cause: str) -> None:
        """Several died on it in a row: give the deaths of others time to be known."""
        await asyncio.sleep(self._trials.next_pause())
        if not self.over:
            self._fired("retry")
            self._assign(cause)

    def _dispatch(self, to: Assignment) -> None:
        self._trials.tries += 1
        self._sent_at = self.ctx.clock()
        if self._failover is not None:
            self._failover.decided = self.ctx.clock()
        self.assignment = to
        self.ctx.attempts.setdefault((to.worker, to.incarnation), {})[self] = None
        upstream = self.ctx.pool.take(to)
        if upstream is None:
            self._spawn(self._connect, to)
        else:
            self._begin(to, upstream)

    async def _wait(self) -> None:
        """No worker can take it: wait for one, within the bound, then answer honestly."""
        clock, config = self.ctx.clock, self.ctx.config
        until = clock() + config.wait_timeout_s
        request = self.arrival.request
        while (left := until - clock()) > 0:
            try:
                async with asyncio.timeout(left + 1):
                    found = await self.ctx.scheduler.capacity(request, left)
            except TimeoutError:
                break
            if not found:
                break
            decided = self._ask("wait_over")
            if isinstance(decided, Hopeless):
                self.refused(decided)
                return
            if decided is not None:
                self._dispatch(decided)
                return
            await asyncio.sleep(self._trials.next_pause())
        self._fired("wait")
        self.fail(503, "no worker can take the request at present; try again")

    async def _connect(self, to: Assignment) -> None:
        try:
            upstream = await self.ctx.pool.open(to)
        except UpstreamError as error:
            if self.assignment is to and not self.over:
                kind = self._rejoin or error.kind
                self.attempt_failed(kind, error.detail)
            return
        if self.assignment is not to or self.over:
            self.ctx.pool.give_back(upstream)
            return
        self._begin(to, upstream)

    def _begin(self, to: Assignment, upstream: Upstream) -> None:
        self.upstream = upstream
        self.send(to, upstream)
        if self._failover is not None:
            self._failover.sent = self.ctx.clock()
        if self.paused:
            upstream.pause()

    # --- failures

    def on_lost(self, kind: str, detail: str) -> None:
        """The connection of the attempt broke before the response was complete."""
        upstream, to = self.upstream, self.assignment
        self.upstream = None
        if to is not None and upstream is not None and upstream.reused and upstream.untouched:
            if kind in ("eof", "reset") and not self._rejoin:
                # Perhaps only the idle connection had timed out at the engine's end: ask a
                # fresh one. A dead engine refuses it at once, and that is the failure then.
                self._rejoin = kind
                self._spawn(self._connect, to)
                return
        self.attempt_failed(kind, detail)

    def attempt_failed(self, kind: str, detail: str, status: int = 0) -> None:
        """The attempt under way is lost; go on elsewhere. `status`: what the engine answered."""
        to, self.assignment = self.assignment, None
        if to is None or self.over:
            return
        self._leave(to)
        self._trials.failed_on.add((to.worker, to.incarnation))
        self._rejoin = ""
        if self._failover is None:
            self._failover = Failover(kind, self.ctx.clock())
        self.before_failover()
        self.ctx.counters.failovers += 1
        try:
            self.ctx.scheduler.observed(
                self.arrival.request, to.attempt, kind, self.delivered, detail
            )
        except LogError as error:
            log.error("failed_attempt_not_written", reason=str(error), **self.about())
        final, words = self._trials.failed(kind, status, self.delivered, self.ctx.config)
        if final:
            self.fail(final, words)
            return
        refusal = self.may_retry()
        if refusal:
            self.fail(502, refusal)
            return
        cause = CAUSES.get(kind, kind)
        if kind in DEATHS and self._trials.hurried(self.ctx.clock() - self._sent_at):
            self._spawn(self._assign_later, cause)
        else:
            self._assign(cause)

    def handed_over(self) -> None:
        """The engine gave the attempt up as it was asked to: go on where it is planned. Nothing
        is held against anybody."""
        to, self.assignment = self.assignment, None
        if to is None or self.over:
            return
        self._leave(to)
        self._rejoin = ""
        self._trials.moves += 1
        self.ctx.counters.moves += 1
        if self._failover is None:
            self._failover = Failover("moved", self.ctx.clock())
        self.before_failover()
        try:
            self.ctx.scheduler.observed(
                self.arrival.request, to.attempt, "moved", self.delivered, "handed over"
            )
        except LogError as error:
            log.error("move_not_written", reason=str(error), **self.about())
        if refusal := self.may_retry():
            self.fail(502, refusal)
        else:
            self._assign("moved")

    @property
    def movable(self) -> bool:
        """Whether the attempt may be handed over now: it runs, and can be taken up."""
        return self.upstream is not None and not self.over and not self.may_retry()

    def broken_from_outside(self, cause: str, detail: str = "") -> None:
        """Somebody else gave the engine up, or knows that it is dead."""
        try:
            if cause == "stall":
                self._trials.given_up(self.ctx.clock() - self._sent_at)
            if cause in KINDS:
                self.attempt_failed(cause, detail)
            else:
                self.attempt_failed("stall", cause)
        except Exception as error:  # the edge of one request: others on the engine follow
            self.on_fault(error)

    def _leave(self, to: Assignment) -> None:
        """Take the attempt out of its engine's books and drop its connection."""
        key = (to.worker, to.incarnation)
        attempts = self.ctx.attempts.get(key)
        if attempts is not None:
            attempts.pop(self, None)
            if not attempts:
                del self.ctx.attempts[key]
        upstream, self.upstream = self.upstream, None
        if upstream is not None:
            upstream.abandon()

    # --- endings

    def client_gone(self) -> None:
        """The client left: the engine stops computing, the log says so."""
        self._end("cancelled", 499, "client closed the connection")

    def fail(
        self, status: int, message: str, why: str = "", *, retry_after_s: int = 0, code: str = ""
    ) -> None:
        """Tell the client that it cannot go on; `why` is for the log alone."""
        outcome = "rejected" if status < 500 else "failed"
        if self._end(outcome, status, f"{message}: {why}" if why else message):
            usual_s = self.ctx.config.retry_after_s if status in (429, 503) else None
            reply = error_reply(
                status,
                message,
                code=code or ("model_not_found" if status == 404 else None),
                retry_after_s=retry_after_s or usual_s,
                headers=self.reply_headers(),
            )
            self.tell_failure(reply, message)

    def _end(self, outcome: str, status: int, detail: str = "", finish: str = "-") -> bool:
        """The one terminal event; False when it was over before."""
        if self.over:
            return False
        self.over = True
        counters = self.ctx.counters
        counters.in_flight -= 1
        setattr(counters, outcome, getattr(counters, outcome) + 1)
        to, self.assignment = self.assignment, None
        if to is not None:
            self._leave(to)
        task, self._task = self._task, None
        if task is not None and task is not asyncio.current_task():
            task.cancel()
        try:
            if self._counting:
                self._accept()
            self.tell_scheduler(outcome, status, finish, detail)
        except LogError as error:
            log.error("end_not_written", reason=str(error), **self.about())
        return True

    def tell_scheduler(self, outcome: str, status: int, finish: str, detail: str) -> None:
        """Write the terminal event."""
        self.ctx.scheduler.ended(self.arrival.request, outcome, status, 0, finish, detail=detail)

    # --- back-pressure, called by the client's connection

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

    # --- hooks

    @property
    def delivered(self) -> int:
        """Tokens the gateway holds."""
        return 0

    def send(self, to: Assignment, upstream: Upstream) -> None:
        """Send the request of this attempt."""
        raise NotImplementedError

    def may_count(self) -> bool:
        """Whether the body has a prompt that can be tokenised."""
        return False

    def may_retry(self) -> str:
        """Why another attempt cannot help the client; empty when it can."""
        raise NotImplementedError

    def declined_by_all(self) -> None:
        """Every worker there is refused the moved request with a 4xx."""
        self.fail(502, "no worker would go on with the request")

    def before_failover(self) -> None:
        """Called with the attempt gone and the next not begun."""

    def dispatch_headers(self, to: Assignment) -> str:
        """Further lines for the head of a protected dispatch."""
        return ""

    def reply_headers(self) -> tuple[tuple[str, str], ...]:
        """Headers every answer of this exchange carries."""
        return ()

    def tell_failure(self, reply: Reply, message: str) -> None:
        """Bring the failure to the client, whatever it has already."""
        raise NotImplementedError
