"""Every metric of the control plane: name, kind, labels, unit and help in one table.

The metrics page is made from this table, and so is docs/operations/metrics.md. A counter is
exported with the suffix `_total`, as Prometheus expects.

Scope says how to sum. REPLICA: a replica counts only what it did itself; sum over replicas.
FLEET: every replica reports the same; take the maximum over replicas.
"""

from __future__ import annotations

from typing import Any

from msgspec import Struct
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

PREFIX = "relume_"
COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"
REPLICA, FLEET = "replica", "fleet"

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)
_GAP_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2, 3, 5, 10, 30, 60)
_RATIOS = (0.25, 0.5, 0.7, 0.85, 0.95, 1.05, 1.15, 1.3, 1.5, 2, 4, 8)


class Metric(Struct, frozen=True, kw_only=True):
    """One metric. `name` has neither the prefix `relume_` nor the suffix `_total`."""

    name: str
    kind: str
    help: str
    labels: tuple[str, ...] = ()
    unit: str = ""
    scope: str = REPLICA
    buckets: tuple[float, ...] = ()

    @property
    def exported(self) -> tuple[str, ...]:
        """The names of its series on the page."""
        full = PREFIX + self.name
        if self.kind == COUNTER:
            return (f"{full}_total",)
        if self.kind == HISTOGRAM:
            return f"{full}_bucket", f"{full}_sum", f"{full}_count"
        return (full,)


def _m(
    name: str, kind: str, help: str, *labels: str, unit: str = "", scope: str = REPLICA
) -> Metric:
    return Metric(name=name, kind=kind, help=help, labels=labels, unit=unit, scope=scope)


def _h(name: str, help: str, buckets: tuple[float, ...], *labels: str, unit: str = "s") -> Metric:
    return Metric(name=name, kind=HISTOGRAM, help=help, labels=labels, unit=unit, buckets=buckets)


def _w(name: str, kind: str, help: str, *labels: str, unit: str = "") -> Metric:
    """A metric of the whole fleet, by worker."""
    return _m(name, kind, help, "worker", *labels, unit=unit, scope=FLEET)


_ROWS = (
    # requests
    _m("requests", COUNTER, "Ended requests by outcome", "outcome"),
    _m("requests_arrived", COUNTER, "Accepted requests"),
    _m("streams_live", GAUGE, "Open requests"),
    _m("output_tokens", COUNTER, "Tokens delivered to clients", unit="tokens"),
    _h("time_to_first_token_seconds", "Time from arrival to the first token, seen by the client", _TTFT_S),
    _h("longest_gap_seconds", "Longest silence within a stream, seen by the client", _GAP_S),
    # decisions and recovery
    _m("attempts", COUNTER, "Dispatches to a worker by cause", "cause"),
    _m("decisions", COUNTER, "Recorded decisions by kind", "kind"),
    _m("recoveries", COUNTER, "Dispatches after a failed attempt by how the request continues", "mode"),
    _m("transport_failures", COUNTER, "Observed failures of attempts by kind", "kind"),
    _m("stall_judgements", COUNTER, "Judgements of silent engines; hung is true or false", "hung"),
    _m("cross_checks", COUNTER,
       "Finished requests that another engine answered again: equal, different, or none (no answer)",
       "result"),
    _m("migrations", COUNTER,
       "Planned migrations of running requests: moved, abandoned (the request stayed), or failed "
       "(its engine died first)", "outcome", "cause"),
    # routing
    _m("routes", COUNTER, "Dispatches by routing policy", "policy"),
    _m("requests_shed", COUNTER,
       "Requests rejected because no worker was predicted to meet the TTFT goal of their tier",
       "tier"),
    _m("route_cached_tokens", COUNTER,
       "Prompt tokens predicted to be in the prefix cache of the chosen worker", unit="tokens"),
    _h("ttft_actual_to_predicted_ratio", "Observed TTFT relative to the TTFT predicted at dispatch",
       _RATIOS, unit="ratio"),
    # admission queue
    _m("requests_held", COUNTER, "Requests that were queued for a worker by tier", "tier"),
    _m("room_refusals", COUNTER, "Requests rejected by the admission queue by reason and tier", "reason", "tier"),
    _h("room_wait_seconds", "Time in the admission queue of requests that got a worker", _TTFT_S, "tier"),
    _m("room_requests", GAUGE, "Requests in the admission queue by tier", "tier"),
    _m("room_tokens", GAUGE, "Tokens charged to queued requests by tier", "tier", unit="tokens"),
    _m("room_bytes", GAUGE, "Size of the queued bodies", unit="bytes"),
    # token counts
    _m("prompts_counted", COUNTER,
       "Prompts by how their tokens were counted: counted by the tokenizer, or estimated because "
       "it cannot (unusable), was late, or was away or overloaded", "how"),
    _m("tokenizer_restarts", COUNTER, "Restarts of the tokenizer process"),
    # the log
    _m("fold_revision", GAUGE, "Newest folded revision of the log"),
    _m("log_silence_seconds", GAUGE,
       "Time since the newest revision was folded; small while a leader ticks", unit="s"),
    _m("log_pending_events", GAUGE, "Own events that are not durable in etcd yet"),
    _m("log_healthy", GAUGE, "1 while etcd takes this replica's events"),
    _m("spool_bytes", GAUGE, "Size of own events on disk that wait for etcd", unit="bytes"),
    _m("spool_failing", GAUGE, "1 while the disk of the spool cannot be written"),
    _m("leader", GAUGE, "1 while this replica leads"),
    _m("state_changes", GAUGE, "Changes of worker load that were folded", scope=FLEET),
    _m("commands_open", GAUGE, "Operator commands without an answer", scope=FLEET),
    _m("effects_pending", GAUGE, "Effects that no agent has applied yet", scope=FLEET),
    # history; present on the replica that leads
    _m("etcd_space_level", GAUGE, "Space in etcd: 0 normal, 1 trimming early, 2 alarm, 3 full"),
    _m("etcd_database_bytes", GAUGE, "Size of the largest database file of etcd", unit="bytes"),
    _m("etcd_quota_bytes", GAUGE, "Maximum size of that file", unit="bytes"),
    _m("archived_revision", GAUGE, "Newest archived revision of the log"),
    _m("snapshot_revision", GAUGE, "Revision of the newest snapshot"),
    _m("trimmed_revision", GAUGE, "Newest revision that was removed from etcd"),
    _m("history_failing", GAUGE, "1 while snapshots, archiving or trimming fail"),
    _m("history_failures", COUNTER, "Failed rounds of snapshots, archiving and trimming"),
    # workers
    _w("worker_engine_state", GAUGE, "1 for the state the engine is in, 0 for the others", "state"),
    _w("worker_present", GAUGE, "1 while the worker's agent owns its log stream"),
    _w("worker_draining", GAUGE, "1 while the worker drains"),
    _m("worker_suspected", GAUGE, "1 while this replica suspects the worker's engine", "worker"),
    _w("worker_health", GAUGE,
       "1 for the health that the leader decided for the worker, 0 for the others", "state"),
    _w("worker_failure", GAUGE,
       "1 for the class of failure that the worker's health is decided by, 0 for the others", "failure"),
    _w("worker_breaker", GAUGE, "1 for the state of the worker's circuit breaker, 0 for the others", "state"),
    _m("verdicts_withheld", GAUGE,
       "Number of workers that fail at once, while these are too many for a breaker to open", "model",
       scope=FLEET),
    _m("foreign_keys", GAUGE,
       "Keys in the log's prefix that Relume does not write, which this replica met and ignores; its log "
       "names each"),
    _m("refused_notices", COUNTER,
       "Connections for death notices that this replica closed: what came on them is no notice, or is far "
       "ahead of the log; its log says why"),
    _m("unreadable_records", COUNTER,
       "Records of a stream of the log that this build cannot read", "stream", scope=FLEET),
    _m("degradation_level", GAUGE,
       "Level of degradation of the model: 0 normal, 1 shorter answers, 2 no batch tier, 3 later first "
       "tokens, 4 no new requests; absent with degradation off", "model", scope=FLEET),
    _m("capacity_requests_per_second", GAUGE,
       "Requests that the workers of the model can compute and that count as capacity; absent while "
       "unknown", "model", unit="requests/s", scope=FLEET),
    _m("demand_requests_per_second", GAUGE,
       "Requests for the model that arrive, refused ones included; absent while unknown", "model",
       unit="requests/s", scope=FLEET),
    _m("spare_workers", GAUGE,
       "Workers of the model that are spares; absent without spares", "model", scope=FLEET),
    _m("spare_workers_due", GAUGE,
       "Spares that the model should have now; absent without spares", "model", scope=FLEET),
    _m("workers_wanted", GAUGE, "Workers that would serve the demand for the model", "model", scope=FLEET),
    _w("worker_requests_running", GAUGE, "Requests that the worker's scheduler has admitted"),
    _w("worker_requests_waiting", GAUGE, "Requests that the worker's scheduler has not admitted"),
    _w("worker_prefill_tokens_pending", GAUGE, "Prompt tokens the worker has not computed yet", unit="tokens"),
    _w("worker_kv_usage_ratio", GAUGE, "Share of the worker's KV blocks in use", unit="ratio"),
    _w("worker_incarnation", GAUGE, "Number of engine starts"),
    _w("worker_deaths", COUNTER, "Deaths of the worker's engine"),
    _w("worker_recovery_seconds", GAUGE,
       "Time from the worker's latest failure until its next engine was ready, generated its first token, was "
       "at its peak", "stage", unit="s"),
    _w("worker_recovery_bytes", GAUGE,
       "Weights of that engine reloaded from files and reused from memory, and KV blocks moved for the "
       "streams of the failed one", "source", unit="bytes"),
    # checkpoints
    _w("checkpoint_daemon_up", GAUGE, "1 while the state daemon serves"),
    _w("checkpoint_budget_bytes", GAUGE, "Maximum memory and file size of the state daemon", unit="bytes"),
    _w("checkpoint_acknowledged_bytes", GAUGE,
       "Size of the acknowledged prefixes; shared blocks count once per prefix", unit="bytes"),
    _w("checkpoint_memory_bytes", GAUGE, "Memory used by checkpoints, with page rounding", unit="bytes"),
    _w("checkpoint_file_bytes", GAUGE, "Size of the state daemon's file tier", unit="bytes"),
    _w("checkpoint_blocks", GAUGE, "KV blocks held"),
    _w("checkpoint_requests", GAUGE, "Requests with held blocks"),
    _w("checkpoint_envelopes", GAUGE, "Request envelopes held (requests as their clients sent them)"),
    _w("checkpoint_envelope_bytes", GAUGE, "Size of the held envelopes", unit="bytes"),
    _w("checkpoint_evicted_blocks", COUNTER, "Blocks evicted for lack of space"),
    _w("checkpoint_refused_blocks", COUNTER, "Blocks that the state daemon refused"),
    _w("checkpoint_expired_requests", COUNTER, "Requests dropped after the time without access"),
    _w("checkpoint_dropped_requests", COUNTER, "Requests dropped because they ended"),
    _w("checkpoint_corrupt_blocks", COUNTER, "Blocks found corrupt"),
    _w("checkpoint_served_blocks", COUNTER, "Blocks sent to readers"),
    _w("checkpoint_taken_envelopes", COUNTER, "Envelopes stored"),
    _w("checkpoint_refused_envelopes", COUNTER, "Envelopes refused"),
    _w("checkpoint_lent_blocks", COUNTER, "Blocks of one request sent for the same prefix of another"),
    _w("checkpoint_received_bytes", COUNTER, "Bytes received from engines", unit="bytes"),
    _w("checkpoint_served_bytes", COUNTER, "Bytes sent to readers", unit="bytes"),
    _m("checkpoint_balance_ratio", GAUGE,
       "Highest predicted recovery load of a holder (LUMEN Eq. 4) relative to the lowest; 0 with "
       "fewer than two holders", unit="ratio", scope=FLEET),
    _m("checkpoint_lag_tokens", GAUGE,
       "KV tokens of running requests that their holders have not acknowledged", unit="tokens", scope=FLEET),
    _m("checkpoint_coverage_ratio", GAUGE,
       "Share of the KV tokens of running requests that a holder has acknowledged", unit="ratio",
       scope=FLEET),
    _m("checkpoint_covered_requests_ratio", GAUGE,
       "Share of running requests with at least one block at a holder", unit="ratio", scope=FLEET),
    _m("checkpoint_restores", COUNTER, "Restores by outcome", "outcome", scope=FLEET),
    _m("checkpoint_restored_tokens", COUNTER, "Tokens restored instead of computed", unit="tokens", scope=FLEET),
    _w("recomputed_tokens", COUNTER,
       "Tokens of continued requests that were in neither a cache nor a checkpoint", unit="tokens"),
    # resumable streams
    _m("client_returns", COUNTER,
       "Resumed streams, by whether the client came to the same replica or another", "replica"),
    _m("client_streams_expired", COUNTER, "Streams ended because their clients did not return in time"),
    _w("kept_streams", GAUGE, "Buffered resumable streams"),
    _w("kept_stream_bytes", GAUGE, "Size of these buffers, with envelopes", unit="bytes"),
    _w("detached_streams", GAUGE, "Buffered streams without a connected client"),
    _w("detached_stream_bytes", GAUGE, "Size of their buffers", unit="bytes"),
    _w("stream_attaches", COUNTER, "Connections that resumed a buffered stream"),
    _w("stream_attaches_short", COUNTER, "Connections that found part of the stream dropped"),
    _w("detached_streams_dropped", COUNTER,
       "Detached streams dropped, by limit: grace, bytes or streams", "bound"),
    _w("envelopes", COUNTER, "Envelopes sent to holders by outcome", "outcome"),
)  # fmt: skip

TABLE: dict[str, Metric] = {metric.name: metric for metric in _ROWS}


def counter(registry: CollectorRegistry, name: str) -> Counter:
    """A registered counter. Raises KeyError for a name that is not in the table."""
    metric = TABLE[name]
    assert metric.kind == COUNTER
    return Counter(PREFIX + name, metric.help, metric.labels, registry=registry)


def histogram(registry: CollectorRegistry, name: str) -> Histogram:
    """A registered histogram."""
    metric = TABLE[name]
    assert metric.kind == HISTOGRAM
    return Histogram(
        PREFIX + name, metric.help, metric.labels, buckets=metric.buckets, registry=registry
    )


def family(name: str, value: float | None = None) -> Any:
    """A gauge or counter whose samples are read when the page is made; `value` is that of a
    metric without labels."""
    metric = TABLE[name]
    kind = {GAUGE: GaugeMetricFamily, COUNTER: CounterMetricFamily}[metric.kind]
    if metric.labels:
        return kind(PREFIX + name, metric.help, labels=metric.labels)
    return kind(PREFIX + name, metric.help, value=value)
