"""Metrics that count what this replica wrote into its own log stream.

Each class takes the replica's own events one at a time with `note`.
"""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry

from relume.controlplane.telemetry.metric_table import counter, histogram
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import (
    AttemptMode,
    MigrationCause,
    RequestOutcome,
    TimerKind,
    TransportKind,
)
from relume.policies.admission.admission_queue import REASONS
from relume.policies.routing.choose_worker import RECORDED
from relume.policies.routing.routing_settings import TIERS

OPEN = 65_536
"""Maximum number of requests remembered until they end; some never end at this replica."""
RECOVERIES = tuple(
    "reset stall engine_dead engine_error stale refused unreachable declined corrupt".split()
)
"""Causes of a dispatch that follows a failed attempt."""
MIGRATION_OUTCOMES = ("moved", "abandoned", "failed")

_DECISIONS: dict[type, str] = {
    v.RouteDecided: "route",
    v.HolderChosen: "holder",
    v.RecoveryPlanned: "plan",
    v.MigrationPlanned: "migration",
    v.StallJudged: "stall",
    v.StreamJudged: "overdue",
    v.CrossCheckDecided: "cross_check",
}


class RequestCounters:
    """Requests, attempts, decisions, recoveries and what clients saw."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._requests = counter(registry, "requests")
        self._arrived = counter(registry, "requests_arrived")
        self._attempts = counter(registry, "attempts")
        self._decisions = counter(registry, "decisions")
        self._recoveries = counter(registry, "recoveries")
        self._observed = counter(registry, "transport_failures")
        self._stalls = counter(registry, "stall_judgements")
        self._cross_checks = counter(registry, "cross_checks")
        self._tokens = counter(registry, "output_tokens")
        self._ttft = histogram(registry, "time_to_first_token_seconds")
        self._gap = histogram(registry, "longest_gap_seconds")
        for outcome in RequestOutcome:
            self._requests.labels(outcome)
        for hung in ("true", "false"):
            self._stalls.labels(hung)
        for result in ("equal", "different", "none"):
            self._cross_checks.labels(result)
        for mode in (AttemptMode.CONTINUE, AttemptMode.REPLAY, AttemptMode.NEW):
            self._recoveries.labels(mode)

    def note(self, event: Any) -> None:
        """Take one of this replica's own events."""
        kind = type(event)
        if (decision := _DECISIONS.get(kind)) is not None:
            self._decisions.labels(decision).inc()
        if kind is v.RequestArrived:
            self._arrived.inc()
        elif kind is v.RouteDecided:
            if event.worker:
                self._attempts.labels(event.cause).inc()
                if event.cause in RECOVERIES:
                    self._recoveries.labels(event.mode).inc()
        elif kind is v.TransportObserved and event.kind != TransportKind.MOVED:
            self._observed.labels(event.kind).inc()
        elif kind is v.StallJudged:
            self._stalls.labels("true" if event.hung else "false").inc()
        elif kind is v.CrossChecked:
            result = "equal" if event.differs < 0 else "different"
            self._cross_checks.labels("none" if event.error else result).inc()
        elif kind is v.RequestEnded:
            self._ended(event)

    def _ended(self, event: v.RequestEnded) -> None:
        self._requests.labels(event.outcome).inc()
        if event.tokens > 0:
            self._tokens.inc(event.tokens)
        if event.ttft_us >= 0:
            self._ttft.observe(event.ttft_us / 1e6)
        if event.longest_gap_us >= 0:
            self._gap.observe(event.longest_gap_us / 1e6)


class QueueCounters:
    """Requests in the admission queue: how long they waited, and which were rejected."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._held = counter(registry, "requests_held")
        self._refused = counter(registry, "room_refusals")
        self._waited = histogram(registry, "room_wait_seconds")
        self._since: dict[str, tuple[int, str]] = {}
        for tier in TIERS:
            self._held.labels(tier)
            self._waited.labels(tier)
            for reason in REASONS:
                self._refused.labels(reason, tier)

    def note(self, event: Any) -> None:
        """Take one of this replica's own events."""
        kind = type(event)
        if kind is v.RequestHeld:
            self._held.labels(event.tier).inc()
            self._since[event.request] = event.at_us, event.tier
            if len(self._since) > OPEN:  # a client that returns to another replica ends there
                del self._since[next(iter(self._since))]
        elif kind is v.RequestShed:
            self._since.pop(event.request, None)
            self._refused.labels(event.reason, event.tier).inc()
        elif kind is v.RequestEnded:
            self._since.pop(event.request, None)
        elif kind is v.RouteDecided and event.worker and event.request in self._since:
            since_us, tier = self._since.pop(event.request)
            self._waited.labels(tier).observe(max(event.at_us - since_us, 0) / 1e6)


class RouteCounters:
    """Route decisions, and how far first tokens were from their prediction."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._routes = counter(registry, "routes")
        self._refused = counter(registry, "requests_shed")
        self._cached = counter(registry, "route_cached_tokens")
        self._ratio = histogram(registry, "ttft_actual_to_predicted_ratio")
        self._predicted: dict[str, int] = {}
        for policy in RECORDED:
            self._routes.labels(policy)

    def note(self, event: Any) -> None:
        """Take one of this replica's own events."""
        kind = type(event)
        if kind is v.RouteDecided:
            if event.worker:
                self._dispatched(event)
            elif event.refused:
                self._refused.labels(event.tier or "standard").inc()
        elif kind is v.RequestEnded:
            predicted = self._predicted.pop(event.request, 0)
            if predicted and event.ttft_us >= 0:
                self._ratio.observe(event.ttft_us / predicted)

    def _dispatched(self, event: v.RouteDecided) -> None:
        self._routes.labels(event.policy).inc()
        self._cached.inc(event.cached_tokens)
        self._predicted.pop(event.request, None)
        if event.attempt == 1 and event.ttft_us > 0:
            self._predicted[event.request] = event.ttft_us
            if len(self._predicted) > OPEN:
                del self._predicted[next(iter(self._predicted))]


class MigrationCounters:
    """Each planned migration once, by its outcome."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counter = counter(registry, "migrations")
        self._planned: dict[str, tuple[int, str]] = {}
        for cause in MigrationCause:
            for outcome in MIGRATION_OUTCOMES:
                self._counter.labels(outcome, cause)

    def note(self, event: Any) -> None:
        """Take one of this replica's own events."""
        kind = type(event)
        if kind is v.MigrationPlanned:
            for choice in event.choices:
                if choice.chosen >= 0:
                    self._planned[choice.request] = choice.attempt, event.cause
        elif kind is v.MigrationAbandoned:
            self._over(event.request, event.attempt, "abandoned")
        elif kind is v.TransportObserved:
            outcome = "moved" if event.kind == TransportKind.MOVED else "failed"
            self._over(event.request, event.attempt, outcome)
        elif kind is v.RequestEnded:
            self._planned.pop(event.request, None)

    def _over(self, request: str, attempt: int, outcome: str) -> None:
        planned = self._planned.get(request)
        if planned is not None and planned[0] == attempt:
            del self._planned[request]
            self._counter.labels(outcome, planned[1]).inc()


class ResumptionCounters:
    """Clients of resumable streams that returned, and those that did not."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._returns = counter(registry, "client_returns")
        self._expired = counter(registry, "client_streams_expired")
        self._own: set[str] = set()
        for replica in ("same", "other"):
            self._returns.labels(replica)

    def note(self, event: Any) -> None:
        """Take one of this replica's own events."""
        kind = type(event)
        if kind is v.RequestArrived and event.resumable:
            self._own.add(event.request)
        elif kind is v.ClientReturned:
            self._returns.labels("same" if event.request in self._own else "other").inc()
            self._own.add(event.request)
        elif kind is v.TimerFired and event.timer == TimerKind.GRACE:
            self._expired.inc()
        elif kind is v.RequestEnded:
            self._own.discard(event.request)


ALL = (RequestCounters, QueueCounters, RouteCounters, MigrationCounters, ResumptionCounters)
