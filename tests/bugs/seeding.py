"""One seeded bug at a time in a copy of the tree: what notices it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct

from tests.bugs.bug_table import ROOT, Bug
from tests.bugs.probes import by_file, insert

COPIED = ("chaos", "controlplane", "deploy", "docs", "engine_shim", "events", "policies", "relume")
COPIED += ("tests",)
"""Folders of the tree that a bug is tried in."""
FILES = ("pyproject.toml", "Makefile", "README.md")
UNITS_S = 300
"""Maximum duration of the tests of one bug."""
TEST_S = 100
"""Maximum duration of one of them: a test without an end fails."""
ALL = 1_000_000
"""More runs than any bug is tried with."""


class Noticed(Struct, frozen=True, kw_only=True):
    """What noticed a bug. `fuzz`: the promises, or errors, of a run that failed, the last of the first
    `seeds`, of this `scenario`; empty: none of `seeds` runs did. `met`: how many of the runs met the
    bug; `tried`: how many of those were made with it. `unit`: the test that failed first; empty: none
    did, or none was run. `broken`: neither could be run, and why."""

    bug: str
    fuzz: tuple[str, ...] = ()
    seeds: int = 0
    scenario: str = ""
    met: int = 0
    tried: int = 0
    unit: str = ""
    broken: str = ""
    took_s: float = 0.0

    @property
    def by_anything(self) -> bool:
        """Whether anything did."""
        return bool(self.fuzz or self.unit)


class Tree:
    """A copy of the tree in `folder`, in which one bug after another is tried."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._written_at = 1_000_000_000
        for name in COPIED:
            shutil.copytree(
                ROOT / name,
                folder / name,
                symlinks=True,
                ignore=shutil.ignore_patterns("__pycache__"),
            )
        for name in FILES:
            shutil.copy(ROOT / name, folder / name)

    def seeds_that_meet(self, bugs: Sequence[Bug], seeds: int) -> dict[str, tuple[int, ...]]:
        """By bug, which of the first seeds meet it (`tests.bugs.probes`). Raises RuntimeError if the
        sweep does not come to its end."""
        everywhere: set[str] = set()
        with ExitStack() as changed:
            for file, here in by_file(bugs):
                text, found = insert((self.folder / file).read_text(), here)
                everywhere |= found
                changed.enter_context(self._with(file, text))
            runs, failure = self._swept(range(seeds), "--all")
        if len(runs) < seeds:
            raise RuntimeError(failure)
        return {
            bug.name: tuple(
                run["seed"] for run in runs if bug.name in everywhere or bug.name in run["met"]
            )
            for bug in bugs
        }

    def try_bug(
        self,
        bug: Bug,
        seeds: int,
        met: Sequence[int],
        everything: bool,
        tries: int = ALL,
        before: Noticed | None = None,
    ) -> Noticed:
        """Fuzz with the seeds of `met`, the ones of the first `seeds` that meet it, or with `tries` of
        them, drawn at random, without those that were tried `before`; then, if none failed or with
        `everything`, its tests."""
        began = time.monotonic()
        tried = before.tried if before is not None else 0
        chosen = drawn(bug, met)[tried:tries]
        unit = before.unit if before is not None else ""
        with self._with(bug.file, bug.changed(self.folder)):
            found = self._fuzzed(bug, seeds, chosen)
            is_new, broken = not unit and (everything or not found.fuzz), found.broken
            if is_new:
                unit, failure = self._tested(bug.units)
                broken = broken or failure
        if is_new and unit and any(self._tested((unit,))):
            unit, broken = "", f"{unit} fails without the bug, too"
        return Noticed(
            bug=bug.name,
            fuzz=found.fuzz,
            seeds=found.seeds,
            scenario=found.scenario,
            met=len(met),
            tried=tried + len(chosen),
            unit=unit,
            broken=broken,
            took_s=round(time.monotonic() - began, 1),
        )

    def run_with(self, bug: Bug, scenario: str, seed: int) -> tuple[str, ...]:
        """What a run of the scenario breaks with the bug. Raises RuntimeError if it does not end."""
        with self._with(bug.file, bug.changed(self.folder)):
            runs, failure = self._swept([seed], scenario)
        if not runs:
            raise RuntimeError(failure)
        return tuple(runs[0]["noticed"]) if runs[0]["result"] == "failed" else ()

    @contextmanager
    def _with(self, file: str, text: str) -> Iterator[None]:
        before = (self.folder / file).read_text()
        try:
            self._write(file, text)
            yield
        finally:
            self._write(file, before)

    def _write(self, name: str, text: str) -> None:
        """With a time of its own, by which Python sees that what it compiled is out of date."""
        path = self.folder / name
        path.write_text(text)
        self._written_at += 10
        os.utime(path, (self._written_at, self._written_at))

    def _fuzzed(self, bug: Bug, seeds: int, met: Sequence[int]) -> Noticed:
        """The seed at which it was found before comes first. The one that finds it stands for the first
        that does: it is found by then at the latest."""
        first = [bug.seed] if bug.seed in met else []
        runs, failure = self._swept([*first, *sorted(seed for seed in met if seed != bug.seed)])
        if runs and runs[-1]["result"] == "failed":
            found = runs[-1]
            return Noticed(
                bug=bug.name,
                fuzz=tuple(found["noticed"]),
                seeds=found["seed"] + 1,
                scenario=found["scenario"],
            )
        return Noticed(bug=bug.name, seeds=seeds, broken=failure if len(runs) < len(met) else "")

    def _swept(self, seeds: Sequence[int], *more: str) -> tuple[list[dict[str, Any]], str]:
        """What came of runs with these seeds, and the last line of what was said beside that."""
        if not seeds:
            return [], ""
        done = self._run(("tests.bugs.sweep", ",".join(map(str, seeds)), *more), None)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"seed"')]
        return [json.loads(line) for line in lines], _last(done.stderr)

    def _tested(self, units: tuple[str, ...]) -> tuple[str, str]:
        """The test that failed first, or why they could not be run."""
        if not units:
            return "", ""
        command = ("pytest", "-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_S}", *units)
        try:
            done = self._run(command, UNITS_S)
        except subprocess.TimeoutExpired:
            return "", f"{', '.join(units)}: no end within {UNITS_S} s"
        if done.returncode == 0:
            return "", ""
        for line in done.stdout.splitlines():
            if line.startswith(("FAILED ", "ERROR ")):
                return line.split(" ", 1)[1].partition(" - ")[0].strip(), ""
        return "", _last(done.stdout + done.stderr)

    def _run(
        self, command: tuple[str, ...], limit_s: float | None
    ) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "PYTHONPATH": str(self.folder)}
        return subprocess.run(
            (sys.executable, "-m", *command),
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=limit_s,
            check=False,
        )


def drawn(bug: Bug, met: Sequence[int]) -> list[int]:
    """The seeds of `met` in a random order, the same each time. The seed at which the bug was found before
    comes first."""
    order = sorted(met)
    Random(bug.name).shuffle(order)
    return sorted(order, key=lambda seed: seed != bug.seed)


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else "no output"
