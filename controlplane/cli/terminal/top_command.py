"""`relume top`: the fleet as it changes, from the moment that the live page shows."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from relume.controlplane.cli.admin_client import (
    EXIT_UNREACHABLE,
    RETRY_S,
    AdminClient,
    CliError,
    add_arguments,
)
from relume.controlplane.cli.output import milliseconds, print_json
from relume.controlplane.telemetry.visible_text import visible

LEAST_INTERVAL_S = 0.2
PIPE_WIDTH = 160
INCIDENTS, REQUESTS, LEAST_WORKERS = 5, 10, 5
"""Rows of each table, the newest; of workers at least so many."""
_OTHER_LINES = 12
_COLOURS = {
    "serving": "green", "starting": "cyan", "spare": "cyan", "draining": "yellow", "suspected": "yellow",
}  # fmt: skip


def arguments(parser: argparse.ArgumentParser) -> None:
    """Of `relume top`."""
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="S",
        help="seconds between looks, at least 0.2 (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--once", action="store_true", help="one look; so in a pipe")
    add_arguments(parser)


def _interval(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds") from None
    if not LEAST_INTERVAL_S <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text} is not within {LEAST_INTERVAL_S} and 3600 s")
    return seconds


def top(args: argparse.Namespace) -> int:
    """Show the fleet until Ctrl-C; once in a pipe."""
    client = AdminClient.find(args)
    moment = client.get("moment")
    if args.json:
        print_json(moment)
        return 0
    is_terminal = sys.stdout.isatty()
    console = Console(highlight=False, width=None if is_terminal else PIPE_WIDTH)
    if args.once or not is_terminal:
        console.print(frame(moment))
        return 0
    first = frame(moment, height=console.height)
    with Live(first, console=console, screen=True, auto_refresh=False) as live:
        for look, problem in _looks(client, moment, args.interval):
            live.update(frame(look, problem, console.height), refresh=True)
    return 0


def _looks(
    client: AdminClient, moment: dict[str, Any], interval_s: float
) -> Iterator[tuple[dict[str, Any], str]]:
    """The newest moment after each interval, and why it is no newer. Raises CliError once no replica has
    answered for 30 s."""
    heard = time.monotonic()
    while True:
        time.sleep(interval_s)
        problem = ""
        try:
            moment, heard = client.get("moment"), time.monotonic()
        except CliError as error:
            if error.code != EXIT_UNREACHABLE or time.monotonic() - heard > RETRY_S:
                raise
            problem = f"no replica answers; this is {time.monotonic() - heard:.0f} s old"
        yield moment, problem


def frame(moment: dict[str, Any], problem: str = "", height: int = 0) -> Group:
    """One look: the headline, workers, incidents, and the newest live requests. In `height` lines (0:
    any number) stand as many workers as fit, those that do not serve first."""
    incidents = moment["incidents"][-INCIDENTS:]
    live = [r for r in moment["requests"] if r["state"] == "live"][-REQUESTS:]
    others = _OTHER_LINES + len(incidents) + len(live)
    parts: list[Any] = [_headline(moment)]
    if problem:
        parts.append(Text(problem, "bold red"))
    most = max(height - others, LEAST_WORKERS) if height else len(moment["lanes"])
    parts += [Text(), _workers(moment["lanes"], most)]
    if incidents:
        parts += [Text(), _incidents(incidents)]
    return Group(*parts, Text(), _requests(live, moment["head"]["live_requests"]))


def _headline(moment: dict[str, Any]) -> Text:
    head, lanes = moment["head"], moment["lanes"]
    serve = sum(lane["state"] == "serving" for lane in lanes)
    log = f"log revision {head['revision']}" if head["log_healthy"] else "ETCD AWAY"
    words = (
        f"{serve} of {len(lanes)} workers serve", f"{head['live_requests']} live requests",
        f"{head['ended']} ended", f"leader {head['leader'] or 'none'}", log,
    )  # fmt: skip
    fine = head["serving"] and head["log_healthy"]
    at = time.strftime("%H:%M:%S", time.localtime(head["at_ms"] / 1000))
    return Text(f"{at}  " + ", ".join(map(visible, words)), "bold" if fine else "bold red")


def _table(title: str, columns: Sequence[str], right: Sequence[str] = ()) -> Table:
    table = Table(title=title, title_justify="left", box=None, pad_edge=False, expand=False)
    for name in columns:
        is_last = name == columns[-1]
        table.add_column(
            name, justify="right" if name in right else "left", no_wrap=not is_last,
            overflow="ellipsis" if not is_last else "fold",
        )  # fmt: skip
    return table


def _workers(lanes: list[dict[str, Any]], most: int) -> Table:
    columns = ("worker", "state", "model", "requests", "waiting", "prompt tokens", "kv", "why")
    shown = sorted(lanes, key=lambda lane: (lane["state"] == "serving", lane["name"]))[:most]
    title = "Workers" + (f", {len(shown)} of {len(lanes)}" if len(shown) < len(lanes) else "")
    table = _table(title, columns, columns[3:7])
    for lane in shown:
        blocks, state = lane.get("kv_blocks", 0), lane["state"]
        row = (
            lane["name"], state, lane.get("model") or "-", lane.get("requests", 0), lane.get("waiting", 0),
            lane.get("prefill_tokens", 0), f"{100 * lane.get('kv_used', 0) // blocks} %" if blocks else "-",
            lane.get("because", ""),
        )  # fmt: skip
        cells = [Text(visible(str(cell))) for cell in row]
        cells[1].stylize(_COLOURS.get(state, "red"))
        table.add_row(*cells)
    return table


def _incidents(incidents: list[dict[str, Any]]) -> Table:
    table = _table("Incidents", ("began", "state", "what"))
    for incident in incidents:
        began = time.strftime("%H:%M:%S", time.localtime(incident["began_ms"] / 1000))
        state = Text("open", "red") if incident["open"] else Text("over", "green")
        table.add_row(began, state, Text(visible(incident["summary"])))
    return table


def _requests(live: list[dict[str, Any]], count: int) -> Table:
    title = "Live requests" + (f", the newest {len(live)} of {count}" if count > len(live) else "")
    columns = ("request", "client id", "model", "on", "ttft", "longest gap")
    table = _table(title, columns, columns[4:])
    for request in live:
        row = (
            request["request"], request["client_id"], request["model"], " > ".join(request["workers"]) or "-",
            milliseconds(request["ttft_us"]), milliseconds(request["longest_gap_us"]),
        )  # fmt: skip
        table.add_row(*(Text(visible(str(cell))) for cell in row))
    return table
