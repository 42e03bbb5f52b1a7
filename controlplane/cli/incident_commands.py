"""`relume incidents`: failures of a running fleet, or of a stored log."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from urllib.parse import quote

import msgspec

from relume.controlplane.cli.admin_client import EXIT_NO, EXIT_USAGE, AdminClient, CliError
from relume.controlplane.cli.output import print_json, print_lines, print_table
from relume.controlplane.incidents.incident import Incident, IncidentInfo
from relume.controlplane.incidents.incident_fold import incidents_of
from relume.controlplane.incidents.sentences import clock, find, info, lines, whole
from relume.controlplane.incidents.trace import trace
from relume.events.log.errors import LogError


def incidents(args: argparse.Namespace) -> int:
    """List incidents, or show one."""
    if args.action == "show":
        if not args.incident:
            raise CliError("show needs an ID; `relume incidents` lists them", EXIT_USAGE)
        return _show(args)
    if args.trace:
        raise CliError("--trace needs one incident: relume incidents show ID", EXIT_USAGE)
    return _list(args)


def _list(args: argparse.Namespace) -> int:
    if args.log:
        stored = [info(record) for record in _stored(args.log)]
        chosen = [
            record
            for record in stored
            if (not args.worker or record.name == args.worker) and (not args.open or record.open)
        ]
        found = {"since": 1, "incidents": msgspec.to_builtins(chosen[-args.limit :])}
    else:
        query = {"worker": args.worker, "open": int(args.open), "limit": args.limit}
        found = AdminClient.find(args).get("incidents", **query)
    if args.json:
        print_json(found)
        return 0
    records = msgspec.convert(found["incidents"], list[IncidentInfo])
    print_table(
        ("id", "began", "state", "class", "what"),
        [
            (r.id, clock(r.began_ms), "open" if r.open else "over", r.failure, r.summary)
            for r in records
        ],
        f"no incident since revision {found['since']}",
    )
    return 0


def _show(args: argparse.Namespace) -> int:
    record = _one(args)
    if args.trace:
        try:
            Path(args.trace).write_text(json.dumps(trace(record)) + "\n")
        except OSError as error:
            raise CliError(f"could not write the trace: {error}", EXIT_NO) from None
    if args.json:
        print_json(msgspec.to_builtins(record))
    else:
        print_lines(lines(record))
    return 0


def _one(args: argparse.Namespace) -> Incident:
    """The incident that the arguments name. Raises CliError."""
    if not args.log:
        found = AdminClient.find(args).get(f"incidents/{quote(args.incident, safe='')}")
        return msgspec.convert(found, Incident)
    records = _stored(args.log)
    record = find(records, args.incident)
    if record is None:
        known = ", ".join(f"{r.id} ({r.subject})" for r in records) or "the log has none"
        raise CliError(f"no incident {args.incident!r}: {known}", EXIT_NO)
    return whole(record)


def _stored(log: str) -> list[Incident]:
    """The incidents of a stored log, or of an archive. Raises CliError."""
    from relume.controlplane.replay.recorded_log import from_file

    try:
        return incidents_of(from_file(log).groups)
    except (LogError, OSError) as error:
        raise CliError(str(error), EXIT_NO) from None
