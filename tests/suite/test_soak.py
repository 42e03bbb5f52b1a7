"""A soak counts each run of a test as it is, and leaves nothing behind, however it ends."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from tests.processes import family
from tests.signals import HANG_S, worked_s
from tests.suite.soak import PYTEST, with_selection
from tests.suite.test_outcomes import ran, run, start

pytestmark = pytest.mark.full
SOAK = ("tests.suite.soak",)
TESTS = """
import os, time

@pytest.mark.core
def test_failing():
    assert runs("failing") != 2

def test_unclear():
    if runs("unclear") == 3:
        inconclusive("too late")

def test_crashing():
    if runs("crashing") == 2:
        os._exit(3)

def test_lasting():
    if runs("lasting") == {lasts}:
        time.sleep(60)
"""


def row(said: str, test: str) -> list[str]:
    """The numbers of a test in the table: runs, passed, failed, inconclusive, skipped, seconds."""
    found = re.search(rf"^([\d. ]+) {re.escape(test)}$", said, re.MULTILINE)
    assert found, said
    return found[1].split()


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_each_run_counts_as_it_is_and_none_is_repeated(tmp_path: Path) -> None:
    arguments = ("--times", "3", "--busy", "1", "test_it.py")
    status, said = run(tmp_path, TESTS.format(lasts=0), *arguments, command=SOAK)
    assert status == 1, said
    a_round = "failing unclear crashing".split()
    assert ran(tmp_path) == [*a_round, "lasting", *a_round, *a_round, "lasting"]
    assert row(said, "test_it.py::test_failing")[:5] == ["3", "2", "1", "0", "0"]
    assert row(said, "test_it.py::test_unclear")[:5] == ["3", "2", "0", "1", "0"]
    assert row(said, "test_it.py::test_crashing")[:5] == ["3", "2", "1", "0", "0"]
    assert row(said, "test_it.py::test_lasting")[:5] == ["2", "2", "0", "0", "0"]
    assert re.search(r"round 2, failed: test_it.py::test_failing: .*: assert 2 != 2\n", said)
    assert "round 3, inconclusive: test_it.py::test_unclear: too late\n" in said
    assert "round 2, failed: test_it.py::test_crashing: its process ended" in said
    assert re.search(r"s\] round 2 of 3: 1 passed, 2 failed, 0 inconclusive, 0 skipped\n", said)
    pasted, last = said.splitlines()[-2:]
    counts = "8 passed, 2 failed, 1 inconclusive, 0 skipped"
    assert re.fullmatch(rf"\| [\d-]+ \| .* test_it.py` \| 3 \| 1 \| {counts} \|", pasted)
    assert last == f"4 tests, 11 runs: {counts}"


def test_status_0_if_all_passed_and_1_if_nothing_ran(tmp_path: Path) -> None:
    arguments = ("--times", "2", "--busy", "0", "-k")
    status, said = run(tmp_path, TESTS.format(lasts=0), *arguments, "lasting", command=SOAK)
    assert status == 0 and "1 tests, 2 runs: 2 passed, 0 failed" in said, said
    status, said = run(tmp_path, TESTS.format(lasts=0), *arguments, "none", command=SOAK)
    assert status == 1 and f"round 1, failed: {PYTEST}: exit status 5" in said, said
    assert "round 2" not in said


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_a_soak_ends_nothing_is_left(tmp_path: Path, by: signal.Signals) -> None:
    arguments = ("--busy", "2", "test_it.py")
    with start(tmp_path, TESTS.format(lasts=1), *arguments, command=SOAK) as soak:
        until(lambda: (tmp_path / "runs").exists() and "lasting" in ran(tmp_path))
        children = set(family(soak.pid).values()) - {soak.pid}
        assert len(children) == 3, "pytest and two that burn CPU"
        try:
            assert {os.getpgid(pid) for pid in children} == children, (
                "Ctrl-C reaches the soak alone"
            )
            until(lambda: all(worked_s(pid) > 0.1 for pid in children))
            os.killpg(soak.pid, by)
            said, _ = soak.communicate(timeout=60)
            until(lambda: not any(Path("/proc", str(pid)).exists() for pid in children))
        except BaseException:
            for pid in {soak.pid, *children}:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            raise
    if by != signal.SIGKILL:
        assert soak.returncode == pytest.ExitCode.INTERRUPTED, said
        assert "round 1 of 20, interrupted: 3 passed, 0 failed" in said
        assert said.endswith("3 tests, 3 runs: 3 passed, 0 failed, 0 inconclusive, 0 skipped\n")


def test_without_a_selection_it_is_the_core() -> None:
    assert with_selection(["--seed", "5"]) == ["-m", "core", "--seed", "5"]
    for arguments in (["-m", "etcd"], ["-k", "a or b"], ["-x", f"{__file__}::test_it"]):
        assert with_selection(arguments) == arguments
