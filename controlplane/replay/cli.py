"""`relume replay` and `relume why`."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from relume.controlplane import config as configuration
from relume.controlplane.cli_client import (
    EXIT_NO,
    EXIT_UNREACHABLE,
    EXIT_USAGE,
    CliError,
    read_fleet_file,
)
from relume.controlplane.cli_output import print_json, print_table
from relume.controlplane.replay import telling
from relume.controlplane.replay.history import History, from_etcd, from_file
from relume.controlplane.replay.store import save
from relume.controlplane.replay.verify import Verdict, verify
from relume.controlplane.replay.why import why
from relume.events import codec
from relume.events.errors import LogError, LogUnavailable
from relume.policies.fleet import apply_group
from relume.policies.state import Fleet, dump, load, state_hash

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
        "--archive", metavar="DIR", default="", help="archive of a log that has been trimmed"
    )
    parser.add_argument("--config", metavar="FILE", default="", help="settings file, for etcd")
    parser.add_argument(
        "--state-dir", default=".relume", help="state of `relume up` (default %(default)s)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `relume replay`."""
    parser.add_argument(
        "--verify", action="store_true", help="take every decision again; exit 1 if one differs"
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
        "--what-if",
        action="append",
        metavar="KEY=VALUE",
        help="the first decision that other settings would change; exit 1 if there is one",
    )
    parser.add_argument(
        "--debug",
        action="store_true",
        help="step through the log at a prompt, or by commands from a pipe (its `help` tells more)",
    )
    parser.add_argument(
        "--do", action="append", metavar="COMMAND", help="run this at the debugger's prompt instead"
    )
    _source(parser)


def add_why_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `relume why`."""
    parser.add_argument("request", help="its id, as in `relume requests`, or one its client knows")
    _source(parser)


def run(args: argparse.Namespace) -> int:
    """`relume replay`: exit 0; 1 when verification says no."""
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
    if args.json:
        report |= _verdict_json(verdict) if verdict is not None else _state_json(_fold(history))
        print_json(report)
    else:
        print(f"log: {history.origin}")
        if args.export:
            print(f"stored in {args.export} ({report['exported']['records']} records)")
        if verdict is not None:
            _print_verdict(verdict)
        else:
            _print_state(history)
    return 0 if verdict is None or verdict.ok else EXIT_NO


def _debug(args: argparse.Namespace, history: History) -> int:
    """The debugger: at a prompt, or by the commands of --do or a pipe."""
    from relume.controlplane.replay import debugger_prompt
    from relume.controlplane.replay.debugger import Debugger

    if not history.groups:
        raise CliError(f"no log at {history.origin}", EXIT_NO)
    debugger = Debugger(history)
    if args.at:
        debugger.run(f"at {args.at}")
    if args.do or args.json or not sys.stdin.isatty():
        return debugger_prompt.script(debugger, args.do or sys.stdin, args.json)
    return debugger_prompt.interactive(debugger)


def _what_if(args: argparse.Namespace, history: History) -> int:
    """Other settings: exit 1 when a decision comes out differently."""
    from relume.controlplane.replay.debugger import outcome_of
    from relume.controlplane.replay.debugger_prompt import console_of
    from relume.controlplane.replay.debugger_show import show_outcome
    from relume.controlplane.replay.debugger_whatif import BadSetting, parse, what_if

    try:
        outcome = what_if(history, parse(args.what_if))
    except BadSetting as error:
        raise CliError(str(error), EXIT_USAGE) from None
    if args.json:
        print_json({"origin": history.origin, **outcome_of(outcome)})
    else:
        show_outcome(console_of(), outcome_of(outcome))
        if outcome.first is not None and outcome.broken is None:
            command = f"relume-chaos what-if {args.log or 'FILE'} {' '.join(args.what_if)}"
            print(f"\nwhat would have followed, simulated: {command}")
            if not args.log:
                print("(FILE as `relume replay --export FILE` writes it)")
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
        print_json(telling.to_json(found))
    else:
        print("\n".join(telling.told(found)))
    return 0


def _load(args: argparse.Namespace) -> History:
    """The log asked for. Raises CliError, ConfigError."""
    try:
        if args.log:
            return from_file(args.log)
        flags: dict[str, Any] = {"etcd": args.etcd, "prefix": args.prefix}
        if args.etcd is None and configuration.variable("etcd") not in os.environ:
            known = read_fleet_file(args.state_dir).get("etcd")
            if known:
                flags["etcd"] = ",".join(known)
        settings = configuration.load(flags, os.environ, args.config)
        archive = args.archive or settings.archive_dir or str(Path(args.state_dir) / "archive")
        return asyncio.run(from_etcd(configuration.etcd_config(settings), archive))
    except LogUnavailable as error:
        raise CliError(
            f"{error}; name it with --etcd, or replay a file with --log", EXIT_UNREACHABLE
        ) from None
    except LogError as error:
        raise CliError(str(error), EXIT_NO) from None


def _export(args: argparse.Namespace, history: History) -> dict[str, Any]:
    try:
        footer = save(args.export, history.groups, history.base, history.origin, args.note)
    except (LogError, OSError) as error:
        raise CliError(f"could not store the log: {error}", EXIT_NO) from None
    return {"file": args.export, **msgspec.structs.asdict(footer)}


def _verify(history: History) -> Verdict:
    return verify(history.groups, history.base, end=history.footer.end if history.footer else None)


def _fold(history: History) -> Fleet:
    fleet = load(dump(history.base)) if history.base is not None else Fleet()
    try:
        for group in history.groups:
            apply_group(fleet, group)
    except LogError as error:
        raise CliError(str(error), EXIT_NO) from None
    return fleet


# --- what is shown -------------------------------------------------------------------


def _verdict_json(verdict: Verdict) -> dict[str, Any]:
    return {"ok": verdict.ok, **msgspec.to_builtins(verdict)}


def _print_verdict(verdict: Verdict) -> None:
    rows = [
        ("events replayed", verdict.events),
        ("in segments, hash chain checked", verdict.segments),
        ("changes inside engine steps", verdict.changes),
        ("decisions taken again", verdict.decisions),
        ("of them between two or more workers", verdict.contested),
        ("of them judgements of silence", verdict.stalls),
        ("the leader's answers worked out again", verdict.answers),
        ("state hashes compared", verdict.hashes),
        ("events behind the last state hash", verdict.unanchored),
        ("divergences", len(verdict.divergences)),
    ]
    if verdict.waits:
        rows.insert(6, ("of them about the waiting room", verdict.waits))
    if verdict.foreign:
        rows.insert(-2, ("of them of another build, order compared alone", verdict.foreign))
    if verdict.skipped:
        rows.insert(4, ("decisions older than the snapshot", verdict.skipped))
    print_table(("what", "count"), rows, "")
    for divergence in verdict.divergences[:_SHOWN]:
        place = f"{divergence.stream}:{divergence.position}" if divergence.stream else "log"
        print(f"\n{divergence.what} at revision {divergence.revision}, {place}")
        print(f"  recorded: {divergence.expected}")
        print(f"  replayed: {divergence.actual}")
    if verdict.ok:
        print("\nevery decision came out the same")
    elif not verdict.divergences:
        print("\nno divergence, but no decision had an alternative: this log proves nothing")


def _state_json(fleet: Fleet) -> dict[str, Any]:
    return {
        "revision": fleet.revision,
        "hash": state_hash(fleet).hex(),
        "leader": fleet.leader,
        "workers": [msgspec.to_builtins(w) for w in fleet.workers.values()],
        "replicas": [msgspec.to_builtins(r) for r in fleet.replicas.values()],
        "requests": list(fleet.requests),
        "arrived": fleet.arrived,
        "ended": fleet.ended,
        "decisions": fleet.decisions,
    }


def _print_state(history: History) -> None:
    fleet = _fold(history)
    print(f"state after revision {fleet.revision}, hash {state_hash(fleet).hex()}")
    print(
        f"{fleet.arrived} requests arrived, {fleet.ended} ended, {len(fleet.requests)} live; "
        f"{fleet.decisions} decisions; leader {fleet.leader or 'none'}\n"
    )
    workers = [
        (
            w.name,
            "left" if w.engine == "none" else w.engine if w.present else f"{w.engine}, lost",
            w.incarnation,
            len(w.attempts),
            w.prefill_left,
            w.deaths,
            w.died_of or "-",
        )
        for w in fleet.workers.values()
    ]
    headings = ("worker", "engine", "life", "requests", "prompt tokens left", "deaths", "last")
    print_table(headings, workers, "no workers")
    print()
    print_table(("stream", "segments", "kind of event", "count"), list(_counted(history)), "")


def _counted(history: History) -> Iterator[tuple[str, int, str, int]]:
    segments: Counter[str] = Counter()
    kinds: dict[str, Counter[str]] = {}
    for group in history.groups:
        for segment in group.segments:
            segments[segment.stream] += 1
            counter = kinds.setdefault(segment.stream, Counter())
            for event in codec.decode_all(segment.records):
                counter[codec.tag_of(event).partition("/")[0]] += 1
    for stream in sorted(segments):
        for kind, count in kinds[stream].most_common():
            yield stream, segments[stream], kind, count
