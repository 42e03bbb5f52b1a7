"""`make test` as a whole: every test once, an honest exit status, nothing left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parents[2]
MARKED = """
import os, time
from pathlib import Path
import pytest

def ran(name):
    with Path("ran").open("a") as file:
        file.write(name + "\\n")
    return Path("ran").read_text().split().count(name)

@pytest.mark.live
def test_fleet():
    ran("fleet")

@pytest.mark.etcd
def test_part():
    ran("part")

def test_unit():
    ran("unit")
"""
LASTING = """
@pytest.fixture
def tidy():
    yield
    ran("tidied")

@pytest.mark.etcd
def test_lasting(tidy):
    ran("lasting")
    Path("pid").write_text(str(os.getpid()))
    time.sleep(60)
"""


def lanes(folder: Path, more: str = "", *arguments: str) -> subprocess.Popen[str]:
    """The runner over those tests."""
    (folder / "test_it.py").write_text(MARKED + more)
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    live\n    etcd\n")
    return subprocess.Popen(
        [sys.executable, "-m", "tests.lanes", "-p", "no:hypothesispytest", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def ran(folder: Path) -> list[str]:
    file = folder / "ran"
    return sorted(file.read_text().split()) if file.exists() else []


def test_every_test_runs_once_and_arguments_are_passed_on(tmp_path: Path) -> None:
    running = lanes(tmp_path)
    said, _ = running.communicate(timeout=100)
    assert running.returncode == 0, said
    assert ran(tmp_path) == ["fleet", "part", "unit"]
    assert said.count("1 passed") == 6, said  # in each lane's own words, and in the summary
    running = lanes(tmp_path, "", "-k", "nothing")
    said, _ = running.communicate(timeout=100)
    assert running.returncode == 1 and "nothing to run" in said


def test_a_check_runs_every_unit_test_once_and_nothing_else(tmp_path: Path) -> None:
    more = "".join(f"def test_more{n}():\n    ran('more{n}')\n\n" for n in range(5))
    running = lanes(tmp_path, more, "--check")
    said, _ = running.communicate(timeout=100)
    assert running.returncode == 0, said
    assert ran(tmp_path) == [*(f"more{n}" for n in range(5)), "unit"]
    lines = [line for line in said.splitlines() if line.startswith("unit") and "passed, " in line]
    assert len(lines) == min(os.cpu_count() or 1, 6), said


@pytest.mark.parametrize("passes_at", [3, 4])
def test_what_failed_is_repeated_twice(tmp_path: Path, passes_at: int) -> None:
    failing = f"""
@pytest.mark.live
def test_busy():
    assert ran("busy") >= {passes_at}

def test_other():
    assert ran("other") >= 2
"""
    running = lanes(tmp_path, failing)
    said, _ = running.communicate(timeout=100)
    assert ran(tmp_path) == ["busy"] * 3 + ["fleet", "other", "other", "part", "unit"]
    assert said.count("once more") == 2
    assert running.returncode == (0 if passes_at == 3 else 1), said
    assert ("FAILED test_it.py::test_busy" in said.splitlines()) == (passes_at == 4), said


def test_a_lane_that_breaks_off_fails_and_nothing_is_repeated(tmp_path: Path) -> None:
    broken = """
def test_wrong():
    assert ran("wrong") > 1

@pytest.mark.etcd
def test_gone():
    os._exit(1)
"""
    running = lanes(tmp_path, broken)
    said, _ = running.communicate(timeout=100)
    assert running.returncode == 1
    assert said.endswith("FAILED test_it.py::test_wrong\nBROKE OFF: parts\n"), said
    assert ran(tmp_path).count("wrong") == 1


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_it_is_ended_nothing_is_left(tmp_path: Path, by: signal.Signals) -> None:
    running = lanes(tmp_path, LASTING)
    deadline = time.monotonic() + 100
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.05)
    running.send_signal(by)
    said, _ = running.communicate(timeout=30)
    lane = Path("/proc", (tmp_path / "pid").read_text())
    while lane.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "tidied" in ran(tmp_path), "the lane did not end in order"
    if by != signal.SIGKILL:
        assert running.returncode == 130 and said.endswith("interrupted\n")
