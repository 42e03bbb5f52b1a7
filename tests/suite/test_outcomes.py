"""Repeated and inconclusive tests: which run again, how they are counted, when they fail a run."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.suite.outcomes import Inconclusive, inconclusive, reason_of

ROOT = Path(__file__).parents[2]
BARE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Other plugins take most of the time that a start of pytest takes."""
HEAD = """
import pytest
from pathlib import Path
from tests.suite.outcomes import inconclusive

def runs(name):
    with Path("runs").open("a") as file:
        file.write(name + "\\n")
    return Path("runs").read_text().split().count(name)

"""


def run(folder: Path, tests: str, *arguments: str) -> tuple[int, str]:
    """Exit status and output of pytest over these tests."""
    (folder / "test_it.py").write_text(HEAD + tests)
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-p", "tests.suite.outcomes"),
            *("-p", "no:cacheprovider", "-p", "timeout", "-p", "xdist", *arguments),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "COLUMNS": "200", **BARE},
        capture_output=True,
        text=True,
        timeout=100,
    )
    return done.returncode, done.stdout + done.stderr


def counts(folder: Path) -> dict[str, int]:
    """How often each test ran."""
    names = (folder / "runs").read_text().split()
    return {name: names.count(name) for name in names}


FLAKY = """
@pytest.mark.flaky(reason="races with the engine")
def test_flaky():
    assert runs("flaky") == {passes_at}

def test_other():
    assert runs("other") == 2
"""


@pytest.mark.parametrize("processes", [(), ("-n", "2")])
def test_only_a_flaky_test_that_failed_runs_once_more(
    tmp_path: Path, processes: tuple[str, ...]
) -> None:
    status, said = run(tmp_path, FLAKY.format(passes_at=2), *processes)
    assert status == 1, "test_other fails and is not repeated"
    assert counts(tmp_path) == {"flaky": 2, "other": 1}
    assert "1 failed, 1 passed, 1 repeated" in said
    assert "1 tests were repeated" in said
    assert "test_it.py::test_flaky: failed: " in said and "assert 1 == 2" in said


def test_a_flaky_test_that_fails_twice_has_failed(tmp_path: Path) -> None:
    status, said = run(tmp_path, FLAKY.format(passes_at=3), "-k", "flaky")
    assert status == 1 and counts(tmp_path) == {"flaky": 2}
    assert "1 failed, 1 deselected, 1 repeated" in said


@pytest.mark.slow
def test_a_repetition_has_fixtures_and_a_timeout_of_its_own(tmp_path: Path) -> None:
    tests = """
import time

@pytest.fixture
def fresh():
    yield runs("setup")
    runs("teardown")

@pytest.mark.timeout(1)
@pytest.mark.flaky(reason="slow", repeats=2)
def test_slow(fresh):
    assert Path("runs").read_text().split().count("teardown") == fresh - 1
    if fresh < 3:
        time.sleep(30)
"""
    status, said = run(tmp_path, tests, "-o", "timeout_method=signal")
    assert status == 0, said
    assert "1 passed, 2 repeated" in said and said.count("Timeout") >= 2


@pytest.mark.parametrize(
    "mark", ["flaky", 'flaky("why")', 'flaky(reason="")', 'flaky(reason="why", repeats=3)']
)
def test_a_flaky_mark_needs_a_reason_and_at_most_two_repeats(tmp_path: Path, mark: str) -> None:
    status, said = run(tmp_path, f"@pytest.mark.{mark}\ndef test_it():\n    runs('it')\n")
    assert status == pytest.ExitCode.USAGE_ERROR, said
    assert "flaky" in said and not (tmp_path / "runs").exists()


def test_an_inconclusive_test_runs_once_more_and_fails_only_beyond_the_limit(
    tmp_path: Path,
) -> None:
    tests = """
def test_never():
    runs("never")
    inconclusive("the stream ended first")

def test_then():
    if runs("then") == 1:
        inconclusive("too late")

def test_wrong():
    if runs("wrong") == 1:
        inconclusive("too late")
    assert False
"""
    status, said = run(tmp_path, tests, "-k", "not wrong")
    assert status == 0 and counts(tmp_path) == {"never": 2, "then": 2}
    assert "1 passed, 1 deselected, 2 repeated, 1 inconclusive" in said
    assert "test_it.py::test_never: the stream ended first" in said
    (tmp_path / "runs").unlink()
    status, said = run(tmp_path, tests, "-k", "not wrong", "--inconclusive-limit", "0")
    assert status == 1 and "FAILED: 1 inconclusive tests, limit 0" in said
    (tmp_path / "runs").unlink()
    status, said = run(tmp_path, tests, "-k", "wrong")
    assert status == 1 and counts(tmp_path) == {"wrong": 2} and "1 failed" in said


async def test_a_task_group_is_inconclusive_if_all_its_errors_are() -> None:
    async def ends(error: Exception) -> None:
        raise error

    async def reason(*errors: Exception) -> str:
        with pytest.raises(ExceptionGroup) as raised:
            async with asyncio.TaskGroup() as tasks:
                for error in errors:
                    tasks.create_task(ends(error))
        return reason_of(raised.value)

    assert await reason(Inconclusive("late")) == "late"
    assert await reason(Inconclusive("late"), Inconclusive("early")) == "late"
    assert await reason(Inconclusive("late"), ValueError()) == ""
    with pytest.raises(Inconclusive, match="late"):
        inconclusive("late")
