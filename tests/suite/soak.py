"""Repeat tests beside busy processors: `python -m tests.suite.soak [SELECTION] [--times N]`.

SELECTION and all other arguments are pytest's; without a selection it is the core. A round is one
pytest command, as in `make test`, but no test runs a second time in it. Rounds follow one another,
so a session's fixture lasts for one round. A process that crashes costs the rest of its round. The
output ends with a table by test, a row for docs/testing/index.md, and the counts. Exit status: 0
if no test failed or was inconclusive, 1 otherwise, 2 after an interruption.

Ctrl-C reaches this process alone, which interrupts pytest once: the round ends in order. However
this process ends, pytest and the processes that burn CPU end too.
"""

from __future__ import annotations

import argparse
import ctypes
import datetime
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import pytest

from relume.chaos.runner.artifacts import checkout
from relume.controlplane.cli.output import print_table
from tests.suite.outcomes import INCONCLUSIVE, LOST, Run

OUTCOMES = ("passed", "failed", INCONCLUSIVE, "skipped")
BURNER = "while True: pass"
PYTEST = "pytest itself"
"""In the place of a test: a round that ended in disorder, but in no test."""
_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


class Soak:
    """Rounds of the tests that `arguments` select. `runs`: what ran, with its round."""

    def __init__(self, arguments: Sequence[str], times: int) -> None:
        self.runs: list[tuple[int, Run]] = []
        self.interrupted = False
        self._arguments = arguments
        self._times = times
        self._pytest: subprocess.Popen[bytes] | None = None

    def interrupt(self, number: int, frame: FrameType | None) -> None:
        """End the present round in order, and begin no other."""
        self.interrupted = True
        if self._pytest is not None:
            self._pytest.send_signal(signal.SIGINT)

    def run(self) -> None:
        """All rounds; a round without a single test is the last."""
        began = time.monotonic()
        for number in range(1, self._times + 1):
            found = self._round()
            self.runs += [(number, run) for run in found]
            took = f"[{time.monotonic() - began:6.0f} s] round {number} of {self._times}"
            print(f"{took}{', interrupted' * self.interrupted}: {counts(found)}", flush=True)
            if self.interrupted or all(run.test == PYTEST for run in found):
                return

    def _round(self) -> list[Run]:
        with tempfile.NamedTemporaryFile("r", prefix="relume-soak-") as file:
            command = [sys.executable, "-m", "pytest", "-q", f"--runs={file.name}"]
            self._pytest = _start([*command, *self._arguments])
            if self.interrupted:  # before there was a process to interrupt
                self._pytest.send_signal(signal.SIGINT)
            status = self._pytest.wait()
            runs = {run.test: run for run in (Run(*json.loads(line)) for line in file)}
        found = list(runs.values())
        if self.interrupted:
            return [run for run in found if run.text != LOST]
        in_order = status in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
        if not in_order and all(run.text != LOST for run in found):
            found.append(Run(PYTEST, "failed", 0.0, f"exit status {status}"))
        return found


@contextmanager
def burners(count: int) -> Iterator[None]:
    """`count` processes burn CPU meanwhile."""
    started = [_start([sys.executable, "-c", BURNER]) for _ in range(count)]
    try:
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()


def _start(command: Sequence[str]) -> subprocess.Popen[bytes]:
    """A child out of reach of the terminal's Ctrl-C, which gets SIGTERM when this process dies."""
    parent = os.getpid()

    def end_with_parent() -> None:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
        if os.getppid() != parent:
            os._exit(1)

    return subprocess.Popen(
        command, stdin=subprocess.DEVNULL, preexec_fn=end_with_parent, process_group=0
    )


def with_selection(arguments: Sequence[str]) -> list[str]:
    """pytest's arguments, with the core where they select nothing: no expression and no path."""
    for one in arguments:
        if one.startswith(("-m", "-k")) or Path(one.partition("::")[0]).exists():
            return list(arguments)
    return ["-m", "core", *arguments]


def counts(runs: Iterable[Run]) -> str:
    """How many had which outcome."""
    found = Counter(run.outcome for run in runs)
    return ", ".join(f"{found[outcome]} {outcome}" for outcome in OUTCOMES)


def print_report(runs: Sequence[tuple[int, Run]]) -> None:
    """The table by test, and the first failed and the first inconclusive run of each test."""
    tests: dict[str, list[tuple[int, Run]]] = {}
    for number, run in runs:
        tests.setdefault(run.test, []).append((number, run))
    rows, failures = [], []
    for test, ran in tests.items():
        found = Counter(run.outcome for _, run in ran)
        seconds = [run.seconds for _, run in ran if run.text != LOST] or [0.0]
        times = (f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}")
        rows.append((len(ran), *(found[outcome] for outcome in OUTCOMES), *times, test))
        for outcome in ("failed", INCONCLUSIVE):
            first = [(number, run) for number, run in ran if run.outcome == outcome][:1]
            failures += [f"round {n}, {outcome}: {test}: {run.text}" for n, run in first]
    print()
    print_table(("runs", *OUTCOMES, "median s", "max s", "test"), rows, "no test ran")
    if failures:
        print("", *failures, sep="\n")


def main(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser("python -m tests.suite.soak", allow_abbrev=False)
    parser.add_argument("--times", type=int, default=20, help="rounds (default: %(default)s)")
    parser.add_argument(
        "--busy", type=int, default=2, help="processes that burn CPU (default: %(default)s)"
    )
    options, rest = parser.parse_known_args(argv)
    arguments, (commit, changed) = with_selection(rest), checkout()
    soak = Soak(arguments, options.times)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, soak.interrupt)
    with burners(options.busy):
        soak.run()
    print_report(soak.runs)
    runs = [run for _, run in soak.runs]
    result = f"{counts(runs)}{', interrupted' * soak.interrupted}"
    code = f"{commit[:7]}{' with changes' * changed}"
    selection = f"`{shlex.join(arguments)}`"
    cells = (datetime.date.today(), code, selection, options.times, options.busy, result)
    print(f"\n| {' | '.join(map(str, cells))} |")
    print(f"{len({run.test for run in runs})} tests, {len(runs)} runs: {counts(runs)}", flush=True)
    if soak.interrupted:
        return int(pytest.ExitCode.INTERRUPTED)
    outcomes = {run.outcome for run in runs}
    return int("passed" not in outcomes or not outcomes.isdisjoint(("failed", INCONCLUSIVE)))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
