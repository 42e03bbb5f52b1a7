"""`relume status | workers | requests | leader | drain | undrain | restart | config`."""

from __future__ import annotations

import argparse
import time
from typing import Any
from urllib.parse import quote

from relume.controlplane.cli.admin_client import EXIT_NO, EXIT_REFUSED, AdminClient, CliError
from relume.controlplane.cli.output import milliseconds, print_json, print_line, print_table
from relume.events.vocabulary.enums import CommandState
from relume.policies.state.fleet import LOADING

ANSWER_S = 5.0
"""Maximum time a restart waits for the answer of the worker's agent."""
POLL_S = 0.2
PENDING, REFUSED = "pending", "refused: "
"""Outcomes of an effect: not answered yet, and how a refusal begins."""


def status(args: argparse.Namespace) -> int:
    """Workers, leader, and whether the fleet accepts requests."""
    fleet = AdminClient.find(args).get("fleet")
    if args.json:
        print_json(fleet)
        return 0
    leader, log = fleet["leader"], fleet["log"]
    print_line(f"serving    {'yes' if fleet['serving'] else 'NO: no worker could take a request'}")
    print_line(f"models     {', '.join(fleet['models']) or 'none seen yet'}")
    print_line(
        f"leader     {leader['leader'] or 'none'} (epoch {leader['epoch']}, tick {leader['tick']})"
    )
    away = "" if log["healthy"] else ", ETCD AWAY: events wait on this machine's disk"
    print_line(f"log        revision {log['revision']}, {log['pending']} events on their way{away}")
    print_line(
        f"requests   {fleet['live_requests']} live, {fleet['arrived']} arrived, "
        f"{fleet['ended']} ended, {fleet['decisions']} decisions"
    )
    print_line()
    _print_workers(fleet["workers"])
    print_line()
    print_table(
        ("replica", "state", "address", "pid", "policy"),
        [
            (
                r["name"],
                ("leader" if r["leader"] else "up") if r["alive"] else "gone",
                f"{r['host']}:{r['port']}",
                r["pid"],
                r["policy"],
            )
            for r in fleet["replicas"]
        ],
        "no replica in the log",
    )
    return 0


def workers(args: argparse.Namespace) -> int:
    """Workers with the pids of agent and engine."""
    found = AdminClient.find(args).get("workers")
    if args.json:
        print_json(found)
    else:
        _print_workers(found["workers"])
    return 0


def _print_workers(found: list[dict[str, Any]]) -> None:
    have_pools = any(w.get("weights_bytes") for w in found)
    weights = ("weights",) if have_pools else ()
    print_table(
        (
            "worker", "state", "model", "agent", "engine", "life", "deaths", "load", "kv",
            *weights, "note",
        ),
        [
            (
                w["name"],
                w["state"],
                w["model"] or "-",
                w["agent_pid"] or "-",
                w["engine_pid"] or "-",
                w["incarnation"],
                w["deaths"],
                f"{w['requests']} ({w['waiting']} waiting)" if w["waiting"] else w["requests"],
                f"{100 * w['kv_used'] // w['kv_blocks']}%" if w["kv_blocks"] else "-",
                *((_weights(w),) if have_pools else ()),
                _note(w),
            )
            for w in sorted(found, key=lambda w: w["name"])
        ],
        "no worker in the log: start one with `relume worker`, or a fleet with `relume up`",
    )  # fmt: skip


def _weights(worker: dict[str, Any]) -> str:
    """What its engine loaded of its model, where weights outlive engines."""
    if not (size := worker.get("weights_bytes")):
        return "-"
    read = worker["weights_read_bytes"]
    if worker["weights_took_ms"] == LOADING:
        return f"loading: {read >> 20} of {size >> 20} MiB read ({100 * read // size} %)"
    source = "from a pool" if not read else "read" if read == size else f"{read >> 20} MiB read"
    return f"{size >> 20} MiB in {worker['weights_took_ms']} ms, {source}"


def _note(worker: dict[str, Any]) -> str:
    if worker["engine"] == "dead":
        delay = worker["restart_delay_ms"]
        return f"died: {worker['died_of']}" + (f", restart in {delay} ms" if delay else "")
    if worker["held"]:
        return "held"
    if worker["unreadable"]:
        return f"no requests: {worker['unreadable']}"
    if drain := _drain(worker):
        return drain
    return _health(worker) if worker["health"] not in ("healthy", "draining") else ""


def _drain(worker: dict[str, Any]) -> str:
    """Why requests leave a worker, and how long they may wait; mostly empty. A replica of an earlier
    build does not say all of it."""
    if worker.get("leaving"):
        why = "its agent stops: requests leave"
    elif worker.get("rolling"):
        why = "rolling restart: requests leave"
    elif worker["draining"] and worker.get("drained_by"):
        reason = worker["drain_reason"]
        why = f"drained by {worker['drained_by']}" + (f": {reason}" if reason else "")
    else:
        return ""
    left = worker["drain_ticks_left"]
    if left < 0:
        return why
    return f"{why}; " + (f"deadline in {left} ticks" if left else "its deadline is over")


def _health(worker: dict[str, Any]) -> str:
    """What is wrong with a worker, why, and since when."""
    since = time.strftime("%H:%M:%S", time.localtime(worker["health_since_unix_ms"] / 1000))
    failure = f" ({worker['failure']})" if worker["failure"] else ""
    return f"{worker['health']}{failure} since {since}: {worker['evidence']}"


def requests(args: argparse.Namespace) -> int:
    """Live requests and the last that ended; one in full when named."""
    client = AdminClient.find(args)
    if args.request:
        found = client.get(f"requests/{args.request}")
        print_json(found)
        return 0
    wanted = ("state", "worker", "model", "search", "before", "limit")
    found = client.get("requests", **{name: getattr(args, name) for name in wanted})
    if args.json:
        print_json(found)
        return 0
    print_table(
        (
            "request", "client id", "state", "model", "attempts", "on", "tokens", "ttft",
            "longest gap", "resume",
        ),
        [
            (
                r["request"],
                r["client_id"],
                r["state"],
                r["model"],
                r["attempts"],
                " > ".join(r["workers"]) or "-",
                r["tokens"] if r["tokens"] >= 0 else "-",
                milliseconds(r["ttft_us"]),
                milliseconds(r["longest_gap_us"]),
                r["verdict"],
            )
            for r in found["requests"]
        ],
        "no such request" if any(vars(args)[name] for name in wanted[:-1]) else "no request yet",
    )  # fmt: skip
    if found.get("more"):
        print_line(f"older ones: relume requests --before {found['requests'][0]['request']}")
    return 0


def leader(args: argparse.Namespace) -> int:
    """Show the leader (exit 1 without one), or make it resign."""
    client = AdminClient.find(args)
    if args.action == "resign":
        _print_command(args, client.post("leader/resign"))
        return 0
    found = client.get("leader")
    if args.json:
        print_json(found)
    elif found["leader"]:
        print_line(f"{found['leader']} leads: epoch {found['epoch']}, tick {found['tick']}")
    else:
        print_line("no leader: requests are served, fleet-wide decisions wait")
    return 0 if found["leader"] else EXIT_NO


_API_COMMANDS = {"disable-restart": "hold", "enable-restart": "release"}
"""Commands that the admin API and the log know by another name."""


def change(args: argparse.Namespace, body: Any = None) -> int:
    """Drain, undrain or trust a worker, or disable or enable its engine's restart."""
    command = _API_COMMANDS.get(args.command, args.command)
    done = AdminClient.find(args).post(f"workers/{args.worker}/{command}", body)
    _print_command(args, done)
    return 0


def restart(args: argparse.Namespace) -> int:
    """Restart a worker's engine, and wait until its agent has answered. Raises CliError if the agent
    refuses."""
    client = AdminClient.find(args)
    done = client.post(f"workers/{args.worker}/restart")
    outcome = _outcome(client, done) if done["state"] == CommandState.DECIDED else PENDING
    if outcome.startswith(REFUSED):
        why = outcome.removeprefix(REFUSED)
        worker = client.get(f"workers/{args.worker}")
        remedy = f"; `relume enable-restart {args.worker}` enables it" if worker["held"] else ""
        raise CliError(f"the agent of {args.worker} refused: {why}{remedy}", EXIT_REFUSED)
    if args.json:
        print_json({**done, "outcome": outcome})
        return 0
    _print_command(args, done)
    if outcome == PENDING:
        print_line(f"{args.worker}: its agent has not answered yet; it will when it is back")
    return 0


def _outcome(client: AdminClient, done: dict[str, Any]) -> str:
    """What the worker's agent answered to a decided command, within ANSWER_S."""
    deadline = time.monotonic() + ANSWER_S
    path = f"commands/{quote(done['command_id'], safe='')}"
    while True:
        effects = client.get(path)["effects"]
        outcome = effects[0]["outcome"] if effects else PENDING
        if outcome != PENDING or time.monotonic() >= deadline:
            return outcome
        time.sleep(POLL_S)


def _print_command(args: argparse.Namespace, done: dict[str, Any]) -> None:
    if args.json:
        print_json(done)
    elif done["state"] == "accepted":
        print_line(
            f"{done['command']} {done['target']}: in the log; the leader has not answered yet"
        )
    else:
        print_line(f"{done['command']} {done['target']}: decided at revision {done['revision']}")


def config(args: argparse.Namespace) -> int:
    """Show settings, or change one."""
    client = AdminClient.find(args)
    if args.action == "set":
        done = client.post("config", {"key": args.key, "value": args.value}, "PUT")
        _print_command(args, done)
        return 0
    found = client.get("config")
    if args.json:
        print_json(found)
        return 0
    wanted = [s for s in found["settings"] if args.key in ("", s["key"])]
    print_table(
        ("setting", "value", "default", "meaning"),
        [(s["key"], s["value"], s["default"], s["description"]) for s in wanted],
        f"no setting {args.key}; `relume config get` lists them",
    )
    return 0 if wanted else EXIT_NO
