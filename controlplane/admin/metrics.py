"""Prometheus metrics of one replica, fed by the fold.

Counters and histograms count what this replica itself wrote (stream `r.<name>`), so that
the sum over replicas counts everything once. What the fold holds of workers is read when
the page is made; every replica reports the same workers, so take `max by (worker)`.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from prometheus_client.registry import Collector

from relume.controlplane.admin.checkpoint_metrics import checkpoints
from relume.controlplane.admin.fleet_api import spool_bytes
from relume.controlplane.admin.history import Entry
from relume.controlplane.admin.migration_metrics import Migrations
from relume.controlplane.admin.routing_metrics import Routes
from relume.controlplane.admin.stream_metrics import Streams, kept
from relume.controlplane.admin.waiting_metrics import Waits, room
from relume.controlplane.config import ServeConfig
from relume.controlplane.history.keeper import KeeperStatus
from relume.controlplane.replica import Replica
from relume.events import vocabulary as v

CONTENT_TYPE = CONTENT_TYPE_LATEST
ENGINE_STATES = ("none", "starting", "ready", "dead")
RECOVERIES = tuple(
    "reset stall engine_dead engine_error stale refused unreachable declined".split()
)
"""Causes of a dispatch that follows a failed attempt."""

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_GAP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 30, 60)


class Metrics:
    """Own registry; `note` takes the history's entries, `page` makes the text."""

    def __init__(self, replica: Replica, config: ServeConfig) -> None:
        self._stream = f"r.{config.name}"
        self.registry = registry = CollectorRegistry()
        self._requests = Counter(
            "relume_requests", "Requests that ended, by outcome", ["outcome"], registry=registry
        )
        self._arrived = Counter(
            "relume_requests_arrived", "Requests that were accepted", registry=registry
        )
        self._attempts = Counter(
            "relume_attempts", "Dispatches to a worker, by cause", ["cause"], registry=registry
        )
        self._decisions = Counter(
            "relume_decisions", "Decisions written, by kind", ["kind"], registry=registry
        )
        self._recoveries = Counter(
            "relume_recoveries",
            "Requests sent on after a failed attempt, by how they go on",
            ["mode"],
            registry=registry,
        )
        self._observed = Counter(
            "relume_transport_failures",
            "Failed attempts seen, by kind",
            ["kind"],
            registry=registry,
        )
        self._stalls = Counter(
            "relume_stall_judgements", "Silent engines judged", ["hung"], registry=registry
        )
        self._migrations = Migrations(registry)
        self._routes = Routes(registry)
        self._streams = Streams(registry)
        self._waits = Waits(registry)
        self._tokens = Counter("relume_output_tokens", "Tokens delivered", registry=registry)
        self._ttft = Histogram(
            "relume_time_to_first_token_seconds",
            "From arrival to the first token, as the client saw it",
            buckets=_TTFT_S,
            registry=registry,
        )
        self._gap = Histogram(
            "relume_longest_gap_seconds",
            "Longest silence within one request's stream, as the client saw it",
            buckets=_GAP_S,
            registry=registry,
        )
        for outcome in ("completed", "cancelled", "failed", "rejected"):
            self._requests.labels(outcome)
        for hung in ("true", "false"):
            self._stalls.labels(hung)
        for mode in ("continue", "replay", "new"):
            self._recoveries.labels(mode)
        registry.register(_FoldCollector(replica, config))

    def note(self, entry: Entry) -> None:
        """Count one event, if it is this replica's own."""
        if entry.stream != self._stream:
            return
        event = entry.event
        kind = type(event)
        self._migrations.note(event)
        self._routes.note(event)
        self._streams.note(event)
        self._waits.note(event)
        if kind is v.RequestArrived:
            self._arrived.inc()
        elif kind is v.RouteDecided:
            self._decisions.labels("route").inc()
            if event.worker:
                self._attempts.labels(event.cause).inc()
                if event.cause in RECOVERIES:
                    self._recoveries.labels(event.mode).inc()
        elif kind is v.TransportObserved and event.kind != "moved":
            self._observed.labels(event.kind).inc()
        elif kind is v.HolderChosen:
            self._decisions.labels("holder").inc()
        elif kind is v.RecoveryPlanned:
            self._decisions.labels("plan").inc()
        elif kind is v.MigrationPlanned:
            self._decisions.labels("migration").inc()
        elif kind is v.StallJudged:
            self._decisions.labels("stall").inc()
            self._stalls.labels("true" if event.hung else "false").inc()
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

    def page(self) -> bytes:
        """Prometheus' text format."""
        return generate_latest(self.registry)


class _FoldCollector(Collector):
    """What is true now: read from the replica when asked."""

    def __init__(self, replica: Replica, config: ServeConfig) -> None:
        self._replica = replica
        self._config = config

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        replica = self._replica
        fleet, writer = replica.fleet, replica.writer
        yield _gauge("streams_live", "Requests open at this replica", len(replica.scheduler.live))
        yield _gauge("fold_revision", "Revision of the log folded so far", fleet.revision)
        yield _gauge(
            "log_silence_seconds",
            "Since the newest revision group was folded; the leader ticks, so this stays small",
            time.monotonic() - replica.last_group_at,
        )
        yield _gauge(
            "log_pending_events", "Own events not durable yet", writer.position - writer.durable
        )
        yield _gauge("log_healthy", "1 while appends land", int(writer.healthy))
        yield _gauge("spool_bytes", "Own events on disk for etcd", spool_bytes(self._config))
        trouble = getattr(writer, "spool_trouble", "")
        yield _gauge("spool_failing", "1 while the spool's disk takes nothing", int(bool(trouble)))
        yield _gauge("leader", "1 while this replica leads", int(replica.leadership.leading))
        yield _gauge("commands_open", "Commands without an answer", len(fleet.open_commands))
        yield _gauge("effects_pending", "Effects no agent applied yet", len(fleet.pending_effects))
        yield _gauge("state_changes", "Load changes folded", fleet.changes)
        if replica.upkeep is not None:
            yield from _upkeep(replica.upkeep)
        yield from self._workers()
        yield from checkpoints(replica.view)
        yield from kept(fleet)
        yield from room(replica.scheduler.waiting)

    def _workers(self) -> Iterator[Any]:
        view = self._replica.view
        label = ["worker"]
        state = GaugeMetricFamily(
            "relume_worker_engine_state",
            "1 for the state the engine is in",
            labels=[*label, "state"],
        )
        gauges = {
            name: GaugeMetricFamily(f"relume_worker_{name}", text, labels=label)
            for name, text in _WORKER_GAUGES.items()
        }
        deaths = CounterMetricFamily("relume_worker_deaths", "Engine deaths", labels=label)
        for worker in view.fleet.workers.values():
            for known in ENGINE_STATES:
                state.add_metric([worker.name, known], int(worker.engine == known))
            prefill, requests = view.load(worker)
            suspected = worker.incarnation > 0 and view.suspect(worker.name) == worker.incarnation
            values = {
                "present": int(worker.present),
                "draining": int(worker.draining),
                "suspected": int(suspected),
                "requests_running": requests - worker.waiting if requests > worker.waiting else 0,
                "requests_waiting": worker.waiting,
                "prefill_tokens_pending": prefill,
                "kv_usage_ratio": worker.kv_used / worker.kv_blocks if worker.kv_blocks else 0.0,
                "incarnation": worker.incarnation,
            }
            for name, value in values.items():
                gauges[name].add_metric([worker.name], value)
            deaths.add_metric([worker.name], worker.deaths)
        yield state
        yield from gauges.values()
        yield deaths


def _upkeep(status: KeeperStatus) -> Iterator[Any]:
    """What keeping history says; counted by the replica that leads."""
    yield _gauge("etcd_space_level", "0 calm, 1 shed, 2 alarm, 3 full", int(status.level))
    yield _gauge("etcd_database_bytes", "Largest database file", status.database_bytes)
    yield _gauge("etcd_quota_bytes", "What the file may grow to", status.quota_bytes)
    yield _gauge("archived_revision", "The log is archived up to here", status.archived)
    yield _gauge("snapshot_revision", "Newest snapshot of the fold", status.snapshot)
    yield _gauge("trimmed_revision", "The log is gone from etcd up to here", status.trimmed)
    yield _gauge("history_failing", "1 while rounds of upkeep fail", int(bool(status.failing)))
    failures = CounterMetricFamily("relume_history_failures", "Rounds of upkeep that failed")
    failures.add_metric([], status.failures)
    yield failures


_WORKER_GAUGES = {
    "present": "1 while its agent owns the worker's stream",
    "draining": "1 while it gets nothing new",
    "suspected": "1 while this replica distrusts its engine",
    "requests_running": "Requests it holds beyond those waiting",
    "requests_waiting": "Requests its scheduler has not admitted",
    "prefill_tokens_pending": "Prompt tokens it has not computed",
    "kv_usage_ratio": "Share of its KV blocks in use",
    "incarnation": "Engine starts so far",
}


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"relume_{name}", text, value=value)
