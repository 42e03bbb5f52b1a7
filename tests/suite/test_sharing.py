"""The processes of one run: every test once, engines in one process, nothing left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.suite.test_outcomes import BARE

pytestmark = pytest.mark.full
ROOT = Path(__file__).parents[2]
HEAD = """
import os, time
from pathlib import Path
import pytest

def ran(name):
    with Path("ran").open("a") as file:
        file.write(f"{name} {os.getpid()} {os.getpriority(os.PRIO_PROCESS, 0)}\\n")

"""
GROUP = """
@pytest.mark.parametrize("number", range(5))
def test_group(number):
    time.sleep(0.2)
    ran(f"{name}{{number}}")
"""
UNITS = """
@pytest.mark.parametrize("number", range(4))
def test_unit(number):
    ran(f"unit{number}")
"""
LASTING = """
@pytest.fixture
def tidy():
    yield
    time.sleep(6)
    ran("tidied")

def test_lasting(tidy):
    Path("pid").write_text(str(os.getpid()))
    time.sleep(60)
"""


def start(folder: Path, fleets: str = "", units: str = "") -> subprocess.Popen[str]:
    """pytest over those tests as `make test` runs it, in a session of its own."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    for path, tests in {
        "tests/live/test_fleets.py": GROUP.format(name="fleet") + fleets,
        "tests/engine/test_engines.py": GROUP.format(name="engine"),
        "tests/test_units.py": UNITS + units,
    }.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(HEAD + tests)
    return subprocess.Popen(
        [
            *(sys.executable, "-m", "pytest", "-p", "xdist", "-p", "tests.suite.sharing"),
            *("-p", "no:cacheprovider"),
            *("-n", "auto", "--dist", "loadgroup"),
        ],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "PYTEST_ADDOPTS": "", **BARE},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def ran(folder: Path) -> dict[str, tuple[str, str]]:
    """The process and the niceness of each test that ran."""
    lines = [line.split() for line in (folder / "ran").read_text().splitlines()]
    assert len({name for name, *_ in lines}) == len(lines), "each ran once"
    return {name: (pid, nice) for name, pid, nice in lines}


def test_engines_run_in_one_process_and_every_test_once(tmp_path: Path) -> None:
    running = start(tmp_path)
    said, _ = running.communicate(timeout=100)
    assert running.returncode == 0 and "14 passed" in said, said
    found = ran(tmp_path)
    groups = [{at for name, at in found.items() if name.startswith(x)} for x in ("fl", "en")]
    assert len(groups[0] | groups[1]) == 1, "one process starts engines"
    own = os.getpriority(os.PRIO_PROCESS, 0)
    assert int(groups[0].pop()[1]) == own
    units = {at for name, at in found.items() if name.startswith("unit")}
    assert {int(nice) for _, nice in units} == {max(own, 10)}


def test_a_failure_and_a_process_that_crashes_fail_the_run(tmp_path: Path) -> None:
    wrong = "\ndef test_gone():\n    os._exit(1)\n"
    running = start(tmp_path, units=wrong)
    said, _ = running.communicate(timeout=100)
    assert running.returncode == 1, said
    assert re.search(r"crashed while running 'tests/test_units.py::test_gone'", said), said
    assert len(ran(tmp_path)) == 14, "the others ran all the same"


@pytest.mark.parametrize("by", ["terminal", signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_a_run_is_ended_nothing_is_left(tmp_path: Path, by: str | signal.Signals) -> None:
    running = start(tmp_path, fleets=LASTING)
    deadline = time.monotonic() + 100
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < deadline and running.poll() is None
        time.sleep(0.05)
    if isinstance(by, str):
        os.killpg(running.pid, signal.SIGINT)
    else:
        running.send_signal(by)
    said, _ = running.communicate(timeout=60)
    process = Path("/proc", (tmp_path / "pid").read_text())
    while process.exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "tidied" in ran(tmp_path), f"it did not end in order:\n{said}"
    if by != signal.SIGKILL:
        assert running.returncode == pytest.ExitCode.INTERRUPTED, said
