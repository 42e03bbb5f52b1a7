"""`relume replay` and `relume why`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from relume.controlplane import serve_settings
from relume.controlplane.cli.admin_client import (
    EXIT_NO,
    EXIT_PARTLY,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    CliError,
    read_fleet_file,
)
from relume.controlplane.cli.output import print_json, print_line, print_lines, print_table
from relume.controlplane.replay import rendering
from relume.controlplane.replay.divergence import Verdict
from relume.controlplane.replay.recorded_log import History, from_etcd, from_file
from relume.controlplane.replay.store import StoredLog, save
from relume.controlplane.replay.verify import verify
from relume.controlplane.replay.why import why
from relume.events.log.entries import entries
from relume.events.log.errors import LogError, LogUnavailable
from relume.events.log.interface import RevisionGroup
from relume.policies import decision_versions
from relume.policies.state.fleet import Fleet, dump, load
from relume.policies.state.fold import apply_group

_SHOWN = 10


def _source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--log", metavar="FILE", default="", help="a stored log, or an archive's directory"
    )
    parser.add_argument(
        "--etcd", metavar="A,B", default=None, help="etcd endpoints (as `relume serve --etcd`)"
    )
    parser.add_argument("--prefix", default=None, help="key prefix of the log in etcd")
    parser.add_argument(
        "--archive",
        metavar="DIR",
        default="",
        help="archive of a log that has been trimmed (default: in --state-dir, or as "
        "`relume serve --archive-dir`)",
    )
    parser.add_argument("--config", metavar="FILE", default="", help="settings file, for etcd")
    parser.add_argument(
        "--state-dir", default=".relume", help="state of `relume up` (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `relume replay`."""
    parser.add_argument(
        "--verify",
        action="store_true",
        help="retake every decision; exit 1 if one differs, 5 if this build lacks its version",
    )
    parser.add_argument(
        "--at", type=int, metavar="REVISION", default=0, help="only the log up to here"
    )
    parser.add_argument(
        "--export",
        metavar="FILE",
        default="",
        help="store the log in a file, names and hashes of prompts too (else --do 'export FILE')",
    )
    parser.add_argument("--note", default="", help="a remark to go into the exported file")
    parser.add_argument(
        "--sqlite",
        metavar="FILE",
        default="",
        help="write events, decisions, candidates, requests and workers to an SQLite database",
    )
    parser.add_argument(
        "--what-if",
        action="append",
        metavar="KEY=VALUE",
        help="which recorded decisions would differ with this setting; exit 1 if any",
    )
    parser.add_argument(
        "--debug",
        action="store_true",
        help="step through the log at a prompt, or by commands from a pipe (its `help` lists them)",
    )
    parser.add_argument(
        "--ui",
        metavar="FILE",
        nargs="?",
        const="",
        help="show the log in a browser, at any moment, until Ctrl-C: a stored log, an archive's "
        "directory, or without FILE the log that --log or --etcd names",
    )
    parser.add_argument(
        "--port", type=int, default=0, help="port of --ui on this machine (default: a free one)"
    )
    parser.add_argument(
        "--do", action="append", metavar="COMMAND", help="run this at the debugger's prompt instead"
    )
    _source(parser)


def add_why_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `relume why`."""
    parser.add_argument(
        "request", help="id of the request, as in `relume requests`, or an id its client knows"
    )
    _source(parser)


def run(args: argparse.Namespace) -> int:
    """`relume replay`: exit 0; 1 if verification fails; 5 if it finds no divergence but this
    build cannot retake every decision."""
    if args.sqlite:
        return _sqlite(args)
    if args.ui is not None:
        return _page(args)
    history = _load(args)
    if args.debug or args.do:
        return _debug(args, history)
    if args.at:
        history = history.until(args.at)
    if args.what_if and history.groups:
        return _what_if(args, history)
    if not history.groups:
        raise CliError(f"no log at {history.origin}", EXIT_NO)
    report: dict[str, Any] = {"origin": history.origin}
    if args.export:
        report["exported"] = _export(args, history)
    verdict = _verify(history) if args.verify else None
    report |= _verdict_json(verdict) if verdict is not None else _state(history)
    if args.json:
        print_json(report)
    else:
        print_line(f"log: {history.origin}")
        if args.export:
            print_line(f"stored in {args.export} ({report['exported']['records']} records)")
        if verdict is not None:
            _print_verdict(verdict)
        else:
            _print_state(report, history)
    return 0 if verdict is None else _exit_code(verdict)


def _page(args: argparse.Namespace) -> int:
    """The log in a browser."""
    from relume.controlplane.ui.replay_page import show_page

    args.log = args.ui or args.log
    return show_page(_load(args), args.port, args.at)


def _exit_code(verdict: Verdict) -> int:
    if verdict.divergences:
        return EXIT_NO
    if verdict.untaken:
        return EXIT_PARTLY
    return 0 if verdict.ok else EXIT_NO


def _sqlite(args: argparse.Namespace) -> int:
    """The log as a database. A stored log is read as it is written; any other is loaded whole."""
    from relume.controlplane.replay.sqlite import export_sqlite

    try:
        if args.log and not Path(args.log).is_dir():
            with StoredLog(args.log) as stored:
                counts = export_sqlite(args.sqlite, _until(stored.groups(), args.at), args.log)
        else:
            history = _load(args)
            counts = export_sqlite(args.sqlite, _until(history.groups, args.at), history.origin)
    except (LogError, OSError) as error:
        raise CliError(f"cannot write the database: {error}", EXIT_NO) from None
    if args.json:
        print_json({"file": args.sqlite, "rows": counts})
    else:
        rows = ", ".join(f"{count} {table}" for table, count in counts.items())
        print_line(f"{args.sqlite}: {rows}")
    return 0


def _until(groups: Iterable[RevisionGroup], revision: int) -> Iterator[RevisionGroup]:
    """Those up to `revision`; 0: all."""
    return (group for group in groups if not revision or group.revision <= revision)


def _debug(args: argparse.Namespace, history: History) -> int:
    """The debugger: at a prompt, or by the commands of --do or a pipe."""
    from relume.controlplane.replay.debugger import prompt
    from relume.controlplane.replay.debugger.session import Debugger

    if not history.groups:
        raise CliError(f"no log at {history.origin}", EXIT_NO)
    debugger = Debugger(history)
    if args.at:
        debugger.run(f"at {args.at}")
    if args.do or args.json or not sys.stdin.isatty():
        return prompt.script(debugger, args.do or sys.stdin, args.json)
    return prompt.interactive(debugger)


def _what_if(args: argparse.Namespace, history: History) -> int:
    """Other settings: exit 1 when a decision comes out differently."""
    from relume.controlplane.replay.debugger.prompt import console_of
    from relume.controlplane.replay.debugger.screen import show_outcome
    from relume.controlplane.replay.debugger.session import outcome_of
    from relume.controlplane.replay.what_if import BadSetting, parse, what_if

    try:
        outcome = what_if(history, parse(args.what_if))
    except BadSetting as error:
        raise CliError(str(error), EXIT_USAGE) from None
    if args.json:
        print_json({"origin": history.origin, **outcome_of(outcome)})
    else:
        show_outcome(console_of(), outcome_of(outcome))
    return 0 if outcome.first is None and outcome.broken is None else EXIT_NO


def run_why(args: argparse.Namespace) -> int:
    """`relume why REQUEST`: exit 1 when the log does not know it."""
    history = _load(args)
    try:
        found = why(history.groups, args.request)
    except LogError as error:
        raise CliError(str(error), EXIT_NO) from None
    if found is None:
        raise CliError(f"no request {args.request!r} in the log of {history.origin}", EXIT_NO)
    if args.json:
        print_json(rendering.to_json(found))
    else:
        print_lines(rendering.lines_of(found))
    return 0


def _load(args: argparse.Namespace) -> History:
    """The log that the arguments name. Raises CliError, ConfigError."""
    try:
        if args.log:
            return from_file(args.log)
        flags: dict[str, Any] = {"etcd": args.etcd, "prefix": args.prefix}
        if args.etcd is None and serve_settings.SETTINGS["etcd"].variable not in os.environ:
            known = read_fleet_file(args.state_dir).get("etcd")
            if known:
                flags["etcd"] = ",".join(known)
        settings = serve_settings.load(flags, os.environ, args.config)
        config = serve_settings.etcd_config(settings)
        return asyncio.run(from_etcd(config, *_archives(args, settings.archive_dir)))
    except LogUnavailable as error:
        raise CliError(
            f"{error}; name it with --etcd, or replay a file with --log", EXIT_UNREACHABLE
        ) from None
    except LogError as error:
        raise CliError(str(error), EXIT_NO) from None


def _archives(args: argparse.Namespace, configured: str) -> tuple[str, ...]:
    """Where the archive may be: where --archive says, or else in the state of `relume up` or where
    replicas are configured to write it."""
    if args.archive:
        return (args.archive,)
    of_state = str(Path(args.state_dir) / "archive")
    return (of_state, configured) if configured else (of_state,)


def _export(args: argparse.Namespace, history: History) -> dict[str, Any]:
    try:
        footer = save(args.export, history.groups, history.base, history.origin, args.note)
    except (LogError, OSError) as error:
        raise CliError(f"could not store the log: {error}", EXIT_NO) from None
    return {"file": args.export, **msgspec.structs.asdict(footer)}


def _verify(history: History) -> Verdict:
    return verify(history.groups, history.base, end=history.footer.end if history.footer else None)


def _state(history: History) -> dict[str, Any]:
    from relume.controlplane.replay.debugger.session import state_of

    fleet = load(dump(history.base)) if history.base is not None else Fleet()
    try:
        for group in history.groups:
            apply_group(fleet, group)
    except LogError as error:
        raise CliError(str(error), EXIT_NO) from None
    return state_of(fleet)


# --- what is shown -------------------------------------------------------------------


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {"ok": verdict.ok, "complete": verdict.complete, **msgspec.to_builtins(verdict)}


def _print_verdict(verdict: Verdict) -> None:
    rows = [
        ("events replayed", verdict.events),
        ("in segments, hash chain checked", verdict.segments),
        ("changes inside engine steps", verdict.changes),
        ("decisions repeated", verdict.decisions),
        ("of them between two or more workers", verdict.contested),
        ("of them judgements of silence", verdict.stalls),
        ("the leader's answers worked out again", verdict.answers),
        ("state hashes compared", verdict.hashes),
        ("events after the last state hash", verdict.unanchored),
        ("divergences", len(verdict.divergences)),
    ]
    if verdict.waits:
        rows.insert(6, ("of them by the admission queue", verdict.waits))
    if verdict.foreign:
        shapes = ", ".join(verdict.shapes)
        rows.insert(-2, (f"of them of state shape {shapes}, order compared alone", verdict.foreign))
    if verdict.skipped:
        rows.insert(4, ("decisions older than the snapshot", verdict.skipped))
    print_table(("what", "count"), rows, "")
    for divergence in verdict.divergences[:_SHOWN]:
        place = f"{divergence.stream}:{divergence.position}" if divergence.stream else "log"
        print_line()
        print_line(f"{divergence.what} at revision {divergence.revision}, {place}")
        print_line(f"  recorded: {divergence.expected}")
        print_line(f"  replayed: {divergence.actual}")
    for line in verdict.unreadable:
        print_line()
        print_line(line)
    for what, count in verdict.untaken.items():
        known = decision_versions.DECISION_VERSIONS.get(what.partition(" ")[0], "none")
        print_line()
        print_line(f"cannot retake {count} decisions: {what}; the version of this build: {known}")
    if verdict.untaken and not verdict.divergences:
        print_line("no divergence in the decisions that this build can retake")
    elif verdict.ok:
        print_line()
        print_line("every decision came out the same")
    elif not verdict.divergences:
        print_line()
        print_line("no divergence, but no decision had an alternative: this log proves nothing")


def _print_state(state: dict[str, Any], history: History) -> None:
    from relume.controlplane.replay.debugger.prompt import console_of
    from relume.controlplane.replay.debugger.screen import show

    show(console_of(), "state", state)
    print_line()
    print_table(("stream", "segments", "kind of event", "count"), list(_counted(history)), "")


def _counted(history: History) -> Iterator[tuple[str, int, str, int]]:
    segments = Counter(segment.stream for group in history.groups for segment in group.segments)
    kinds: dict[str, Counter[str]] = {stream: Counter() for stream in segments}
    for entry in entries(history.groups):
        kinds[entry.stream][entry.kind] += 1
    for stream in sorted(segments):
        for kind, count in kinds[stream].most_common():
            yield stream, segments[stream], kind, count
