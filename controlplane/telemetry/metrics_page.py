"""The metrics page of one replica, in Prometheus' text format."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from relume.controlplane.replica.loop import Replica
from relume.controlplane.serve_settings import ServeConfig
from relume.controlplane.telemetry import event_counters
from relume.controlplane.telemetry.state_families import ReplicaCollector
from relume.events.log.entries import Entry

CONTENT_TYPE = CONTENT_TYPE_LATEST


class Metrics:
    """A registry of its own; `note` takes the history's entries, `page` makes the text."""

    def __init__(self, replica: Replica, config: ServeConfig) -> None:
        self._stream = f"r.{config.name}"
        self.registry = CollectorRegistry()
        self._counters = [counters(self.registry) for counters in event_counters.ALL]
        self.registry.register(ReplicaCollector(replica, config))

    def note(self, entry: Entry) -> None:
        """Count one event if it is this replica's own."""
        if entry.stream == self._stream:
            for counters in self._counters:
                counters.note(entry.event)

    def page(self) -> bytes:
        """The page."""
        return generate_latest(self.registry)
