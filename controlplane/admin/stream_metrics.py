"""What the metrics page says of resumable client streams.

`Streams` counts what this replica wrote; `kept` reads what engines last told of the streams
they keep, and state daemons of the envelopes (every replica reports the same: `max by (worker)`).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

from relume.events import vocabulary as v
from relume.policies.state import Fleet

_GAUGES = {
    "streams": ("kept_streams", "Streams kept for clients who may come back"),
    "bytes": ("kept_stream_bytes", "Bytes of them that are buffered, envelopes included"),
    "detached": ("detached_streams", "Of these, streams nobody is connected to"),
    "detached_bytes": ("detached_stream_bytes", "Bytes buffered of those"),
}
_COUNTERS = {
    "taken_up": ("stream_attaches", "Connections that took a kept stream up"),
    "cut_short": ("stream_attaches_short", "Of these, those that found payload dropped"),
}
_ENDS = {"expired": "grace", "refused_bytes": "bytes", "refused_streams": "streams"}
"""Ends of detached streams: by time, or by a bound (`--resume-total-mb`, `--resume-streams`)."""
_ENVELOPES = ("kept", "refused", "too_large")


class Streams:
    """Counts returns of clients, and those that did not return."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._returns = Counter(
            "relume_client_returns",
            "Clients that came back to their streams, to the replica they left or to another",
            ["replica"],
            registry=registry,
        )
        self._expired = Counter(
            "relume_client_streams_expired",
            "Streams ended by this replica because their clients did not come back",
            registry=registry,
        )
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
        elif kind is v.TimerFired and event.timer == "grace":
            self._expired.inc()
        elif kind is v.RequestEnded:
            self._own.discard(event.request)


def kept(fleet: Fleet) -> Iterator[Any]:
    """The families, empty ones included."""
    label = ["worker"]
    gauges = {
        name: GaugeMetricFamily(f"relume_{told}", text, labels=label)
        for name, (told, text) in _GAUGES.items()
    }
    counters = {
        name: CounterMetricFamily(f"relume_{told}", text, labels=label)
        for name, (told, text) in _COUNTERS.items()
    }
    ends = CounterMetricFamily(
        "relume_detached_streams_dropped",
        "Streams erased while their clients were away, by the bound they met",
        labels=[*label, "bound"],
    )
    envelopes = CounterMetricFamily(
        "relume_envelopes",
        "Requests given to their holders, by what became of them",
        labels=[*label, "outcome"],
    )
    for worker in fleet.workers.values():
        told = worker.streams
        for name, family in (*gauges.items(), *counters.items()):
            family.add_metric([worker.name], told.get(name, 0))
        for name, bound in _ENDS.items():
            ends.add_metric([worker.name, bound], told.get(name, 0))
        for name in _ENVELOPES:
            envelopes.add_metric([worker.name, name], told.get(f"envelopes_{name}", 0))
    yield from (*gauges.values(), *counters.values(), ends, envelopes)
