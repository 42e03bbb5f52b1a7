"""Run one tier of the tests: `python -m tests.suite.tiers TIER [PYTEST ARGUMENTS]`.

A tier is a list of stages, each a pytest command. The process becomes the next stage when one is
over (exec), so a signal always reaches the pytest that runs. Tests of engines and fleets have a
stage of their own, with one process for each of the two groups, and the core has one. After the last stage the output
ends with the slowest tests and the counts of all stages. Exit status: pytest's own of the first
stage that failed.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

SPREAD = ("-n", str((os.cpu_count() or 1) + 1), "--dist", "worksteal")
"""One process more than there are cores: many of these tests wait for leases and processes."""
BY_GROUP = ("-n", "2", "--dist", "loadgroup")
CORE_IN = "tests/live"
"""Where the tests of the core stand; the stage of the core collects no others."""
CORE = ("-m", "core", "-o", f"testpaths={CORE_IN}", "--inconclusive-limit", "0")
"""In one process, with nothing beside it."""
TIERS: dict[str, tuple[tuple[str, ...], ...]] = {
    "check": ((*SPREAD, "-m", "not core and not full and not etcd"),),
    "test": ((*SPREAD, "-m", "not core and not full"), CORE),
    "full": ((*SPREAD, "-m", "not engine"), (*BY_GROUP, "-m", "engine and not core"), CORE),
}
COUNTS = ("passed", "failed", "skipped", "repeated", "inconclusive")
SLOWEST = 20
GOES_ON = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
STAGE, TALLY = "RELUME_TEST_STAGE", "RELUME_TEST_TALLY"
"""Environment variables: the number of the stage, and the file in which all stages are counted."""


def main(tier: str, arguments: Sequence[str]) -> int:
    """Run the present stage of `tier` and become the next one. Returns the exit status."""
    stage, tally = int(os.environ.pop(STAGE, "0")), os.environ.pop(TALLY, "")
    if not tally:
        handle, tally = tempfile.mkstemp(prefix="relume-tests-", suffix=".json")
        os.close(handle)
    status = pytest.main([*TIERS[tier][stage], f"--tally={tally}", *arguments])
    statuses = [*_read(tally).get("statuses", []), int(status)]
    _write(tally, statuses=statuses)
    if status in GOES_ON and stage + 1 < len(TIERS[tier]):
        os.environ |= {STAGE: str(stage + 1), TALLY: tally}
        sys.stdout.flush()
        os.execv(sys.executable, [sys.executable, "-m", "tests.suite.tiers", tier, *arguments])
    print("\n".join(summary(_read(tally))), flush=True)
    Path(tally).unlink()
    return verdict(statuses)


def verdict(statuses: Sequence[int]) -> int:
    """Exit status of all stages together: a stage without tests counts only if all are so."""
    empty = int(pytest.ExitCode.NO_TESTS_COLLECTED)
    return next((status for status in statuses if status not in (0, empty)), min(statuses))


def record(tally: str, stats: dict[str, list[Any]]) -> None:
    """Add the reports of a stage to the file `tally`. `stats` as pytest's terminal reporter has
    them: reports by category."""
    known = _read(tally)
    counts = Counter(known.get("counts", {}))
    for category, name in (*((name, name) for name in COUNTS), ("error", "failed")):
        counts[name] += len({report.nodeid for report in stats.get(category, ())})
    seconds: Counter[str] = Counter()
    for report in (report for reports in stats.values() for report in reports):
        if hasattr(report, "duration"):
            seconds[report.nodeid] += report.duration
    slowest = Counter(dict(known.get("slowest", []))) + seconds
    _write(tally, counts=counts, slowest=slowest.most_common(SLOWEST))


def summary(tally: dict[str, Any]) -> list[str]:
    """The last lines of the output: the slowest tests, and how many had which outcome."""
    counts = Counter(tally.get("counts", {}))
    slowest = [f"  {seconds:6.1f} s  {name}" for name, seconds in tally.get("slowest", [])]
    return [
        f"slowest {len(slowest)} tests:",
        *slowest,
        f"{counts['repeated']} repeated, {counts['inconclusive']} inconclusive",
        f"{counts['passed']} passed, {counts['failed']} failed, {counts['skipped']} skipped",
    ]


def _read(tally: str) -> dict[str, Any]:
    text = Path(tally).read_text()
    return json.loads(text) if text else {}


def _write(tally: str, **more: Any) -> None:
    Path(tally).write_text(json.dumps({**_read(tally), **more}))


if __name__ == "__main__":
    if len(sys.argv) < 2 or sys.argv[1] not in TIERS:
        sys.exit(f"usage: python -m tests.suite.tiers {{{','.join(TIERS)}}} [PYTEST ARGUMENTS]")
    sys.exit(main(sys.argv[1], sys.argv[2:]))
