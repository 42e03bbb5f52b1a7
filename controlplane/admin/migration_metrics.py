"""What the metrics page says of live migration: what this replica planned, and its outcomes."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter

from relume.events import vocabulary as v
from relume.policies.migration import CAUSES

OUTCOMES = ("moved", "abandoned", "failed")
"""Handed over; not made, so that the request stayed; lost before it was made."""


class Migrations:
    """Counts each planned move once, by how it went."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._counter = Counter(
            "relume_migrations",
            "Running requests that were to move to another worker",
            ["outcome", "cause"],
            registry=registry,
        )
        self._planned: dict[str, tuple[int, str]] = {}
        for cause in CAUSES:
            for outcome in OUTCOMES:
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
            outcome = "moved" if event.kind == "moved" else "failed"
            self._over(event.request, event.attempt, outcome)
        elif kind is v.RequestEnded:
            self._planned.pop(event.request, None)

    def _over(self, request: str, attempt: int, outcome: str) -> None:
        planned = self._planned.get(request)
        if planned is not None and planned[0] == attempt:
            del self._planned[request]
            self._counter.labels(outcome, planned[1]).inc()
