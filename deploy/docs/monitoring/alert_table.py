"""The table of alerts: when each fires, what it means, what users see, what to look at and what to do.

deploy/prometheus/relume-rules.yaml and docs/operations/alerts.md are made from it.
"""

from __future__ import annotations

from typing import NamedTuple

from deploy.docs.monitoring.recorded_series import FAILED_RATIO, WORKER_HEALTH, quantile_series

PAGE, WARNING, INFO = "page", "warning", "info"
SEVERITIES = {
    PAGE: "needs action at once",
    WARNING: "needs action within a working day",
    INFO: "needs no action at once",
}


class Alert(NamedTuple):
    """`lasting`: how long `expr` must hold before the alert fires, as Prometheus writes it; "": at once.
    `summary`: one sentence, in which Prometheus puts labels and value. The other texts are Markdown;
    their links are relative to docs/operations/."""

    name: str
    severity: str
    expr: str
    summary: str
    meaning: str
    users: str
    look: str
    remedy: str
    lasting: str = ""


ALERTS: tuple[Alert, ...] = (
    # --- replicas and the log
    Alert(
        "RelumeControlPlaneDown", PAGE, 'absent(up{job="relume"} == 1)', lasting="30s",
        summary="No control plane replica answers.",
        meaning="Prometheus gets metrics from no replica: all are down, or their admin ports are cut off.",
        users="If the replicas are down, new requests fail and open connections break. A resumable stream "
        "continues if a replica serves again within `--resume-grace-s`. If only Prometheus is cut off: nothing.",
        look="`relume status`. The last lines of each replica's log, and its exit code. `relume doctor` on a "
        "replica's host.",
        remedy="Start the replicas. If they end again, the exit code says why. 1: etcd does not answer, or lost "
        "the log ([etcd is lost](runbook.md#etcd-is-lost)). 2: a setting is wrong, and the last line names it. "
        "3: another process has this replica's name.",
    ),
    Alert(
        "RelumeNoWorker", PAGE,
        'max(sum by (instance) (relume_worker_engine_state{state="ready"})) == 0', lasting="15s",
        summary="No engine is ready.",
        meaning="No replica knows an engine in state `ready`: all are dead, starting, or their agents are lost.",
        users="New requests wait for `--wait-for-worker-s`, or as long as restarts usually take. Then they get "
        "503 `no_worker`. Open streams pause.",
        look="`relume workers` for the state of each engine, `relume incidents --open` for what failed, then the "
        "logs of the agents and engines.",
        remedy="Correct what the agents' logs name: model path, memory, driver. If restarts of an engine are disabled: "
        "`relume enable-restart WORKER`.",
    ),
    Alert(
        "RelumeLogAway", PAGE, "relume_log_healthy == 0", lasting="15s",
        summary="{{ $labels.instance }} cannot append to the log in etcd.",
        meaning="etcd does not accept this replica's events: it is away, full or without quorum, or it has "
        "fenced the replica.",
        users="Nothing at first: serving, failover and engine restarts continue, and events wait on disk. Operator "
        "commands get 503 `log_unavailable`. When the spool is full (256 MiB), new requests get it too.",
        look="`relume doctor`: the lines `etcd`, `quota` and `log`. `relume status`.",
        remedy="Repair etcd: [etcd is full](runbook.md#etcd-is-full), [etcd is lost](runbook.md#etcd-is-lost). "
        "Restart no replica meanwhile, because a replica cannot start without etcd.",
    ),
    Alert(
        "RelumeSpoolGrows", PAGE, "relume_spool_bytes > 128 * 1024 * 1024",
        summary="{{ $labels.instance }} has {{ $value | humanize1024 }}B of events that wait for etcd.",
        meaning="More than half of the 256 MiB of events that a replica may hold for etcd are in use. etcd has "
        "been away for long, or is too slow.",
        users="Nothing yet. When the spool is full, new requests get 503 `log_unavailable`.",
        look="`relume doctor`: the lines `etcd` and `quota`. `relume status`.",
        remedy="Repair etcd. Do not delete the spool, and do not restart the replica: its events are in no other "
        "place.",
    ),
    Alert(
        "RelumeSpoolFails", PAGE, "relume_spool_failing == 1",
        summary="{{ $labels.instance }} cannot write its spool: events for etcd are in memory alone.",
        meaning="etcd is away, and the disk with `--spool-dir` is full or failing.",
        users="Nothing yet. The memory for events is smaller than the spool: when it is full, new requests get "
        "503 `log_unavailable`. If the replica ends before etcd is back, the log lacks these events.",
        look="`relume doctor` on that host: the lines `spool` and `etcd`. The replica's log.",
        remedy="Make room on that disk, then repair etcd. Do not delete the spool, and do not restart the "
        "replica.",
    ),
    Alert(
        "RelumeHistoryFails", WARNING, "relume_history_failing == 1", lasting="5m",
        summary="{{ $labels.instance }} cannot archive the log, and etcd grows.",
        meaning="The leader's snapshots, archiving or trimming fail. etcd has everything meanwhile. The usual cause "
        "is a full archive disk.",
        users="Nothing, until etcd reaches its quota and refuses events.",
        look="`relume doctor`: the lines `archive` and `quota`. In the leader's log `archive_disk_full`, "
        "`history_postponed`, `archive_file_damaged`.",
        remedy="Make room on the disk with `--archive-dir`. For a damaged file see the [runbook](runbook.md).",
    ),
    Alert(
        "RelumeLogSilent", PAGE, "relume_log_silence_seconds > 10", lasting="10s",
        summary="{{ $labels.instance }} has read nothing from the log for {{ $value }} s.",
        meaning="The replica got no event, not even the leader's tick. etcd hangs or has no quorum, or no replica "
        "leads.",
        users="Nothing at first: serving and failover continue with what each replica sees itself. Health, "
        "workers and settings stay as they were.",
        look="`relume leader`. If a replica leads: `relume doctor` on the silent replica's host, line `etcd`.",
        remedy="Without a leader see [RelumeNoLeader](#relumenoleader). Otherwise repair etcd, or the network "
        "between this replica and etcd.",
    ),
    Alert(
        "RelumeNoLeader", PAGE, "sum(relume_leader) == 0", lasting="30s",
        summary="No replica leads.",
        meaning="No replica owns the stream `fleet`. Workers are not declared lost, their health is not decided, "
        "and nothing is archived.",
        users="Nothing at first: requests continue, and each replica handles the failures that it sees itself.",
        look="`relume leader`, `relume doctor`. In the replicas' logs `leadership_failed`, `leadership_lost`.",
        remedy="Make sure that the replicas reach etcd. For `leadership_failed` with `corrupt segment` see the "
        "[runbook](runbook.md): `relume doctor` names the key.",
    ),
    Alert(
        "RelumeTwoLeaders", WARNING, "sum(relume_leader) > 1", lasting="30s",
        summary="Two replicas believe that they lead.",
        meaning="One of two replicas has not noticed yet that it lost the stream `fleet`. etcd accepts only the "
        "events of the other one (fencing).",
        users="Nothing.",
        look="`relume leader` names the leader of the log. `relume events --type leader_elected` shows the changes.",
        remedy="If it lasts longer than a minute, restart the other replica.",
    ),
    Alert(
        "RelumeUnreadableRecords", WARNING,
        "max by (stream) (increase(relume_unreadable_records_total[1h])) > 0",
        summary="The log has records of {{ $labels.stream }} that cannot be read.",
        meaning="An agent or a replica of a newer build writes to the log, or what it writes is damaged. A worker "
        "whose agent wrote such a record gets no requests.",
        users="Running requests continue. The fleet has one worker less for new ones.",
        look="`relume workers` has the reason, `relume incidents` since when. If the reason names a segment, "
        "`relume doctor` names its key, and what to do.",
        remedy="Upgrade the replicas, or restart the agent with the right build. Then `relume trust WORKER`. "
        "Records of a replica or of the leader (`r.NAME`, `fleet`) exclude no worker: upgrade the older replicas.",
    ),
    # --- requests
    Alert(
        "RelumeRequestsFail", PAGE, f"{FAILED_RATIO} > 0.01", lasting="2m",
        summary="{{ $value | humanizePercentage }} of requests fail.",
        meaning="More than 1 % of the requests that ended within 5 minutes ended with an error that their clients "
        "did not cause.",
        users="An error in place of the answer, or a stream that ends with one.",
        look="`relume requests`, then `relume why REQUEST` of a failed one. `relume incidents`. `relume workers`.",
        remedy="If the failures are of one worker: `relume drain WORKER`, then `relume restart WORKER`. If all "
        "workers fail: look for what is common, as in [RelumeVerdictsWithheld](#relumeverdictswithheld).",
    ),
    Alert(
        "RelumeLongGaps", WARNING,
        f'{quantile_series("longest_gap_seconds")}{{quantile="0.99"}} > 5', lasting="5m",
        summary="One stream in a hundred pauses for more than 5 s.",
        meaning="The 99th percentile of the longest pause within a stream is over 5 s.",
        users="Text stops for seconds, then continues.",
        look="`relume incidents` has failures with their longest gaps. `relume why REQUEST` of a slow request. "
        "`relume workers` for suspects and queues.",
        remedy="Mend the worker that the incidents name. Without incidents the workers are overloaded or slow: see "
        "[when capacity is short](degradation.md).",
    ),
    Alert(
        "RelumeDegraded", WARNING, "max by (model) (relume_degradation_level) > 0", lasting="5m",
        summary="Workers of {{ $labels.model }} serve less than arrives: level {{ $value }}.",
        meaning="The demand for the model exceeds the capacity of its workers. From level 1 on, Relume limits new "
        "requests; with `degradation.mode observe` it only shows the level.",
        users="By [level](degradation.md#levels): shorter answers, 503 `capacity_short` for tier `batch`, later "
        "first tokens, 503 for all new requests.",
        look="`relume degradation` shows capacity, demand, and the number of workers that would serve it.",
        remedy="Start workers, or lower the demand.",
    ),
    Alert(
        "RelumePromptsUncounted", WARNING,
        'sum by (instance) (rate(relume_prompts_counted_total{how=~"late|away"}[1m]))\n'
        "> 0.05 * sum by (instance) (rate(relume_prompts_counted_total[1m]))", lasting="1m",
        summary="{{ $labels.instance }} estimates prompts instead of counting them.",
        meaning="The tokenizer process hangs, restarts, or has too little CPU. More than 5 % of prompts are not "
        "counted in time.",
        users="Longer times to the first token, because routing and admission work on estimates.",
        look="`tokenizer_ended` and `tokenizer_hangs` in the replica's log; the metric "
        "`relume_tokenizer_restarts_total`. `relume why REQUEST` has the estimate.",
        remedy="Give the replica's host more CPU, or correct `--tokenizer`: `relume doctor` checks the settings.",
    ),
    # --- workers
    Alert(
        "RelumeWorkerFlaps", WARNING,
        "max by (worker) (increase(relume_worker_deaths_total[10m])) > 3",
        summary="The engine of {{ $labels.worker }} dies repeatedly.",
        meaning="The engine died more than three times in 10 minutes. Its agent restarts it each time.",
        users="Streams of that worker continue on other workers, each time with a short pause.",
        look="`relume incidents show WORKER`. The engine's log in its run directory.",
        remedy="`relume disable-restart WORKER` stops the restarts. Mend the cause, then "
        "`relume enable-restart WORKER`.",
    ),
    Alert(
        "RelumeNoWorkerEligible", PAGE,
        'count by (instance) (relume_worker_engine_state{state="ready"} == 1)\n'
        "unless on (instance) count by (instance) (\n"
        '  (relume_worker_engine_state{state="ready"} == 1)\n'
        "  unless on (instance, worker) (relume_worker_suspected == 1)\n"
        "  unless on (instance, worker)\n"
        '  (relume_worker_health{state=~"unhealthy|probing|quarantined|draining"} == 1))', lasting="15s",
        summary="{{ $labels.instance }} has ready engines, and may send requests to none of them.",
        meaning="All ready engines are suspected by this replica, unhealthy, in quarantine or draining.",
        users="New requests wait for `--wait-for-worker-s`, then get 503 `no_worker`.",
        look="`relume workers` shows state, class and evidence of each.",
        remedy="`relume undrain WORKER` if too many drain. `relume restart WORKER` for one that answers with errors. "
        "If one replica alone suspects all workers, mend its network.",
    ),
    Alert(
        "RelumeWorkerUnhealthy", WARNING,
        f'max by (worker) ({WORKER_HEALTH}{{state=~"unhealthy|probing|quarantined"}}) == 1', lasting="1m",
        summary="{{ $labels.worker }} gets no requests.",
        meaning="The engine hangs, answers with errors, computes wrong results, reports what its agent cannot read, "
        "or most replicas cannot reach it.",
        users="Its streams continue on other workers. The fleet has less capacity.",
        look="`relume workers` has the class, the evidence and since when. `relume incidents show WORKER`.",
        remedy="`hang`: the agent restarts the engine; `stacks/` in its run directory says where it hung. `errors`: "
        "read the engine's log, then `relume restart WORKER`. `reports`: engine and agent have different versions "
        "of the shim, or the engine is damaged; install one version, then `relume restart WORKER`. `corruption`: "
        "check the host's memory, GPU and [model files](../concepts/health.md#model-files). `unreachable`: mend the "
        "network.",
    ),
    Alert(
        "RelumeWorkerSuspected", WARNING,
        f'max by (worker) ({WORKER_HEALTH}{{state="suspect"}}) == 1\n'
        "or max by (worker) (relume_worker_suspected) == 1", lasting="5m",
        summary="{{ $labels.worker }} is a suspect: slow, failing, or cut off from a replica.",
        meaning="For 5 minutes, the leader or one replica has had evidence against the worker that is too weak to "
        "exclude it.",
        users="A few slower requests. Other workers are preferred.",
        look="`relume workers` has class and evidence. For class `slow`, `gap_us` of its steps "
        "(`relume events --worker WORKER --all`) shows time lost between steps.",
        remedy="`slow`: look for throttling or a busy host. If one replica alone suspects it, check that replica's "
        "network.",
    ),
    Alert(
        "RelumeVerdictsWithheld", PAGE, "max by (model) (relume_verdicts_withheld) > 0",
        summary="{{ $value }} workers of {{ $labels.model }} fail at once: no breaker opens.",
        meaning="So many workers fail at once that the cause is likely common to them: a bad model, a driver, the "
        "network. Excluding them all would leave none.",
        users="Requests are tried on all workers, and some or all fail.",
        look="`relume workers` for class and evidence, `relume events --type health_decided`, "
        "`relume incidents --open`.",
        remedy="Find what changed for all of them: take back the last model, driver or configuration, or mend the "
        "network.",
    ),
    Alert(
        "RelumeWorkerAway", WARNING, "min by (worker) (relume_worker_present) == 0", lasting="2m",
        summary="{{ $labels.worker }} has no agent: its host is down or cut off.",
        meaning="The agent's lease in etcd has lapsed, so the worker is lost until an agent returns under its name.",
        users="Its streams continued on other workers. The fleet has less capacity.",
        look="`relume workers`, `relume incidents show WORKER`. The host, and the agent's log.",
        remedy="Bring the host or the agent back, with the same name and run directory. A worker that was removed "
        "for good is forgotten after a while.",
    ),
    Alert(
        "RelumeEffectsStuck", WARNING, "min(relume_effects_pending) > 0", lasting="5m",
        summary="An agent has not applied an effect that the leader ordered.",
        meaning="The leader ordered an agent to do something, for example to restart an engine. The agent has not "
        "said for 5 minutes that it did.",
        users="Nothing directly. An operator command waits.",
        look="`relume events --type effects_decided,effect_applied`, `relume workers`. The agent's log.",
        remedy="Bring that worker's agent back.",
    ),
    # --- checkpoints
    Alert(
        "RelumeStateDaemonAway", WARNING, "max by (worker) (relume_checkpoint_daemon_up) == 0", lasting="5m",
        summary="{{ $labels.worker }} holds no checkpoints: its state daemon is down.",
        meaning="The state daemon of that host does not serve, so no KV blocks of other workers are stored there.",
        users="Nothing while no worker fails. After a failure, requests may be computed again, which takes longer.",
        look="`relume workers`, `relume incidents show WORKER`. The agent's log says why the daemon ended.",
        remedy="Check `--checkpoint-mb`, the free memory of the host, and the right to lock memory (`LimitMEMLOCK`).",
    ),
    Alert(
        "RelumeCheckpointsBehind", WARNING, "max(relume_checkpoint_coverage_ratio) < 0.9", lasting="10m",
        summary="Only {{ $value | humanizePercentage }} of the KV tokens of running requests are checkpointed.",
        meaning="Holders have acknowledged less than 90 % of the KV tokens of running requests. Their budgets or "
        "the links to them are too small.",
        users="Nothing while no worker fails. After a failure, more tokens are computed again, so pauses are longer.",
        look="`relume workers` for the state daemons. The dashboard `checkpoints`: blocks refused or evicted, and "
        "bytes received.",
        remedy="Raise `--checkpoint-mb` or the number of workers that are holders. Check the network between hosts.",
    ),
    Alert(
        "RelumeHoldersUnbalanced", INFO,
        "max(relume_checkpoint_balance_ratio) > 1.5\n"
        "and sum(max by (worker) (relume_checkpoint_acknowledged_bytes)) > 1e9", lasting="30m",
        summary="The holder with most to restore has {{ $value }} times the load of the one with least.",
        meaning="Checkpoints are spread unevenly over the holders: after a failure, one of them serves most restores.",
        users="Nothing while no worker fails. After a failure, restores may take longer.",
        look="The dashboard `checkpoints`, `relume workers`.",
        remedy="`relume config get` shows `checkpoints.placement`: `load_aware` evens loads out. Give the holders "
        "equal `--checkpoint-mb`, or add a holder.",
    ),
)  # fmt: skip
