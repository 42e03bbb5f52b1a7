"""`relume degradation`: demand and capacity by model, and why each level was decided."""

from __future__ import annotations

import argparse
from typing import Any

from relume.controlplane.cli.admin_client import EXIT_NO, AdminClient, CliError
from relume.controlplane.cli.output import print_json, print_line, print_lines, print_table
from relume.controlplane.incidents.sentences import clock
from relume.controlplane.replay.decision_words import level_lines
from relume.events import vocabulary as v
from relume.events.log.entries import Entry, entries
from relume.events.log.errors import LogError


def degradation(args: argparse.Namespace) -> int:
    """Levels now and the last decisions about them, or the decisions of a stored log."""
    if args.log:
        decided = [(entry.at_ms, entry.event) for entry in _stored(args.log)]
        found: dict[str, Any] = {}
    else:
        client = AdminClient.find(args)
        found = client.get("degradation", model=args.model)
        page = client.get("events", type="degradation_decided", limit=args.limit)
        decided = [(one["at_ms"], _event(one["event"])) for one in page["events"]]
    decided = [(at, one) for at, one in decided if args.model in ("", one.model)][-args.limit :]
    if args.json:
        changes = [{"at_ms": at, **_fields(one)} for at, one in decided]
        print_json({**found, "decisions": changes})
        return 0
    if found:
        _print_models(found)
    for at_ms, one in decided:
        first, *rest = level_lines(one)
        print_line(f"{clock(at_ms)}  {first}")
        print_lines(f"          {line}" for line in rest)
    return 0


def _print_models(found: dict[str, Any]) -> None:
    empty = "no model has demand yet"
    if found["mode"] == "off":
        empty = "off: set --degradation observe or on, or degradation.mode by `relume config set`"
    print_table(
        ("model", "level", "served", "demand", "capacity", "workers", "wanted"),
        [
            (
                one["model"],
                one["level"],
                f"{min(one['served_permille'] / 10, 1000):.0f}%" if one["known"] else "unknown",
                f"{one['demand_requests_s']:.2f}/s" if one["known"] else "-",
                f"{one['usable_requests_s']:.2f}/s" if one["known"] else "-",
                one["workers"],
                one["wanted_workers"],
            )
            for one in found["models"]
        ],
        empty,
    )


def _fields(event: v.DegradationDecided) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


def _event(shown: dict[str, Any]) -> v.DegradationDecided:
    return v.DegradationDecided(**{name: value for name, value in shown.items() if name != "type"})


def _stored(log: str) -> list[Entry]:
    """The decisions of a stored log, or of an archive. Raises CliError."""
    from relume.controlplane.replay.recorded_log import from_file

    try:
        found = entries(from_file(log).groups, "fleet")
        return [entry for entry in found if type(entry.event) is v.DegradationDecided]
    except (LogError, OSError) as error:
        raise CliError(str(error), EXIT_NO) from None
