"""Metrics that are read from the replica when the page is made: what is true now.

What state daemons and engines count themselves is as old as their last report, about ten
seconds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from msgspec import UnsetType
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from relume.controlplane.admin.checkpoints_api import balance_percent
from relume.controlplane.admin.fleet_api import spool_bytes
from relume.controlplane.admin.models import degradation_of
from relume.controlplane.gateway.openai.token_counts import Tokens
from relume.controlplane.history.history_keeper import KeeperStatus
from relume.controlplane.incidents.incident import Incident
from relume.controlplane.replica.admission import ReplicaAdmission
from relume.controlplane.replica.loop import Replica
from relume.controlplane.serve_settings import ServeConfig
from relume.controlplane.telemetry.metric_table import family
from relume.events.vocabulary.enums import (
    BreakerState,
    EnginePhase,
    FailedPart,
    FailureClass,
    HealthState,
)
from relume.policies.health.health_life import breaker_of
from relume.policies.health.health_state import WorkerHealth
from relume.policies.spares import spare_decisions
from relume.policies.state import coverage
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.overlay.view import View

_DAEMON_REPORTS = {
    "memory_used": "checkpoint_memory_bytes",
    "file_used": "checkpoint_file_bytes",
    "blocks": "checkpoint_blocks",
    "requests": "checkpoint_requests",
    "envelopes": "checkpoint_envelopes",
    "envelope_bytes": "checkpoint_envelope_bytes",
    "evicted": "checkpoint_evicted_blocks",
    "refused": "checkpoint_refused_blocks",
    "expired": "checkpoint_expired_requests",
    "dropped": "checkpoint_dropped_requests",
    "corrupt": "checkpoint_corrupt_blocks",
    "served": "checkpoint_served_blocks",
    "envelopes_taken": "checkpoint_taken_envelopes",
    "envelopes_refused": "checkpoint_refused_envelopes",
    "lent": "checkpoint_lent_blocks",
    "bytes_in": "checkpoint_received_bytes",
    "bytes_out": "checkpoint_served_bytes",
}
"""What a state daemon reports, and the metric it becomes."""
_STREAM_REPORTS = {
    "streams": "kept_streams",
    "bytes": "kept_stream_bytes",
    "detached": "detached_streams",
    "detached_bytes": "detached_stream_bytes",
    "taken_up": "stream_attaches",
    "cut_short": "stream_attaches_short",
}
"""What an engine reports of its stream buffers, and the metric it becomes."""
_Series = tuple[str, tuple[str, ...]]
_DROPPED = {"expired": "grace", "refused_bytes": "bytes", "refused_streams": "streams"}
_ENVELOPES = ("kept", "refused", "too_large")

COUNTED_HOW = ("counted", "unusable", "late", "away")
"""How the tokens of a prompt were counted: values of the label `how`, and fields of the counters."""


class ReplicaCollector(Collector):
    """Everything about one replica and the fleet as it sees it."""

    def __init__(self, replica: Replica, config: ServeConfig) -> None:
        self._replica = replica
        self._config = config
        self._risen = RisenCounters()

    def describe(self) -> list[Any]:
        return []

    def collect(self) -> Iterator[Any]:
        replica = self._replica
        fleet, writer = replica.fleet, replica.writer
        values = {
            "streams_live": len(replica.scheduler.live),
            "fold_revision": fleet.revision,
            "log_silence_seconds": time.monotonic() - replica.last_group_at,
            "log_pending_events": writer.position - writer.durable,
            "log_healthy": int(writer.healthy),
            "spool_bytes": spool_bytes(self._config),
            "spool_failing": int(bool(getattr(writer, "spool_trouble", ""))),
            "leader": int(replica.leadership.leading),
            "commands_open": len(fleet.open_commands),
            "effects_pending": len(fleet.pending_effects),
            "state_changes": fleet.changes,
            "foreign_keys": len(replica.foreign_keys),
            "refused_notices": replica.refused_notices,
        }
        yield from _plain(values)
        if replica.upkeep is not None:
            yield from history(replica.upkeep)
        yield from workers(replica.view)
        yield from recoveries(fleet, replica.incidents.incidents)
        yield from degradation(fleet)
        yield from spares(fleet)
        yield from self._risen.of([*checkpoints(replica.view), *streams(fleet)])
        yield from queue(replica.scheduler.waiting)


class RisenCounters:
    """Counters of what engines and state daemons count themselves, which begin again at 0 with each
    process: here they go on from the last value on the page. A worker that the fleet forgot
    begins again."""

    def __init__(self) -> None:
        self._counted: dict[_Series, tuple[float, float]] = {}
        """Of each series, the value of earlier processes and the last of this one."""

    def of(self, families: Iterable[Any]) -> Iterator[Any]:
        """The families, with counters that do not fall."""
        counted: dict[_Series, tuple[float, float]] = {}
        for found in families:
            if isinstance(found, CounterMetricFamily):
                for at, sample in enumerate(found.samples):
                    series = sample.name, tuple(sample.labels.values())
                    before, last = self._counted.get(series, (0.0, 0.0))
                    if sample.value < last:
                        before += last
                    counted[series] = before, sample.value
                    found.samples[at] = sample._replace(value=before + sample.value)
            yield found
        self._counted = counted


class TokenCollector(Collector):
    """How the gateway counts prompts."""

    def __init__(self, tokens: Tokens) -> None:
        self._tokens = tokens

    def collect(self) -> Iterator[Any]:
        """See Collector."""
        counters = self._tokens.counters
        prompts = family("prompts_counted")
        for how in COUNTED_HOW:
            prompts.add_metric([how], getattr(counters, how))
        yield prompts
        yield family("tokenizer_restarts", counters.restarts)


def _plain(values: Mapping[str, float]) -> Iterator[Any]:
    for name, value in values.items():
        yield family(name, value)


def history(status: KeeperStatus) -> Iterator[Any]:
    """Snapshots, archive and etcd's space; the replica that leads keeps them."""
    yield from _plain(
        {
            "etcd_space_level": int(status.level),
            "etcd_database_bytes": status.database_bytes,
            "etcd_quota_bytes": status.quota_bytes,
            "archived_revision": status.archived,
            "snapshot_revision": status.snapshot,
            "trimmed_revision": status.trimmed,
            "history_failing": int(bool(status.failing)),
            "history_failures": status.failures,
        }
    )


def workers(view: View) -> Iterator[Any]:
    """State and load of each worker."""
    state = family("worker_engine_state")
    families: dict[str, Any] = {name: family(f"worker_{name}") for name in _WORKER_VALUES}
    health, failure, breaker = map(family, ("worker_health", "worker_failure", "worker_breaker"))
    for worker in view.fleet.workers.values():
        found = WorkerHealth() if isinstance(worker.health, UnsetType) else worker.health
        for one in HealthState:
            health.add_metric([worker.name, one], int(found.state == one))
        for kind in FailureClass:
            if kind:
                failure.add_metric([worker.name, kind], int(found.failure == kind))
        for position in BreakerState:
            open_ = breaker_of(found.state) == position
            breaker.add_metric([worker.name, position], int(open_))
        for known in EnginePhase:
            state.add_metric([worker.name, known], int(worker.engine == known))
        for name, value in zip(_WORKER_VALUES, _worker_values(view, worker), strict=True):
            families[name].add_metric([worker.name], value)
    withheld = family("verdicts_withheld")
    if not isinstance(view.fleet.withheld, UnsetType):
        for model, names in view.fleet.withheld.items():
            withheld.add_metric([model], len(names))
    unreadable = family("unreadable_records")
    for stream, count in _unreadable(view.fleet).items():
        unreadable.add_metric([stream], count)
    yield from (state, health, failure, breaker, withheld, unreadable)
    yield from families.values()


def _unreadable(fleet: Fleet) -> dict[str, int]:
    """Unreadable records by stream; 0 where there are none, so that the first one is an increase."""
    found = dict.fromkeys(fleet.streams, 0)
    if not isinstance(fleet.unreadable, UnsetType):
        found |= {stream: records.count for stream, records in fleet.unreadable.items()}
    return found


_WORKER_VALUES = (
    "present",
    "draining",
    "suspected",
    "requests_running",
    "requests_waiting",
    "prefill_tokens_pending",
    "kv_usage_ratio",
    "incarnation",
    "deaths",
)


def _worker_values(view: View, worker: Worker) -> tuple[float, ...]:
    """Values in the order of `_WORKER_VALUES`."""
    prefill, requests = view.load(worker)
    suspected = worker.incarnation > 0 and view.suspect(worker.name) == worker.incarnation
    return (
        int(worker.present),
        int(worker.drains),
        int(suspected),
        max(requests - worker.waiting, 0),
        worker.waiting,
        prefill,
        worker.kv_used / worker.kv_blocks if worker.kv_blocks else 0.0,
        worker.incarnation,
        worker.deaths,
    )


def recoveries(fleet: Fleet, incidents: Iterable[Incident]) -> Iterator[Any]:
    """How each worker's capacity came back after its latest failure that is over."""
    latest = {
        record.name: record
        for record in incidents
        if record.part == FailedPart.WORKER and record.capacity_back_ms >= 0
    }
    seconds, sizes = family("worker_recovery_seconds"), family("worker_recovery_bytes")
    for name in fleet.workers.keys() & latest.keys():
        record = latest[name]
        for stage, at_ms in (
            ("ready", record.capacity_back_ms),
            ("first_token", record.first_token_ms),
            ("peak", record.peak_ms),
        ):
            if at_ms >= 0:
                seconds.add_metric([name, stage], max(at_ms - record.began_ms, 0) / 1000)
        if record.tier:
            sizes.add_metric([name, "reloaded"], record.reloaded_bytes)
            sizes.add_metric([name, "reused"], record.reused_bytes)
        sizes.add_metric([name, "moved"], record.moved_bytes)
    yield from (seconds, sizes)


def degradation(fleet: Fleet) -> Iterator[Any]:
    """Level, capacity and demand of each model."""
    level, wanted = family("degradation_level"), family("workers_wanted")
    capacity = family("capacity_requests_per_second")
    demand = family("demand_requests_per_second")
    for found in degradation_of(fleet).models:
        level.add_metric([found.model], found.level)
        wanted.add_metric([found.model], found.wanted_workers)
        if found.known:
            capacity.add_metric([found.model], found.usable_requests_s)
            demand.add_metric([found.model], found.demand_requests_s)
    yield from (level, wanted, capacity, demand)


def spares(fleet: Fleet) -> Iterator[Any]:
    """Spares of each model, and how many it should have."""
    spare, due = family("spare_workers"), family("spare_workers_due")
    config = spare_decisions.leader_config(fleet)
    for model, known in spare_decisions.models_of(fleet).items():
        spare.add_metric([model], len(known.workers))
        due.add_metric([model], spare_decisions.figures_of(fleet, model, config).due)
    yield from (spare, due)


def checkpoints(view: View) -> Iterator[Any]:
    """State daemons, coverage and restores; families without samples included."""
    fleet = view.fleet
    up, budget = family("checkpoint_daemon_up"), family("checkpoint_budget_bytes")
    held = family("checkpoint_acknowledged_bytes")
    reported = {key: family(name) for key, name in _DAEMON_REPORTS.items()}
    for holder in fleet.holders.values():
        labels = [holder.name]
        up.add_metric(labels, int(holder.alive))
        budget.add_metric(labels, holder.budget_bytes)
        held.add_metric(labels, holder.held_bytes)
        for key, found in reported.items():
            found.add_metric(labels, holder.figures.get(key, 0))
    yield from (up, budget, held, *reported.values())
    yield family("checkpoint_balance_ratio", balance_percent(view) / 100)
    recomputed = family("recomputed_tokens")
    for worker in fleet.workers.values():
        recomputed.add_metric([worker.name], worker.recomputed_tokens)
    yield recomputed
    yield from _coverage(fleet)


def _coverage(fleet: Fleet) -> Iterator[Any]:
    tokens, covered, lag, requests, begun = coverage.progress(fleet)
    yield from _plain(
        {
            "checkpoint_lag_tokens": lag,
            "checkpoint_coverage_ratio": covered / tokens if tokens else 1.0,
            "checkpoint_covered_requests_ratio": begun / requests if requests else 1.0,
            "checkpoint_restored_tokens": fleet.restores.get("tokens", 0),
        }
    )
    restores = family("checkpoint_restores")
    for outcome in ("done", "failed"):
        restores.add_metric([outcome], fleet.restores.get(outcome, 0))
    yield restores


def streams(fleet: Fleet) -> Iterator[Any]:
    """Stream buffers of engines and the envelopes they sent."""
    reported = {key: family(name) for key, name in _STREAM_REPORTS.items()}
    dropped, envelopes = family("detached_streams_dropped"), family("envelopes")
    for worker in fleet.workers.values():
        for key, found in reported.items():
            found.add_metric([worker.name], worker.streams.get(key, 0))
        for key, bound in _DROPPED.items():
            dropped.add_metric([worker.name, bound], worker.streams.get(key, 0))
        for outcome in _ENVELOPES:
            count = worker.streams.get(f"envelopes_{outcome}", 0)
            envelopes.add_metric([worker.name, outcome], count)
    yield from (*reported.values(), dropped, envelopes)


def queue(waiting: ReplicaAdmission) -> Iterator[Any]:
    """The admission queue as it is now."""
    depth, tokens = family("room_requests"), family("room_tokens")
    for tier, requests, charged in waiting.queue.depths():
        depth.add_metric([tier], requests)
        tokens.add_metric([tier], charged)
    yield from (depth, tokens, family("room_bytes", waiting.queue.size))
