"""`relume events`: what the log says, as a page or as it happens."""

from __future__ import annotations

import argparse
import json
import time
from typing import Any

from relume.controlplane.cli.admin_client import AdminClient
from relume.controlplane.cli.output import print_line

NOISE = (
    "engine_step,groups_received,tick,state_hashed,"
    "checkpoint_acknowledged,checkpoints_acknowledged,state_daemon_reported"
)
"""Left out by default: there are hundreds of these per second."""
_HIDDEN = ("type", "worker", "request", "candidates", "others", "changes", "dispatch", "decision")


def events(args: argparse.Namespace) -> int:
    """Print events; with --follow until interrupted."""
    client = AdminClient.find(args)
    query = {
        "type": args.type,
        "exclude": "" if args.type or args.all else NOISE,
        "request": args.request,
        "worker": args.worker,
        "stream": args.stream,
    }
    if args.follow:
        if args.since:
            query["from"] = args.since
        else:
            query["tail"] = 10
        for event in client.follow("events", **query):
            _show(args, event)
        return 0
    if not args.since and not args.request:
        page = client.get("events", limit=args.limit, **query)
        for event in page["events"]:
            _show(args, event)
        return 0
    _print_from(args, client, query)
    return 0


def _print_from(args: argparse.Namespace, client: AdminClient, query: dict[str, Any]) -> None:
    """Pages from --since (default: the beginning) until --limit or the end."""
    place: dict[str, Any] = {"from": args.since or "0"}
    left = args.limit
    while left > 0:
        page = client.get("events", limit=min(left, 1000), **place, **query)
        for event in page["events"]:
            _show(args, event)
        left -= len(page["events"])
        if page["complete"]:
            return
        place = {"after": page["next"]}


def _show(args: argparse.Namespace, info: dict[str, Any]) -> None:
    if args.json:
        print(json.dumps(info), flush=True)
        return
    event = info["event"]
    at = info["at_ms"] / 1000
    clock = time.strftime("%H:%M:%S", time.localtime(at)) + f".{info['at_ms'] % 1000:03d}"
    about = " ".join(str(event[name]) for name in ("worker", "request") if event.get(name))
    rest = " ".join(
        f"{name}={_brief(value)}"
        for name, value in event.items()
        if name not in _HIDDEN and value not in ("", [], None)
    )
    line = f"{clock} {info['id']:>9} {info['stream']:<6} {event['type']:<22} {about} {rest}"
    print_line(line.rstrip())


def _brief(value: Any) -> str:
    if isinstance(value, dict) and set(value) == {"revision", "position"}:
        return f"({value['revision']},{value['position']})"
    if isinstance(value, list) and value and isinstance(value[0], dict) and "kind" in value[0]:
        return ",".join(f"{effect['kind']} {effect['worker']}" for effect in value)
    text = json.dumps(value) if isinstance(value, dict | list) else str(value)
    return text if len(text) <= 60 else text[:57] + "..."
