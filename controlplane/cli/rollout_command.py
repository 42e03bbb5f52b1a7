"""`relume rollout`: a rolling restart of a model's engines, how far it is, and its end."""

from __future__ import annotations

import argparse
import time
from typing import Any

from relume.controlplane.cli.admin_client import EXIT_NO, AdminClient, CliError
from relume.controlplane.cli.output import print_json, print_line

POLL_S = 0.5


def rollout(args: argparse.Namespace) -> int:
    """Begin one, show it, or end it. Raises CliError."""
    client = AdminClient.find(args)
    if args.action == "restart":
        body = {"model": args.model or _only_model(client), "deadline_s": args.deadline}
        client.post("rollout", body)
    elif args.action == "cancel":
        client.post("rollout/cancel")
    return _show(client, args)


def _only_model(client: AdminClient) -> str:
    """The model that the fleet serves. Raises CliError if there are several, or none."""
    models = sorted({w["model"] for w in client.get("workers")["workers"] if w["model"]})
    if len(models) != 1:
        names = ", ".join(models) or "none"
        raise CliError(f"name a model with --model; the fleet serves: {names}", EXIT_NO)
    return models[0]


def _show(client: AdminClient, args: argparse.Namespace) -> int:
    """How far it is; with --wait each change, until its end or for so long (exit 1)."""
    deadline = time.monotonic() + (args.wait or 0.0)
    shown = ""
    while True:
        found = client.get("rollout")
        goes_on = found["active"]
        if args.wait is None or not goes_on or time.monotonic() >= deadline:
            break
        if (line := _line(found)) != shown and not args.json:
            shown = line
            print_line(line)
        time.sleep(min(POLL_S, max(deadline - time.monotonic(), 0.0)))
    if args.json:
        print_json(found)
    elif (line := _line(found)) != shown:
        print_line(line)
    return EXIT_NO if args.wait is not None and goes_on else 0


def _line(found: dict[str, Any]) -> str:
    if not found["rollout"]:
        return "no rolling restart yet: `relume rollout restart` begins one"
    parts = [f"rolling restart of {found['model']}: {found['stage']}"]
    if found["workers"]:
        parts.append(f"now {', '.join(found['workers'])}")
    if found["todo"]:
        parts.append(f"to come {', '.join(found['todo'])}")
    if found["paused"]:
        parts.append(f"paused: {found['paused']}")
    return "; ".join(parts)
