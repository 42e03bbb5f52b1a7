"""Which requests got tokens from each engine, and until when: a verdict on what it computes dates back.

An attempt that brought tokens served its request until it ended. When the leader quarantines a
worker, each request that the engine served since the tick of its last right answers joins the
incident. Attempts that still run join it when they end, if they brought tokens.
"""

from __future__ import annotations

from msgspec import Struct

from relume.controlplane.incidents.case import Case
from relume.controlplane.incidents.incident import MOST_SERVED, ServedRequest
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import RequestState

MOST_REMEMBERED = 65_536
"""Maximum number of ended attempts that are remembered, over all workers; the oldest go first."""

Engine = tuple[str, int]
"""Worker and incarnation."""


class RunningAttempt(Struct, frozen=True):
    """Where a request runs, and the tokens that its client had before."""

    worker: str
    incarnation: int
    delivered: int


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
        """Tick of the newest service that was dropped."""
        self._corrupt: dict[Engine, Case] = {}

    def on_tick(self, event: v.Tick) -> None:
        """Time passes."""
        self._tick = event.number

    def on_routed(self, event: v.RouteDecided) -> None:
        """The request is sent to a worker. Nothing says what an attempt before it brought, if no
        replica saw that one end."""
        if event.worker:
            self._left(event.request, -1)
            self._running[event.request] = RunningAttempt(
                event.worker, event.incarnation, event.delivered
            )

    def on_observed(self, event: v.TransportObserved) -> None:
        """An attempt ended; its client has `delivered` tokens in all."""
        running = self._running.get(event.request)
        if running and (running.worker, running.incarnation) == (event.worker, event.incarnation):
            self._left(event.request, event.delivered)

    def on_ended(self, event: v.RequestEnded) -> None:
        """The request is over."""
        self._left(event.request, event.tokens)
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

    def forget(self, case: Case) -> None:
        """`case` is no more."""
        for engine in [engine for engine, other in self._corrupt.items() if other is case]:
            del self._corrupt[engine]

    def _left(self, request: str, tokens: int) -> None:
        """Its attempt is over, after `tokens` (-1: unknown) in all."""
        running = self._running.pop(request, None)
        if running is None or 0 <= tokens <= running.delivered:
            return
        key = running.worker, running.incarnation, request
        service = self._services.pop(key, None)
        if service is None:
            service = Service(ServedRequest(request=request), self._tick)
            self._of_live.setdefault(request, []).append(service.request)
        service.tick = self._tick
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
