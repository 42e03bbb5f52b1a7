"""Output of `relume-chaos fuzz`: progress while it runs, a summary at the end."""

from __future__ import annotations

import argparse
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from relume.chaos.columns import columns
from relume.chaos.runner.fuzz import (
    INTERRUPTED,
    TIME_OVER,
    PlannedRun,
    Ran,
    Tally,
    fuzz,
    planned_runs,
    usable,
)
from relume.chaos.runner.guards import count_guards, guards

_EVERY_S = 0.5
_EVERY_S_IN_A_FILE = 15.0
_SEEDS_SHOWN = 5


class Progress:
    """One line that each update overwrites; without a terminal, a line now and then."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._began = self._shown = time.monotonic()
        self._watched = sys.stderr.isatty()
        self.done = self.failed = self.inconclusive = 0
        self.guards: Counter[str] = Counter()
        """Number of runs that reached each."""

    def seen(self, given: PlannedRun, ran: Ran, _tallies: dict[str, Tally]) -> None:
        """A run has ended."""
        self.done += 1
        self.failed += ran.result == "failed"
        self.inconclusive += ran.result == "inconclusive"
        self.guards.update(ran.guards)
        now = time.monotonic()
        if ran.result == "failed":
            self.clear()
            reason = ran.why[0] if ran.why else ", ".join(ran.signature)
            print(f"FAILED {given.given} seed {given.seed}: {reason}", file=sys.stderr)
        if now - self._shown >= (_EVERY_S if self._watched else _EVERY_S_IN_A_FILE):
            self._shown = now
            self._show(now)

    def _show(self, now: float) -> None:
        rate = self.done / (now - self._began)
        left_s = (self._total - self.done) / rate
        line = (
            f"{self.done}/{self._total} runs, {rate:.1f}/s, {left_s:.0f} s left, "
            f"{self.failed} failed, {self.inconclusive} inconclusive"
        )
        end = "" if self._watched else "\n"
        print(f"\r\x1b[K{line}" if self._watched else line, end=end, file=sys.stderr, flush=True)

    def clear(self) -> None:
        """Erase the line."""
        if self._watched:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def fuzz_command(given: argparse.Namespace) -> int:
    """`relume-chaos fuzz`. Raises ScenarioError."""
    names, waiting = usable([name for name in given.scenarios.split(",") if name])
    if not names:
        print(f"not yet applicable: {', '.join(waiting)}")
        return 2
    if given.guards:
        count_guards()
    progress = Progress(given.seeds)
    began = time.monotonic()
    runs = planned_runs(names, given.first, given.seeds, given.limit, given.out)
    tallies, early = fuzz(runs, given.jobs, given.for_s, progress.seen, given.stop)
    progress.clear()
    took_s = time.monotonic() - began
    missed: list[str] = []
    if given.guards:
        missed = [g.name for g in guards() if not progress.guards[g.name] and not g.unreached]
    if given.json:
        report = summary(tallies, waiting, early, took_s)
        if given.guards:
            report["guards"] = {guard.name: progress.guards[guard.name] for guard in guards()}
        print(msgspec.json.encode(report).decode())
    else:
        if given.guards:
            print("\n".join(guard_lines(progress.guards)))
        print("\n".join(summary_lines(tallies, waiting, early, took_s, given.out)))
    if missed:
        print(f"no run reached: {', '.join(missed)}", file=sys.stderr)
    if missed or any(tally.failed for tally in tallies.values()):
        return 1
    is_planned_end = early in ("", INTERRUPTED, TIME_OVER)
    return 0 if is_planned_end and any(tally.passed for tally in tallies.values()) else 2


def guard_lines(reached: Counter[str]) -> Iterator[str]:
    """How many runs reached each guard."""
    rows = [["runs", "guard", ""]]
    for guard in guards():
        about = (
            f"{guard.what} (no run reaches it: {guard.unreached})"
            if guard.unreached
            else guard.what
        )
        rows.append([str(reached[guard.name]), guard.name, about])
    yield from columns(rows, right=range(1))
    yield ""


def summary(
    tallies: dict[str, Tally], waiting: list[str], early: str, took_s: float
) -> dict[str, Any]:
    """The summary for programs."""
    return {
        "runs": sum(tally.runs for tally in tallies.values()),
        "passed": sum(tally.passed for tally in tallies.values()),
        "failed": sum(tally.failed for tally in tallies.values()),
        "inconclusive": sum(tally.inconclusive for tally in tallies.values()),
        "took_s": round(took_s, 3),
        "ended_early": early,
        "not_yet_applicable": waiting,
        "scenarios": tallies,
    }


def summary_lines(
    tallies: dict[str, Tally], waiting: list[str], early: str, took_s: float, out: Path
) -> Iterator[str]:
    """The summary for people."""
    rows = [["scenario", "runs", "passed", "failed", "inconcl.", "s/run", "events", "fleet s"]]
    for name in sorted(tallies):
        tally = tallies[name]
        counts = tally.runs, tally.passed, tally.failed, tally.inconclusive
        each_s = f"{tally.took_s / max(tally.runs, 1):.2f}"
        rows.append(
            [name, *map(str, counts), each_s, f"{tally.events:,}", f"{tally.virtual_s:,.0f}"]
        )
    yield from columns(rows, right=range(1, 8))
    for name in sorted(tallies):
        yield from _doubts(name, tallies[name])
        yield from _unstruck(name, tallies[name])
    for name in sorted(tallies):
        yield from _failures(name, tallies[name])
    whole = summary(tallies, waiting, early, took_s)
    yield ""
    if waiting:
        yield f"not yet applicable: {', '.join(waiting)}"
    if whole["failed"]:
        yield f"failures are stored in {out}: relume-chaos report FOLDER --ui"
    rate = whole["runs"] / took_s if took_s else 0.0
    yield (
        f"{whole['runs']} runs in {took_s:.1f} s ({rate:.1f}/s): {whole['passed']} passed, "
        f"{whole['failed']} failed, {whole['inconclusive']} inconclusive"
        + (f"; ended early: {early}" if early else "")
    )


def _doubts(name: str, tally: Tally) -> Iterator[str]:
    by_reason: dict[str, list[int]] = {}
    for seed, reason in tally.doubtful:
        by_reason.setdefault(reason, []).append(seed)
    for reason, seeds in by_reason.items():
        yield f"inconclusive {name}: {reason} (seeds {_seeds(seeds)})"


def _unstruck(name: str, tally: Tally) -> Iterator[str]:
    """Faults that found nothing to strike: a kind that never strikes proves nothing in any run."""
    missed = [
        f"{what} {planned - struck} of {planned}"
        for what, (planned, struck) in sorted(tally.faults.items())
        if struck < planned
    ]
    if missed:
        yield f"faults of {name} that did not strike: {', '.join(missed)}"


def _failures(name: str, tally: Tally) -> Iterator[str]:
    by_kind: dict[tuple[str, ...], list[tuple[int, str]]] = {}
    for seed, signature, reason in tally.failing:
        by_kind.setdefault(signature, []).append((seed, reason))
    for signature, found in by_kind.items():
        seeds = sorted(seed for seed, _ in found)
        first = min(found)
        yield ""
        yield f"FAILED {name}: {', '.join(signature)} (seeds {_seeds(seeds)})"
        yield f"  {first[1]}"
        yield f"  relume-chaos run {name} --seed {first[0]}"
        yield f"  relume-chaos shrink {name} --seed {first[0]}"


def _seeds(seeds: list[int]) -> str:
    shown = ", ".join(map(str, sorted(seeds)[:_SEEDS_SHOWN]))
    return shown + (f" and {len(seeds) - _SEEDS_SHOWN} more" if len(seeds) > _SEEDS_SHOWN else "")
