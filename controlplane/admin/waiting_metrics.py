"""What the metrics page says of the waiting room: who waits, how long they did, who was refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import GaugeMetricFamily

from relume.controlplane.waiting import Waiting
from relume.events import vocabulary as v
from relume.policies.routing_settings import TIERS
from relume.policies.waiting import REASONS

OPEN = 65_536
"""So many waits are remembered until they end."""
_WAIT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Waits:
    """Counts what this replica itself decided about its room."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._held = Counter(
            "relume_requests_held", "Requests that had to wait for a worker, by tier", ["tier"],
            registry=registry,
        )  # fmt: skip
        self._refused = Counter(
            "relume_room_refusals", "Requests the waiting room refused, by reason and tier",
            ["reason", "tier"], registry=registry,
        )  # fmt: skip
        self._waited = Histogram(
            "relume_room_wait_seconds", "Waits for a worker that ended with one, by tier", ["tier"],
            buckets=_WAIT_S, registry=registry,
        )  # fmt: skip
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
            if len(self._since) > OPEN:  # clients who went elsewhere leave without an end here
                del self._since[next(iter(self._since))]
        elif kind is v.RequestShed:
            self._since.pop(event.request, None)
            self._refused.labels(event.reason, event.tier).inc()
        elif kind is v.RequestEnded:
            self._since.pop(event.request, None)
        elif kind is v.RouteDecided and event.worker and event.request in self._since:
            since_us, tier = self._since.pop(event.request)
            self._waited.labels(tier).observe(max(event.at_us - since_us, 0) / 1e6)


def room(waiting: Waiting) -> Iterator[Any]:
    """Who waits now."""
    depth = GaugeMetricFamily(
        "relume_room_requests", "Requests that wait for a worker, by tier", labels=["tier"]
    )
    tokens = GaugeMetricFamily(
        "relume_room_tokens", "Tokens they are charged, by tier", labels=["tier"]
    )
    for tier, requests, charged in waiting.room.depths():
        depth.add_metric([tier], requests)
        tokens.add_metric([tier], charged)
    yield depth
    yield tokens
    yield GaugeMetricFamily(
        "relume_room_bytes", "Bytes of bodies that wait", value=waiting.room.size
    )
