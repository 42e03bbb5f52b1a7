"""What the metrics page says of routing: which policies chose, what was found cached, what was
refused, and how far first tokens were from what was expected."""

from __future__ import annotations

from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram

from relume.events import vocabulary as v
from relume.policies.routing import RECORDED

_RATIOS = (0.25, 0.5, 0.7, 0.85, 0.95, 1.05, 1.15, 1.3, 1.5, 2, 4, 8)
OPEN = 65_536
"""So many requests are remembered until they end."""


class Routes:
    """Counts this replica's own route decisions."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._routes = Counter(
            "relume_routes", "Dispatches, by routing policy", ["policy"], registry=registry
        )
        self._refused = Counter(
            "relume_requests_shed", "Requests refused by routing, by tier", ["tier"],
            registry=registry,
        )  # fmt: skip
        self._cached = Counter(
            "relume_route_cached_tokens",
            "Prompt tokens expected to be cached where requests went",
            registry=registry,
        )
        self._ratio = Histogram(
            "relume_ttft_actual_to_predicted_ratio",
            "Time to first token as the client saw it, to the one predicted at its dispatch",
            buckets=_RATIOS,
            registry=registry,
        )
        self._predicted: dict[str, int] = {}
        for policy in RECORDED:
            self._routes.labels(policy)

    def note(self, event: Any) -> None:
        """Take one of this replica's own events."""
        kind = type(event)
        if kind is v.RouteDecided:
            if event.worker:
                self._routes.labels(event.policy).inc()
                self._cached.inc(event.cached_tokens)
                self._predicted.pop(event.request, None)
                if event.attempt == 1 and event.ttft_us > 0:
                    self._predicted[event.request] = event.ttft_us
                    if len(self._predicted) > OPEN:  # some never end here
                        del self._predicted[next(iter(self._predicted))]
            elif event.refused:
                self._refused.labels(event.tier or "standard").inc()
        elif kind is v.RequestEnded:
            predicted = self._predicted.pop(event.request, 0)
            if predicted and event.ttft_us >= 0:
                self._ratio.observe(event.ttft_us / predicted)
