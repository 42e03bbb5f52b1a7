"""Repeated and inconclusive tests: which run again, how they are counted, when they fail a run."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.suite.outcomes import Inconclusive, inconclusive, reason_of

ROOT = Path(__file__).parents[2]
BARE = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
"""Other plugins take most of the time that a start of pytest takes."""
TIER = ("tests.suite.tiers", "test")
HEAD = """
import pytest
from pathlib import Path
from tests.suite.outcomes import inconclusive

def runs(name):
    with Path("runs").open("a") as file:
        file.write(name + "\\n")
    return Path("runs").read_text().split().count(name)

"""


def start(
    folder: Path, tests: str, *arguments: str, command: Sequence[str] = ("pytest",)
) -> subprocess.Popen[str]:
    """pytest, or another command of the suite, over these tests, in a session of its own."""
    (folder / "test_it.py").write_text(HEAD + tests)
    marks = "markers =\n    core\n    full\n    etcd\n    engine\n"
    (folder / "pytest.ini").write_text(f"[pytest]\naddopts = --strict-markers\n{marks}")
    return subprocess.Popen(
        [
            *(sys.executable, "-m", *command),
            *("-p", "tests.suite.outcomes", "-p", "no:cacheprovider", "-p", "timeout"),
            *("-p", "xdist", *arguments),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", "COLUMNS": "200", **BARE},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def run(
    folder: Path, tests: str, *arguments: str, command: Sequence[str] = ("pytest",)
) -> tuple[int, str]:
    """Exit status and output of that command."""
    with start(folder, tests, *arguments, command=command) as running:
        said, _ = running.communicate(timeout=100)
    return running.returncode, said


def ran(folder: Path) -> list[str]:
    """What ran, in order."""
    return (folder / "runs").read_text().split()


CORE = """
@pytest.mark.core
@pytest.mark.parametrize("number", range({count}))
def test_core(number):
    assert runs(f"core{{number}}") == {passes_at}

def test_other():
    assert runs("other") == 2

def test_last():
    runs("last")
"""


def test_only_a_core_test_that_failed_runs_once_more_after_all_others(tmp_path: Path) -> None:
    status, said = run(tmp_path, CORE.format(count=2, passes_at=2))
    assert status == 1, "test_other fails and is not repeated"
    assert ran(tmp_path) == "core0 core1 other last core0 core1".split()
    assert "1 failed, 3 passed, 2 repeated" in said and "2 tests were repeated" in said
    assert "test_it.py::test_core[0]: failed: " in said and "assert 1 == 2" in said
    assert "FAILED: " not in said, "two repeated tests are allowed"


def test_a_core_test_that_fails_twice_has_failed(tmp_path: Path) -> None:
    status, said = run(tmp_path, CORE.format(count=1, passes_at=3), "-k", "core")
    assert status == 1 and ran(tmp_path) == ["core0", "core0"]
    assert "1 failed, 2 deselected, 1 repeated" in said


def test_more_than_two_repeated_core_tests_fail_the_run(tmp_path: Path) -> None:
    status, said = run(tmp_path, CORE.format(count=3, passes_at=2), "-k", "core")
    assert status == 1 and "3 passed, 2 deselected, 3 repeated" in said
    assert "FAILED: 3 tests of the core were repeated, limit 2" in said


@pytest.mark.full
def test_processes_that_share_the_tests_repeat_no_failed_one(tmp_path: Path) -> None:
    status, said = run(tmp_path, CORE.format(count=1, passes_at=2), "-k", "core", "-n", "2")
    assert status == 1 and ran(tmp_path) == ["core0"], said


@pytest.mark.full
def test_a_repetition_has_fixtures_and_a_timeout_of_its_own(tmp_path: Path) -> None:
    tests = """
import time

@pytest.fixture
def fresh():
    yield runs("setup")
    runs("teardown")

@pytest.mark.timeout(1)
@pytest.mark.core
def test_slow(fresh):
    assert Path("runs").read_text().split().count("teardown") == fresh - 1
    if fresh == 1:
        time.sleep(30)
"""
    status, said = run(tmp_path, tests, "-o", "timeout_method=signal")
    assert status == 0, said
    assert "1 passed, 1 repeated" in said and "Timeout" in said


def test_stages_run_in_turn_and_are_counted_together(tmp_path: Path) -> None:
    status, said = run(tmp_path, CORE.format(count=1, passes_at=2), "-n", "0", command=TIER)
    assert status == 1 and ran(tmp_path) == ["other", "last", "core0", "core0"]
    assert said.splitlines()[-2:] == [
        "1 repeated, 0 inconclusive",
        "2 passed, 1 failed, 0 skipped",
    ]
    assert re.search(r"slowest 3 tests:\n +\d+\.\d s  test_it.py::", said)


@pytest.mark.full
def test_a_stage_may_have_no_tests_but_not_all(tmp_path: Path) -> None:
    status, said = run(tmp_path, CORE.format(count=1, passes_at=2), "-k", "core", command=TIER)
    assert status == 0, said
    status, said = run(tmp_path, CORE.format(count=1, passes_at=2), "-k", "none", command=TIER)
    assert status == pytest.ExitCode.NO_TESTS_COLLECTED


@pytest.mark.full
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
    assert status == 0 and ran(tmp_path) == ["never", "then", "never", "then"]
    assert "1 passed, 1 deselected, 2 repeated, 1 inconclusive" in said
    assert "test_it.py::test_never: the stream ended first" in said
    (tmp_path / "runs").unlink()
    status, said = run(tmp_path, tests, "-k", "not wrong", "--inconclusive-limit", "0")
    assert status == 1 and "FAILED: 1 inconclusive tests, limit 0" in said
    (tmp_path / "runs").unlink()
    status, said = run(tmp_path, tests, "-k", "wrong")
    assert status == 1 and ran(tmp_path) == ["wrong", "wrong"] and "1 failed" in said


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
