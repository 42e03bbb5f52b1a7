"""One seeded bug at a time in a copy of the tree: what notices it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct

from tests.bugs.bug_table import ROOT, Bug

COPIED = ("chaos", "controlplane", "deploy", "engine_shim", "events", "policies", "relume", "tests")
"""Folders of the tree that a bug is tried in."""
FILES = ("pyproject.toml", "Makefile", "README.md")
UNITS_S = 300
"""Maximum duration of the tests of one bug."""


class Noticed(Struct, frozen=True, kw_only=True):
    """What noticed a bug. `fuzz`: the promises, or errors, of the run that failed first, after
    `seeds` seeds, `scenario` and `seed` of it; empty: none of `seeds` runs did. `unit`: the test that
    failed first; empty: none did, or none was run. `broken`: neither could be run, and why."""

    bug: str
    fuzz: tuple[str, ...] = ()
    seeds: int = 0
    scenario: str = ""
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

    def try_bug(self, bug: Bug, seeds: int, everything: bool) -> Noticed:
        """Fuzz up to `seeds` runs, then, if none failed or with `everything`, its tests."""
        began = time.monotonic()
        with self._with(bug):
            found = self._fuzzed(bug, seeds)
            unit, broken = "", found.broken
            if everything or not found.fuzz:
                unit, failure = self._tested(bug)
                broken = broken or failure
        return Noticed(
            bug=bug.name,
            fuzz=found.fuzz,
            seeds=found.seeds,
            scenario=found.scenario,
            unit=unit,
            broken=broken,
            took_s=round(time.monotonic() - began, 1),
        )

    @contextmanager
    def _with(self, bug: Bug) -> Iterator[None]:
        before = (self.folder / bug.file).read_text()
        try:
            self._write(bug.file, bug.changed(self.folder))
            yield
        finally:
            self._write(bug.file, before)

    def _write(self, name: str, text: str) -> None:
        """With a time of its own, by which Python sees that what it compiled is out of date."""
        path = self.folder / name
        path.write_text(text)
        self._written_at += 10
        os.utime(path, (self._written_at, self._written_at))

    def _fuzzed(self, bug: Bug, seeds: int) -> Noticed:
        if not seeds:
            return Noticed(bug=bug.name)
        out = str(self.folder / "failed")
        command = ("relume.chaos.runner", "fuzz", "--seeds", str(seeds), "--jobs", "1")
        done = self._run((*command, "--stop", "--json", "--out", out), None)
        shutil.rmtree(out, ignore_errors=True)
        lines = done.stdout.strip().splitlines()
        try:
            found = json.loads(lines[-1])
        except (IndexError, ValueError):
            return Noticed(bug=bug.name, broken=_last(done.stderr))
        for scenario, tally in found["scenarios"].items():
            for seed, signature, reason in tally["failing"]:
                told = tuple(signature) or (reason,)
                name = f"{scenario} {seed}"
                return Noticed(bug=bug.name, fuzz=told, seeds=found["runs"], scenario=name)
        return Noticed(bug=bug.name, seeds=found["runs"])

    def _tested(self, bug: Bug) -> tuple[str, str]:
        """The test that failed first, or why none could be run."""
        if not bug.units:
            return "", ""
        command = ("pytest", "-x", "-q", "-p", "no:cacheprovider", *bug.units)
        try:
            done = self._run(command, UNITS_S)
        except subprocess.TimeoutExpired:
            return f"{bug.units[0]}: no end within {UNITS_S} s", ""
        if done.returncode == 0:
            return "", ""
        for line in done.stdout.splitlines():
            if line.startswith(("FAILED ", "ERROR ")):
                return line.split()[1], ""
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


def _last(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1][:200] if lines else "no output"
