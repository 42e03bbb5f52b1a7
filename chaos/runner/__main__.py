"""`relume-chaos run`, `fuzz`, `shrink` and `report`.

Exit status 0: it passed; 1: something failed; 2: it proves nothing (inconclusive), or no run was
possible.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from relume.chaos.runner import artifacts, world
from relume.chaos.runner.cases import Case, case_of, fixed_yaml, scenario_yaml
from relume.chaos.runner.fuzz_progress import fuzz_command
from relume.chaos.runner.judge import judge
from relume.chaos.runner.report import verdict_text as telling
from relume.chaos.runner.report.report_command import EXIT, report_command, show_run
from relume.chaos.runner.shrink import NotFailing, shrink, size_of
from relume.chaos.scenario.problems import ScenarioError
from relume.chaos.scenario.request_traces import TraceError
from relume.controlplane.cli.admin_client import CliError
from relume.controlplane.cli.output import print_error, print_lines
from relume.events.log.errors import LogError

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}


def duration(text: str) -> float:
    """Seconds, from `90`, `90s`, `5m` or `1h`. Raises argparse.ArgumentTypeError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh]?)", text)
    if not found or not float(found[1]):
        raise argparse.ArgumentTypeError(f"{text!r} is no time; write 90s, 5m or 1h")
    return float(found[1]) * _UNITS[found[2]]


def count(text: str) -> int:
    """A whole number from 1. Raises argparse.ArgumentTypeError."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1")
    return int(text)


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="relume-chaos", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    what = "a name of the library, a YAML file, a folder of an earlier run, or `composed`"

    run = commands.add_parser("run", help="run a scenario and judge it")
    run.add_argument("scenario", help=what)
    run.add_argument("--seed", type=int, default=0, help="a whole number (default 0)")
    run.add_argument("--live", action="store_true", help="use real processes")
    run.add_argument("--out", type=Path, metavar="DIR", help="store the run in this folder")
    run.add_argument("--json", action="store_true", help="print the verdict as JSON")
    run.add_argument("--print", action="store_true", help="print the scenario and exit")
    run.add_argument("--limit", type=duration, default=None, metavar="TIME",
                     help="maximum real time (default 120s, live 10m)")  # fmt: skip

    fuzz = commands.add_parser("fuzz", help="run many seeds over many scenarios")
    fuzz.add_argument("--seeds", type=count, default=100, help="number of runs (default 100)")
    fuzz.add_argument("--first", type=int, default=0, help="the first seed (default 0)")
    fuzz.add_argument("--scenarios", default="", metavar="A,B",
                      help="run only these (default: the library, and composed)")  # fmt: skip
    fuzz.add_argument("--jobs", type=count, default=os.cpu_count() or 1, help="processes")
    fuzz.add_argument("--for", dest="for_s", type=duration, metavar="TIME", help="maximum duration")
    fuzz.add_argument("--stop", action="store_true", help="stop at the first failed run")
    fuzz.add_argument("--guards", action="store_true",
                      help="count the runs that reach each guard of the product "
                      "(chaos/runner/guards.toml); status 1 if none reaches one")  # fmt: skip
    fuzz.add_argument("--limit", type=duration, default=60.0, metavar="TIME",
                      help="maximum real time per run (default 60s)")  # fmt: skip
    fuzz.add_argument("--out", type=Path, default=Path(".relume/chaos"), metavar="DIR",
                      help="folder for failed runs (default %(default)s)")  # fmt: skip
    fuzz.add_argument("--json", action="store_true", help="print the summary as JSON")

    small = commands.add_parser("shrink", help="make a failing scenario small")
    small.add_argument("scenario", help=what)
    small.add_argument("--seed", type=int, default=0, help="a whole number (default 0)")
    small.add_argument("--for", dest="for_s", type=duration, default=600.0, metavar="TIME",
                       help="maximum duration (default 10m)")  # fmt: skip
    small.add_argument("--limit", type=duration, default=60.0, metavar="TIME",
                       help="maximum real time per run (default 60s)")  # fmt: skip
    small.add_argument("--out", type=Path, metavar="FILE", help="file for the small case")

    report = commands.add_parser("report", help="show a stored run")
    report.add_argument("folder", type=Path, metavar="RUN", help="folder of the run")
    report.add_argument(
        "--ui", action="store_true", help="show the run and its log in a browser, until Ctrl-C"
    )
    report.add_argument(
        "--port", type=int, default=0, help="port of --ui on this machine (default: a free one)"
    )
    report.add_argument("--json", action="store_true", help="print verdict and timeline as JSON")
    return parser.parse_args(argv)


def _run(given: argparse.Namespace) -> int:
    case = case_of(given.scenario, given.seed)
    if given.print:
        print(scenario_yaml(case.scenario), end="")
        return 0
    _say(f"{case.scenario.name}, seed {case.schedule.seed}: {size_of(case)}")
    if given.live:
        folder = given.out / "processes" if given.out is not None else None
        done = world.judged(lambda: world.live(case, folder), given.limit or 600.0)
    else:
        done = world.judged(lambda: world.simulate(case), given.limit or 120.0)
    if done.verdict is None or done.run is None:
        print_lines(("FAILED: the run could not be judged", *done.why))
        print(f"repeat: {case.command}")
        return 1
    command = case.command + (" --live" if given.live else "")
    if given.out is not None:
        artifacts.keep(given.out, done.run, done.verdict, command)
        _say(f"stored in {given.out}")
    if given.json:
        print(msgspec.json.encode(done.verdict).decode())
    else:
        print_lines(telling.verdict_lines(done.verdict))
        print(f"took {done.took_s:.2f} s for {done.run.ended_ns / 1e9:.1f} s of the fleet")
        print(f"repeat: {command}")
    return EXIT[done.verdict.result]


def _shrink(given: argparse.Namespace) -> int:
    case = case_of(given.scenario, given.seed)
    _say(f"{case.scenario.name}, seed {case.schedule.seed}: {size_of(case)}")

    def attempt(smaller: Case) -> world.JudgedRun:
        return world.judged(lambda: world.simulate(smaller), given.limit)

    try:
        found = shrink(
            case,
            attempt,
            time.monotonic() + given.for_s,
            lambda runs, smaller: _say(f"run {runs}: {size_of(smaller)}"),
        )
    except NotFailing as error:
        print(error, file=sys.stderr)
        return 2
    path = given.out or Path(f"{case.scenario.name}-{case.schedule.seed}.case.yaml")
    note = f"breaks {found.target}: {found.judged.why[0] if found.judged.why else ''}"
    path.write_text(fixed_yaml(found.case, note), encoding="utf-8")
    print(scenario_yaml(found.case.scenario), end="")
    print(f"\n{note}")
    print(f"{size_of(found.case)}; {found.runs} runs" + ("" if found.complete else ", cut short"))
    print(f"repeat: relume-chaos run {path}")
    return 0


def _report(given: argparse.Namespace) -> int:
    outcome, run = artifacts.outcome_in(given.folder)
    if not given.ui:
        return report_command(outcome, run, judge(outcome), given.json)
    try:
        return show_run(outcome, run, judge(outcome), given.port)
    except CliError as error:
        print_error(f"relume-chaos report: {error}")
        return error.code


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def main(argv: Sequence[str]) -> int:
    """Run a command; errors in its input go to stderr."""
    given = _arguments(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    work = {"run": _run, "fuzz": fuzz_command, "shrink": _shrink, "report": _report}
    try:
        status = work[given.command](given)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `relume-chaos report RUN | head`: not an error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0 if given.command == "report" else 2
    except (ScenarioError, TraceError, artifacts.BadRun, LogError, OSError) as error:
        _say(str(error))
        return 2
    except KeyboardInterrupt:
        _say("interrupted")
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
