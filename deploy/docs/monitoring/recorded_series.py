"""Recording rules: series that Prometheus computes once for the dashboards and alerts that share them.

A name is `labels:metric:operations`, as Prometheus recommends: the labels that the series has, the metric
it is computed from, and how.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

WINDOW = "5m"
QUANTILES = (0.5, 0.95, 0.99)
HISTOGRAMS: dict[str, tuple[str, ...]] = {
    "time_to_first_token_seconds": (),
    "longest_gap_seconds": (),
    "room_wait_seconds": ("tier",),
    "ttft_actual_to_predicted_ratio": (),
}
"""Histograms whose quantiles are recorded, without the prefix `relume_`, and their labels beside `job`."""
FAILED_RATIO = "job:relume_requests_failed:ratio_rate5m"
WORKER_HEALTH = "job_worker_state:relume_worker_health:max"


class RecordedSeries(NamedTuple):
    """`labels`: what the rule adds to the labels of `expr`."""

    name: str
    expr: str
    meaning: str
    labels: tuple[tuple[str, str], ...] = ()


def quantile_series(metric: str) -> str:
    """The name of the series with the quantiles of one of `HISTOGRAMS`."""
    labels = "_".join(("job", *HISTOGRAMS[metric], "quantile"))
    return f"{labels}:relume_{metric}:rate{WINDOW}"


def _quantiles() -> Iterator[RecordedSeries]:
    for metric, labels in HISTOGRAMS.items():
        by = ", ".join(("job", *labels, "le"))
        rates = f"sum by ({by}) (rate(relume_{metric}_bucket[{WINDOW}]))"
        for quantile in QUANTILES:
            yield RecordedSeries(
                quantile_series(metric),
                f"histogram_quantile({quantile}, {rates})",
                f"Quantiles of `relume_{metric}` over 5 minutes",
                (("quantile", str(quantile)),),
            )


def _failed_ratio() -> RecordedSeries:
    ended = f"(sum by (job) (rate(relume_requests_total[{WINDOW}])) > 0)"
    failed = f'sum by (job) (rate(relume_requests_total{{outcome="failed"}}[{WINDOW}]))'
    return RecordedSeries(
        FAILED_RATIO,
        f"{failed} / {ended}\nor 0 * {ended}",
        "Share of ended requests that failed, over 5 minutes; absent while no request ends",
    )


RECORDED: tuple[RecordedSeries, ...] = (
    _failed_ratio(),
    RecordedSeries(
        WORKER_HEALTH,
        "max by (job, worker, state) (relume_worker_health)",
        "`relume_worker_health` of the fleet, which every replica reports alike",
    ),
    *_quantiles(),
)
