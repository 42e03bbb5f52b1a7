"""What the metrics page says of how prompts are counted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from relume.controlplane.gateway.tokens import Tokens


class TokenCollector(Collector):
    """Reads a gateway's counters when the page is made."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def collect(self) -> Iterator[Any]:
        """See Collector."""
        counters = self._tokens.counters
        prompts = CounterMetricFamily(
            "relume_prompts_counted",
            "Prompts by how their tokens were counted: by the tokenizer, or estimated because "
            "it cannot (unusable), was late, or was away or overloaded",
            labels=["how"],
        )
        for how in ("counted", "unusable", "late", "away"):
            prompts.add_metric([how], getattr(counters, how))
        yield prompts
        yield CounterMetricFamily(
            "relume_tokenizer_restarts",
            "Times the tokenising process ended and was started again",
            value=counters.restarts,
        )
