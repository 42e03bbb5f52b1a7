"""What a dashboard is made of: its rows of panels, and the queries that panels ask Prometheus."""

from __future__ import annotations

from typing import NamedTuple

from deploy.docs.monitoring.recorded_series import HISTOGRAMS, quantile_series

RATE = "[$__rate_interval]"
JOB = '{job="$job"}'


class Panel(NamedTuple):
    """`queries`: expressions, each with its legend. `unit`: Grafana's name of it. `when`: what must happen,
    or be switched on, before it shows anything."""

    title: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    about: str = ""
    when: str = ""


class Dashboard(NamedTuple):
    """`rows`: panels by the title of their row."""

    title: str
    about: str
    rows: dict[str, tuple[Panel, ...]]


def fleet(metric: str, *by: str) -> str:
    """A gauge that every replica reports alike."""
    labels = f" by ({', '.join(by)})" if by else ""
    return f"max{labels} (relume_{metric}{JOB})"


def fleet_rate(metric: str, *by: str) -> str:
    """A counter that every replica reports alike, per second."""
    labels = f" by ({', '.join(by)})" if by else ""
    return f"max{labels} (rate(relume_{metric}{JOB}{RATE}))"


def replicas(metric: str, *by: str) -> str:
    """A gauge of each replica's own, summed."""
    labels = f" by ({', '.join(by)})" if by else ""
    return f"sum{labels} (relume_{metric}{JOB})"


def rate(metric: str, *by: str) -> str:
    """A counter of each replica's own work, per second."""
    labels = f" by ({', '.join(by)})" if by else ""
    return f"sum{labels} (rate(relume_{metric}{JOB}{RATE}))"


def quantiles(metric: str) -> tuple[tuple[str, str], ...]:
    """Median, 95th and 99th percentile of a histogram, as recorded."""
    legend = "".join(f"{{{{{label}}}}} " for label in (*HISTOGRAMS[metric], "quantile"))
    return ((f"{quantile_series(metric)}{JOB}", legend.strip()),)
