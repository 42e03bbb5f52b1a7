"""The table of dashboards: which panels each has, and what each panel asks Prometheus.

A query of a metric with scope `fleet` takes the maximum over replicas, which all report the same; one with
scope `replica` sums what each replica did (docs/operations/metrics.md). Quantiles, the share of failed
requests and the health of workers are recorded series (deploy/prometheus/relume-rules.yaml).
"""

from __future__ import annotations

from deploy.docs.monitoring.panels import (
    JOB,
    Dashboard,
    Panel,
    fleet,
    fleet_rate,
    quantiles,
    rate,
    replicas,
)
from deploy.docs.monitoring.recorded_series import FAILED_RATIO, WORKER_HEALTH

QUANTILES = "Quantiles over 5 minutes."
WORKER = "{{worker}}"
DASHBOARDS: dict[str, Dashboard] = {
    "fleet": Dashboard(
        "Relume: fleet",
        "Who serves, how well, and what clients get.",
        {
            "Workers": (
                Panel(
                    "Engines by state",
                    (
                        (
                            f"sum by (state) ({fleet('worker_engine_state', 'worker', 'state')})",
                            "{{state}}",
                        ),
                    ),
                ),
                Panel(
                    "Workers by health",
                    (
                        (
                            f"sum by (state) ({WORKER_HEALTH}{JOB})",
                            "{{state}}",
                        ),
                    ),
                    about="As the leader decided it. `relume workers` says why.",
                ),
                Panel(
                    "Health of each worker",
                    (
                        (
                            f"{WORKER_HEALTH}{JOB} == 1",
                            f"{WORKER} {{{{state}}}}",
                        ),
                    ),
                    kind="state-timeline",
                ),
            ),
            "Clients": (
                Panel(
                    "Requests",
                    (
                        (rate("requests_arrived_total"), "arrived"),
                        (rate("requests_total", "outcome"), "{{outcome}}"),
                    ),
                    "reqps",
                ),
                Panel(
                    "Share of requests that fail",
                    ((f"{FAILED_RATIO}{JOB}", "failed"),),
                    "percentunit",
                    about="Over 5 minutes.",
                ),
                Panel(
                    "Time to first token",
                    quantiles("time_to_first_token_seconds"),
                    "s",
                    about=QUANTILES,
                ),
                Panel(
                    "Longest silence within a stream",
                    quantiles("longest_gap_seconds"),
                    "s",
                    about=QUANTILES,
                ),
                Panel("Open requests", ((replicas("streams_live"), "open"),)),
                Panel("Output", ((rate("output_tokens_total"), "tokens per second"),)),
                Panel(
                    "Clients that resumed their streams",
                    ((rate("client_returns_total", "replica"), "to {{replica}} replica"),),
                    "reqps",
                    when="clients resume streams",
                ),
            ),
            "Capacity": (
                Panel(
                    "Demand and capacity",
                    (
                        (fleet("demand_requests_per_second", "model"), "demand {{model}}"),
                        (fleet("capacity_requests_per_second", "model"), "capacity {{model}}"),
                    ),
                    "reqps",
                    when="degradation is on, or observed",
                ),
                Panel(
                    "Level of degradation",
                    ((fleet("degradation_level", "model"), "{{model}}"),),
                    when="degradation is on",
                ),
                Panel(
                    "Workers wanted, and spares",
                    (
                        (fleet("workers_wanted", "model"), "wanted {{model}}"),
                        (fleet("spare_workers", "model"), "spares {{model}}"),
                        (fleet("spare_workers_due", "model"), "spares due {{model}}"),
                    ),
                    when="degradation is observed, or there are spares",
                ),
            ),
        },
    ),
    "recovery": Dashboard(
        "Relume: recovery",
        "What failed, how requests continued, and how soon capacity was back. `relume incidents` has each.",
        {
            "Failures": (
                Panel(
                    "Deaths of engines",
                    ((fleet_rate("worker_deaths_total", "worker"), WORKER),),
                    "cps",
                ),
                Panel(
                    "Failures of attempts",
                    ((rate("transport_failures_total", "kind"), "{{kind}}"),),
                    "cps",
                    when="an attempt fails",
                ),
                Panel(
                    "Class of failure",
                    (
                        (
                            f"{fleet('worker_failure', 'worker', 'failure')} == 1",
                            f"{WORKER} {{{{failure}}}}",
                        ),
                    ),
                    kind="state-timeline",
                    when="a worker is not healthy",
                ),
                Panel(
                    "Circuit breakers",
                    (
                        (
                            f"{fleet('worker_breaker', 'worker', 'state')} == 1",
                            f"{WORKER} {{{{state}}}}",
                        ),
                    ),
                    kind="state-timeline",
                ),
                Panel(
                    "Judgements of silent engines",
                    ((rate("stall_judgements_total", "hung"), "hung: {{hung}}"),),
                    "cps",
                    when="an engine is silent",
                ),
                Panel(
                    "Second answers of finished requests",
                    ((rate("cross_checks_total", "result"), "{{result}}"),),
                    "cps",
                    when="requests are cross-checked",
                ),
            ),
            "Streams": (
                Panel(
                    "Dispatches by cause",
                    ((rate("attempts_total", "cause"), "{{cause}}"),),
                    "reqps",
                ),
                Panel(
                    "How requests continued",
                    ((rate("recoveries_total", "mode"), "{{mode}}"),),
                    "reqps",
                    when="a request continues after a failure",
                ),
                Panel(
                    "Migrations",
                    ((rate("migrations_total", "outcome", "cause"), "{{cause}}: {{outcome}}"),),
                    "reqps",
                    when="requests migrate",
                ),
                Panel(
                    "Continued tokens",
                    (
                        (fleet_rate("checkpoint_restored_tokens_total"), "restored"),
                        (f"sum ({fleet_rate('recomputed_tokens_total', 'worker')})", "recomputed"),
                    ),
                ),
            ),
            "Capacity": (
                Panel(
                    "Latest recovery of each worker",
                    (
                        (
                            fleet("worker_recovery_seconds", "worker", "stage"),
                            f"{WORKER} {{{{stage}}}}",
                        ),
                    ),
                    "s",
                    when="an engine fails",
                ),
                Panel(
                    "Bytes of that recovery",
                    (
                        (
                            fleet("worker_recovery_bytes", "worker", "source"),
                            f"{WORKER} {{{{source}}}}",
                        ),
                    ),
                    "bytes",
                    when="an engine fails",
                ),
                Panel("Starts of engines", ((fleet("worker_incarnation", "worker"), WORKER),)),
            ),
        },
    ),
    "load": Dashboard(
        "Relume: load",
        "Load of workers as routing sees it, and requests that wait.",
        {
            "Workers": (
                Panel("Running requests", ((fleet("worker_requests_running", "worker"), WORKER),)),
                Panel("Waiting requests", ((fleet("worker_requests_waiting", "worker"), WORKER),)),
                Panel(
                    "Prompt tokens to compute",
                    ((fleet("worker_prefill_tokens_pending", "worker"), WORKER),),
                ),
                Panel(
                    "KV cache in use",
                    ((fleet("worker_kv_usage_ratio", "worker"), WORKER),),
                    "percentunit",
                ),
            ),
            "Routing": (
                Panel(
                    "Dispatches by policy",
                    ((rate("routes_total", "policy"), "{{policy}}"),),
                    "reqps",
                ),
                Panel(
                    "Observed TTFT relative to the predicted",
                    quantiles("ttft_actual_to_predicted_ratio"),
                    about=QUANTILES,
                ),
                Panel(
                    "Prompt tokens expected in prefix caches",
                    ((rate("route_cached_tokens_total"), "per second"),),
                ),
                Panel(
                    "Prompts by how their tokens were counted",
                    ((rate("prompts_counted_total", "how"), "{{how}}"),),
                    "reqps",
                    when="there is a tokenizer",
                ),
            ),
            "Admission queue": (
                Panel(
                    "Requests in it",
                    ((replicas("room_requests", "tier"), "{{tier}}"),),
                    when="requests wait",
                ),
                Panel(
                    "Time in it",
                    quantiles("room_wait_seconds"),
                    "s",
                    about=QUANTILES,
                    when="requests wait",
                ),
                Panel(
                    "Refusals",
                    (
                        (rate("room_refusals_total", "reason", "tier"), "{{tier}}: {{reason}}"),
                        (rate("requests_shed_total", "tier"), "{{tier}}: TTFT goal out of reach"),
                    ),
                    "reqps",
                    when="requests are refused",
                ),
            ),
        },
    ),
    "checkpoints": Dashboard(
        "Relume: checkpoints",
        "KV blocks of running requests at holders, and buffered streams.",
        {
            "Coverage": (
                Panel(
                    "Coverage of running requests",
                    (
                        (fleet("checkpoint_coverage_ratio"), "KV tokens"),
                        (fleet("checkpoint_covered_requests_ratio"), "requests"),
                    ),
                    "percentunit",
                ),
                Panel(
                    "KV tokens without a checkpoint", ((fleet("checkpoint_lag_tokens"), "tokens"),)
                ),
                Panel(
                    "Balance of holders",
                    ((fleet("checkpoint_balance_ratio"), "highest to lowest load"),),
                    about="Predicted recovery load (LUMEN Eq. 4).",
                ),
            ),
            "Holders": (
                Panel(
                    "Memory",
                    (
                        (fleet("checkpoint_memory_bytes", "worker"), f"{WORKER} in use"),
                        (fleet("checkpoint_budget_bytes", "worker"), f"{WORKER} maximum"),
                    ),
                    "bytes",
                ),
                Panel("Blocks", ((fleet("checkpoint_blocks", "worker"), WORKER),)),
                Panel(
                    "Bytes from engines and to readers",
                    (
                        (
                            fleet_rate("checkpoint_received_bytes_total", "worker"),
                            f"{WORKER} received",
                        ),
                        (fleet_rate("checkpoint_served_bytes_total", "worker"), f"{WORKER} sent"),
                    ),
                    "Bps",
                ),
                Panel(
                    "Blocks that were not held",
                    (
                        (
                            fleet_rate("checkpoint_evicted_blocks_total", "worker"),
                            f"{WORKER} evicted",
                        ),
                        (
                            fleet_rate("checkpoint_refused_blocks_total", "worker"),
                            f"{WORKER} refused",
                        ),
                        (
                            fleet_rate("checkpoint_corrupt_blocks_total", "worker"),
                            f"{WORKER} corrupt",
                        ),
                    ),
                    "cps",
                ),
                Panel(
                    "State daemons that serve", ((fleet("checkpoint_daemon_up", "worker"), WORKER),)
                ),
                Panel(
                    "Restores",
                    ((fleet_rate("checkpoint_restores_total", "outcome"), "{{outcome}}"),),
                    "cps",
                    when="requests are restored",
                ),
            ),
            "Buffered streams": (
                Panel(
                    "Buffered resumable streams",
                    (
                        (fleet("kept_streams", "worker"), WORKER),
                        (fleet("detached_streams", "worker"), f"{WORKER} without a client"),
                    ),
                ),
                Panel(
                    "Size of their buffers",
                    ((fleet("kept_stream_bytes", "worker"), WORKER),),
                    "bytes",
                ),
            ),
        },
    ),
    "log": Dashboard(
        "Relume: log",
        "The event log in etcd: whether it takes events, and how much room it has.",
        {
            "Writing": (
                Panel(
                    "Replicas whose events etcd takes",
                    ((replicas("log_healthy", "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Events not durable yet",
                    ((replicas("log_pending_events", "instance"), "{{instance}}"),),
                ),
                Panel(
                    "Events on disk for etcd",
                    ((replicas("spool_bytes", "instance"), "{{instance}}"),),
                    "bytes",
                ),
                Panel(
                    "Silence", ((replicas("log_silence_seconds", "instance"), "{{instance}}"),), "s"
                ),
                Panel(
                    "Leader",
                    ((replicas("leader", "instance"), "{{instance}}"),),
                    kind="state-timeline",
                ),
                Panel("Decisions", ((rate("decisions_total", "kind"), "{{kind}}"),), "cps"),
            ),
            "Room": (
                Panel(
                    "Database of etcd",
                    (
                        ("max (relume_etcd_database_bytes" + JOB + ")", "size"),
                        ("max (relume_etcd_quota_bytes" + JOB + ")", "maximum"),
                    ),
                    "bytes",
                ),
                Panel(
                    "Revisions",
                    (
                        ("max (relume_fold_revision" + JOB + ")", "newest"),
                        ("max (relume_snapshot_revision" + JOB + ")", "snapshot"),
                        ("max (relume_archived_revision" + JOB + ")", "archived"),
                        ("max (relume_trimmed_revision" + JOB + ")", "removed from etcd"),
                    ),
                ),
                Panel(
                    "Failed rounds of history",
                    ((rate("history_failures_total"), "per second"),),
                    "cps",
                ),
            ),
            "Operators": (
                Panel(
                    "Commands without an answer, effects not applied",
                    ((fleet("commands_open"), "commands"), (fleet("effects_pending"), "effects")),
                ),
                Panel(
                    "Records and keys that are not read",
                    (
                        (
                            f"sum ({fleet('unreadable_records_total', 'stream')})",
                            "unreadable records",
                        ),
                        (replicas("foreign_keys"), "foreign keys"),
                        (f"sum (relume_refused_notices_total{JOB})", "refused notices"),
                    ),
                ),
            ),
        },
    ),
}
