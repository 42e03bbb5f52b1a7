"""Which requests got tokens from each engine, and until when: a verdict on what it computes dates back.

An attempt that brought tokens served its request until it ended. So did one whose blocks a later attempt
restored, also an attempt of another request that lent them. Tokens that an engine sent without ids are not
counted: a request that failed with a first token and none counted had some. When the leader quarantines a
worker, each request that the engine served since the tick of its last right answers joins the incident.
Attempts that still run join it when they end, if they brought tokens.
So does a request that its engine alone reported, since its gateway was gone before it wrote of it: nothing
says what its client got.
"""

from __future__ import annotations

from msgspec import Struct

from relume.controlplane.incidents.case import Case
from relume.controlplane.incidents.incident import MOST_SERVED, ServedRequest
from relume.controlplane.stream.error_codes import NOT_COMPARED
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import RequestOutcome, RequestState

MOST_REMEMBERED = 65_536
"""Maximum number of ended attempts that are remembered, over all workers; the oldest go first."""
MOST_UNWRITTEN = 4096
"""Maximum number of requests that engines alone reported; the oldest go first."""

Engine = tuple[str, int]
"""Worker and incarnation."""


class RunningAttempt(Struct, frozen=True):
    """Where a request runs, the attempt's number, and the tokens that its client had before."""

    worker: str
    incarnation: int
    attempt: int
    delivered: int

    @property
    def engine(self) -> Engine:
        """Where it runs."""
        return self.worker, self.incarnation


class Service(Struct, eq=False):
    """An engine served a request, for the last time at `tick`."""

    request: ServedRequest
    tick: int


class ServedRequests:
    """By engine, the requests that got tokens from it."""

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._most = most
        self._tick = 0
        self._running: dict[str, RunningAttempt] = {}
        self._services: dict[tuple[str, int, str], Service] = {}
        self._of_live: dict[str, list[ServedRequest]] = {}
        self._dropped_at = -1
        """Tick of the newest service that was dropped, or not seen."""
        self._corrupt: dict[Engine, Case] = {}
        self._tokenless: dict[str, list[tuple[RunningAttempt, int]]] = {}
        """By live request, attempts that ended without a token, and when."""
        self._restored: dict[str, int] = {}
        """By live request, the last attempt that restored blocks."""
        self._unwritten: dict[str, Engine] = {}
        """By request that no replica wrote of yet, the engine that reported it."""
        self._lenders: dict[str, str] = {}
        """By live request, whose blocks it restores."""
        self._wrote: dict[str, dict[Engine, int]] = {}
        """By request, the engines that wrote its blocks, and until when."""

    def on_tick(self, event: v.Tick) -> None:
        """Time passes. What was before the first tick of a log that begins later is not known."""
        if not self._tick and event.number > 1:
            self._dropped_at = event.number - 1
        self._tick = event.number

    def on_step(self, worker: str, event: v.EngineStep) -> None:
        """An engine has new requests. What their replicas decided usually comes next, or came before."""
        for change in event.changes:
            if type(change) is not v.RequestQueued or self._is_live(change.request):
                continue
            if change.request not in self._of_live:
                self._unwritten.setdefault(change.request, (worker, event.incarnation))
        while len(self._unwritten) > MOST_UNWRITTEN:
            del self._unwritten[next(iter(self._unwritten))]

    def on_routed(self, event: v.RouteDecided) -> None:
        """The request is sent to a worker. Nothing says what an attempt before it brought, if no
        replica saw that one end."""
        self._unwritten.pop(event.request, None)
        if event.worker:
            self._left(event.request, -1)
            self._running[event.request] = RunningAttempt(
                event.worker, event.incarnation, event.attempt, event.delivered
            )

    def on_restore_started(self, event: v.RestoreStarted) -> None:
        """An attempt fetches blocks, perhaps those of another request."""
        if self._is_live(event.request):
            self._lenders[event.request] = event.lender

    def on_restored(self, event: v.RestoreDone) -> None:
        """An attempt has blocks that earlier ones wrote. Its worker may say so before the replica
        says how these ended."""
        if not self._is_live(event.request) or not event.tokens:
            return
        if lender := self._lenders.pop(event.request, ""):
            self._borrowed(event.request, lender)
        self._restored[event.request] = max(event.attempt, self._restored.get(event.request, 0))
        for attempt, tick in self._tokenless.pop(event.request, ()):
            self._note(event.request, attempt.engine, tick)

    def _is_live(self, request: str) -> bool:
        return request in self._running or request in self._tokenless

    def _borrowed(self, request: str, lender: str) -> None:
        """The request has blocks of another one: the engines that wrote them served it too."""
        wrote = dict(self._wrote.get(lender, {}))
        if (running := self._running.get(lender)) is not None:
            wrote[running.engine] = self._tick
        for engine, tick in wrote.items():
            self._note(request, engine, tick)
            self._written(request, engine, tick)

    def _written(self, request: str, engine: Engine, tick: int) -> None:
        self._wrote.setdefault(request, {})[engine] = tick
        if len(self._wrote) > self._most:
            del self._wrote[next(iter(self._wrote))]

    def on_observed(self, event: v.TransportObserved) -> None:
        """An attempt ended; its client has `delivered` tokens in all."""
        running = self._running.get(event.request)
        if running and (running.worker, running.incarnation) == (event.worker, event.incarnation):
            self._left(event.request, event.delivered)

    def on_ended(self, event: v.RequestEnded) -> None:
        """The request is over. Of some complete answers no token was counted, such as those of several
        choices."""
        is_complete = event.outcome == RequestOutcome.COMPLETED
        has_uncounted = not event.tokens and event.ttft_us >= 0
        was_running = event.request in self._running
        if (engine := self._unwritten.pop(event.request, None)) is not None:
            self._note(event.request, engine, self._tick)
        self._left(event.request, -1 if is_complete or has_uncounted else event.tokens)
        tokenless = self._tokenless.pop(event.request, [])
        if not event.detail.startswith(NOT_COMPARED):  # else its client has tokens without ids
            # It cannot have continued after such tokens.
            tokenless = tokenless[-1:] if has_uncounted and not was_running else []
        for attempt, tick in tokenless:
            self._note(event.request, attempt.engine, tick)
        self._restored.pop(event.request, None)
        self._lenders.pop(event.request, None)
        for served in self._of_live.pop(event.request, ()):
            served.state = RequestState(event.outcome)

    def blame(self, case: Case, worker: str, incarnation: int, good_tick: int) -> None:
        """The engine computed wrong results, its last right answers were at `good_tick` (-1: it
        gave none)."""
        for (name, number, _), service in self._services.items():
            if (name, number) == (worker, incarnation) and service.tick >= good_tick:
                _list(case, service.request)
        if self._dropped_at >= max(good_tick, 0):
            case.record.served_at_least = True
        self._corrupt[worker, incarnation] = case

    def acquit(self, worker: str, incarnation: int) -> None:
        """The verdict on the engine is taken back: what it serves from now on is right."""
        self._corrupt.pop((worker, incarnation), None)

    def forget(self, case: Case) -> None:
        """`case` is no more."""
        for engine in [engine for engine, other in self._corrupt.items() if other is case]:
            del self._corrupt[engine]

    def forget_worker(self, worker: str) -> None:
        """It left long ago: no verdict on it will come."""
        for key in [key for key in self._services if key[0] == worker]:
            del self._services[key]
        for request in [one for one, engine in self._unwritten.items() if engine[0] == worker]:
            del self._unwritten[request]
        for request, wrote in list(self._wrote.items()):
            for engine in [engine for engine in wrote if engine[0] == worker]:
                del wrote[engine]
            if not wrote:
                del self._wrote[request]

    def _left(self, request: str, tokens: int) -> None:
        """Its attempt is over, after `tokens` (-1: unknown) in all."""
        running = self._running.pop(request, None)
        if running is None:
            return
        self._written(request, running.engine, self._tick)
        if 0 <= tokens <= running.delivered:
            if self._restored.get(request, 0) <= running.attempt:
                self._tokenless.setdefault(request, []).append((running, self._tick))
                return
        self._note(request, running.engine, self._tick)

    def _note(self, request: str, engine: Engine, tick: int) -> None:
        """The engine served the request, until `tick`."""
        key = *engine, request
        service = self._services.pop(key, None)
        if service is None:
            service = Service(ServedRequest(request=request), tick)
            self._of_live.setdefault(request, []).append(service.request)
        service.tick = max(tick, service.tick)
        self._services[key] = service
        if (case := self._corrupt.get(key[:2])) is not None:
            _list(case, service.request)
        if len(self._services) > self._most:
            oldest = next(iter(self._services))
            self._dropped_at = self._services.pop(oldest).tick


def _list(case: Case, served: ServedRequest) -> None:
    if served.request in case.served:
        return
    case.served.add(served.request)
    case.record.served += 1
    if len(case.record.served_requests) < MOST_SERVED:
        case.record.served_requests.append(served)
