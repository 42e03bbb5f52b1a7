"""What the metrics page says of checkpoints: read from the fold when the page is made.

Every replica reports the same, as for workers: take `max by (worker)`. Figures the state
daemons count themselves are as old as their last report, ten seconds or so.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from relume.controlplane.admin.checkpoints_api import balance_percent
from relume.policies import coverage
from relume.policies.state import Fleet
from relume.policies.view import View

_GAUGES = {
    "memory_used": ("memory_bytes", "Memory its checkpoints take, page rounding included"),
    "file_used": ("file_bytes", "What lies in its file tier"),
    "blocks": ("blocks", "KV blocks it holds"),
    "requests": ("requests", "Requests it holds blocks of"),
    "envelopes": ("envelopes", "Requests it keeps as their clients sent them"),
    "envelope_bytes": ("envelope_bytes", "Bytes of these"),
}
_COUNTERS = {
    "evicted": ("evicted_blocks", "Blocks dropped for want of room"),
    "refused": ("refused_blocks", "Blocks it did not take"),
    "expired": ("expired_requests", "Requests forgotten because nobody asked for them"),
    "dropped": ("dropped_requests", "Requests whose end it was told"),
    "corrupt": ("corrupt_blocks", "Blocks found damaged"),
    "served": ("served_blocks", "Blocks given to readers"),
    "envelopes_taken": ("taken_envelopes", "Envelopes it took"),
    "envelopes_refused": ("refused_envelopes", "Envelopes it did not take"),
    "lent": ("lent_blocks", "Blocks of one request given for another's identical prefix"),
    "bytes_in": ("received_bytes", "Bytes taken from engines"),
    "bytes_out": ("served_bytes", "Bytes given to readers"),
}


def checkpoints(view: View) -> Iterator[Any]:
    """The families, empty ones included."""
    fleet = view.fleet
    label = ["worker"]
    up = GaugeMetricFamily("relume_checkpoint_daemon_up", "1 while it serves", labels=label)
    budget = GaugeMetricFamily(
        "relume_checkpoint_budget_bytes", "What its memory and its file may take", labels=label
    )
    held = GaugeMetricFamily(
        "relume_checkpoint_acknowledged_bytes",
        "Bytes of the prefixes it acknowledged, those that share blocks counted in each",
        labels=label,
    )
    gauges = {
        name: GaugeMetricFamily(f"relume_checkpoint_{told}", text, labels=label)
        for name, (told, text) in _GAUGES.items()
    }
    counters = {
        name: CounterMetricFamily(f"relume_checkpoint_{told}", text, labels=label)
        for name, (told, text) in _COUNTERS.items()
    }
    for holder in fleet.holders.values():
        who = [holder.name]
        up.add_metric(who, int(holder.alive))
        budget.add_metric(who, holder.budget_bytes)
        held.add_metric(who, holder.held_bytes)
        for name, family in (*gauges.items(), *counters.items()):
            family.add_metric(who, holder.figures.get(name, 0))
    yield from (up, budget, held)
    yield GaugeMetricFamily(
        "relume_checkpoint_balance_ratio",
        "Highest expected recovery load (Eq. 4) of a holder to the lowest; 0: fewer than two",
        value=balance_percent(view) / 100,
    )
    again = CounterMetricFamily(
        "relume_recomputed_tokens",
        "Tokens of requests sent on that neither a cache nor a checkpoint had",
        labels=label,
    )
    for known in fleet.workers.values():
        again.add_metric([known.name], known.recomputed_tokens)
    yield again
    yield from gauges.values()
    yield from counters.values()
    yield from _requests(fleet)


def _requests(fleet: Fleet) -> Iterator[Any]:
    tokens, covered, lag, requests, begun = coverage.progress(fleet)
    yield GaugeMetricFamily(
        "relume_checkpoint_lag_tokens",
        "KV tokens of running requests that their holders have not acknowledged yet",
        value=lag,
    )
    yield GaugeMetricFamily(
        "relume_checkpoint_coverage_ratio",
        "Share of the KV tokens of what runs on engines with checkpoints that a holder has",
        value=covered / tokens if tokens else 1.0,
    )
    yield GaugeMetricFamily(
        "relume_checkpoint_covered_requests_ratio",
        "Share of the requests on engines with checkpoints of whose KV blocks a holder has some",
        value=begun / requests if requests else 1.0,
    )
    restores = CounterMetricFamily(
        "relume_checkpoint_restores", "Restores by how they ended", labels=["outcome"]
    )
    for outcome in ("done", "failed"):
        restores.add_metric([outcome], fleet.restores.get(outcome, 0))
    yield restores
    saved = CounterMetricFamily(
        "relume_checkpoint_restored_tokens", "Tokens that were not computed again"
    )
    saved.add_metric([], fleet.restores.get("tokens", 0))
    yield saved
