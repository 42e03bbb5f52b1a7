"""The debugger's answers for a terminal: tables and a little colour."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from relume.controlplane.replay.debugger.debug_commands import COMMANDS, GROUPS
from relume.controlplane.telemetry.visible_text import visible_data

Data = dict[str, Any]
_EVENTS = 40
_COLOURS = {
    "engine_died": "bold red",
    "worker_lost": "bold red",
    "replica_lost": "bold red",
    "state_daemon_lost": "bold red",
    "transport_observed": "red",
    "worker_suspected": "red",
    "stall_judged": "red",
    "route_decided": "cyan",
    "holder_chosen": "cyan",
    "recovery_planned": "bold cyan",
    "request_arrived": "green",
    "request_ended": "green",
    "engine_step": "dim",
    "tick": "dim",
    "state_hashed": "dim",
}


def show(console: Console, name: str, data: Data) -> None:
    """Print the answer `told` of command `name`."""
    _SHOWN[name](console, visible_data(data))


def show_help(console: Console, name: str = "") -> None:
    """All commands, or one in full."""
    if name:
        command = COMMANDS[name]
        console.print(Text(command.usage, style="bold"))
        console.print(Text(f"{command.help[0].upper()}{command.help[1:]}."))
        if command.more:
            console.print(Text(command.more.strip("\n")))
        return
    for group, title in GROUPS.items():
        console.print(Text(f"\n{title}", style="bold"))
        _table(
            console,
            (),
            [(f"  {c.usage}", c.help) for c in COMMANDS.values() if c.group == group],
        )
    console.print(
        Text(
            "\nTry: incidents, then incident 1; continue type recovery_planned; what-if "
            "checkpoints.recovery=eq6.\n"
            "A name may be shortened (n, b, c, rc). `help COMMAND` explains one; an empty line "
            "repeats next, back, continue, reverse; `quit` or Ctrl-D ends."
        )
    )


def _table(console: Console, headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    table = Table(
        box=None,
        show_header=bool(headings),
        header_style="bold",
        pad_edge=False,
        padding=(0, 2, 0, 0),
    )
    for heading in headings or ("", ""):
        table.add_column(heading.upper(), overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(str(cell)) for cell in row))
    console.print(table)


def _place(console: Console, data: Data) -> None:
    clock = _clock(data["at_ms"])
    line = f"revision {data['revision']}, transaction {data['place']} of {data['of']}{clock}"
    console.print(Text(line, style="bold"))


def _moved(console: Console, data: Data) -> None:
    if "reason" in data:
        style = "yellow" if data["found"] else "bold yellow"
        verb = "stopped at" if data["found"] else "reached the"
        console.print(Text(f"{verb} {data['reason']}", style=style))
    _place(console, data)
    _events(console, data.get("events", []))


def _events(console: Console, events: list[Data]) -> None:
    rows = []
    for entry in events[:_EVENTS]:
        kind = entry["event"]["type"]
        colour = _COLOURS.get(kind, "")
        place = f"{entry['stream']}:{entry['position']}"
        about = entry["about"][0] if len(entry["about"]) == 1 else ""
        rows.append([place, Text(kind, style=colour), about, entry["text"]])
    if rows:
        _table(console, ("where", "event", "request", "what"), rows)
    if len(events) > _EVENTS:
        console.print(Text(f"and {len(events) - _EVENTS} more (--json has all)", style="dim"))


def _state(console: Console, data: Data) -> None:
    if "hash" not in data:
        console.print(Text(json.dumps(data, indent=2)))
        return
    console.print(
        Text(f"revision {data['revision']}, tick {data['tick']}, hash {data['hash']}", style="bold")
    )
    console.print(
        Text(
            f"{data['arrived']} requests arrived, {data['ended']} ended, {data['live']} live; "
            f"{data['decisions']} decisions; leader {data['leader'] or 'none'}"
        )
    )
    _table(
        console,
        ("worker", "engine", "life", "requests", "prompt tokens left", "kv blocks", "deaths", ""),
        [
            (
                w["name"],
                Text(_engine(w), style="red" if w["engine"] == "dead" or not w["present"] else ""),
                w["incarnation"],
                w["requests"],
                w["prefill_tokens"],
                f"{w['kv_used']}/{w['kv_blocks']}",
                w["deaths"],
                _marks(w),
            )
            for w in data["workers"]
        ],
    )
    if data["holders"]:
        _table(
            console,
            ("holder", "state", "requests", "bytes held", "budget"),
            [
                (h["name"], "up" if h["alive"] else "lost", h["requests"], h["held_bytes"],
                 h["budget_bytes"])
                for h in data["holders"]
            ],
        )  # fmt: skip


def _engine(worker: Data) -> str:
    if worker["engine"] == "none":
        return "left"
    return worker["engine"] if worker["present"] else f"{worker['engine']}, lost"


def _marks(worker: Data) -> str:
    marks = [name for name in ("draining", "held") if worker[name]]
    if worker["suspected_by"]:
        marks.append(f"suspected by {', '.join(worker['suspected_by'])}")
    if worker["died_of"]:
        marks.append(f"last: {worker['died_of']}")
    return ", ".join(marks)


def _requests(console: Console, data: Data) -> None:
    if not data["requests"]:
        console.print("no live requests")
        return
    _table(
        console,
        ("request", "gateway", "attempt", "workers", "holders", "survives a cut"),
        [
            (r["request"], r["gateway"], r["attempt"], ", ".join(r["workers"]),
             ", ".join(r["holders"]), r["verdict"])
            for r in data["requests"]
        ],
    )  # fmt: skip


def _breaks(console: Console, data: Data) -> None:
    if not data["breaks"]:
        console.print("no breakpoints")
        return
    _table(console, ("", "stop at"), [(b["number"], b["stop"]) for b in data["breaks"]])


def _diff(console: Console, data: Data) -> None:
    console.print(Text(f"revision {data['from']} -> {data['to']}", style="bold"))
    rows = []
    for change in data["changes"]:
        before, after = change["before"], change["after"]
        rows.append(
            (
                change["path"],
                Text(_value(before), style="red"),
                Text(_value(after), style="green"),
            )
        )
    if rows:
        _table(console, ("what", "before", "after"), rows)
    else:
        console.print("the same state")


def _value(value: Any) -> str:
    if value is None:
        return "-"
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _lines(console: Console, data: Data) -> None:
    for line in data["text"]:
        console.print(Text(line))


def _incidents(console: Console, data: Data) -> None:
    if not data["incidents"]:
        console.print("nothing failed in this log")
        return
    _table(
        console,
        ("", "id", "name", "class", "what"),
        [
            (r["number"], r["id"], Text(r["subject"], style="red"), r["failure"], r["summary"])
            for r in data["incidents"]
        ],
    )


def show_outcome(console: Console, data: Data) -> None:
    """A what-if's answer."""
    changed = ", ".join(f"{key}={value}" for key, value in data["settings"].items())
    console.print(
        Text(
            f"{data['decisions']} decisions repeated with {changed}: {data['different']} come "
            f"out differently, {data['estimates']} weigh otherwise and choose the same"
        )
    )
    for what, count in data["untaken"].items():
        console.print(Text(f"left out: {count} decisions this build cannot retake: {what}"))
    if data["broken"]:
        broken = data["broken"]
        console.print(
            Text(
                f"the log itself does not replay ({broken['what']} at revision "
                f"{broken['revision']}): see `relume replay --verify`",
                style="bold red",
            )
        )
    first = data["first"]
    if first is None:
        console.print("no decision in this log would have gone otherwise")
        return
    kinds = ", ".join(f"{count} {kind}" for kind, count in data["by_kind"].items())
    console.print(Text(f"by kind: {kinds}; each repeated on the recorded history", style="dim"))
    console.print(
        Text(
            f"\nfirst: {first['kind']} of {first['about']}, {first['stream']}:{first['position']}, "
            f"basis ({first['revision']}, {first['after']})",
            style="bold",
        )
    )
    _side(console, "recorded", first["recorded"], first["recorded_estimates"], "red")
    _side(console, "instead", first["other"], first["other_estimates"], "green")


def _side(console: Console, name: str, choice: str, estimates: Sequence[str], colour: str) -> None:
    console.print(Text(f"  {name}: {choice}", style=colour))
    for line in estimates:
        chosen = line.startswith((f"{choice} ", f"{choice}:"))
        console.print(Text(f"    {'->' if chosen else '  '} {line}"))


def _exported(console: Console, data: Data) -> None:
    console.print(
        Text(f"{data['records']} records of revisions {data['first']} to {data['last']} in "
             f"{data['file']}")
    )  # fmt: skip
    if data["divergences"]:
        console.print(
            Text(
                "it does not verify; does the log? `relume replay --verify` says so",
                style="bold red",
            )
        )
    elif not data["verified"]:
        console.print(
            Text("no decision between several workers in it: as a test it proves nothing; "
                 "take more", style="yellow")
        )  # fmt: skip
    else:
        console.print(Text(f"it verifies: {data['decisions']} decisions", style="green"))


def _clock(at_ms: int) -> str:
    if not at_ms:
        return ""
    return f", {time.strftime('%H:%M:%S', time.localtime(at_ms / 1000))}.{at_ms % 1000:03d}"


_SHOWN: dict[str, Callable[[Console, Data], None]] = {
    **dict.fromkeys(("at", "next", "back", "continue", "reverse", "events"), _moved),
    **dict.fromkeys(("break", "delete"), _breaks),
    "state": _state,
    "requests": _requests,
    "diff": _diff,
    "why": _lines,
    "incidents": _incidents,
    "incident": _lines,
    "what-if": show_outcome,
    "export": _exported,
}
