"""However a run of several processes is ended, nothing is left behind."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from tests.suite.run_processes import HEAVY
from tests.suite.test_outcomes import ran, run, start
from tests.suite.tiers import BY_GROUP

LASTING = """
import os, time

@pytest.fixture
def tidy():
    yield
    time.sleep(6)
    runs("tidied")

def test_lasting(tidy):
    Path("pid").write_text(str(os.getpid()))
    time.sleep(60)
"""


@pytest.mark.full
@pytest.mark.parametrize("by", ["terminal", signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_however_a_run_is_ended_nothing_is_left(tmp_path: Path, by: str | signal.Signals) -> None:
    running = start(tmp_path, LASTING, "-n", "2", "-p", "tests.suite.run_processes")
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
    assert ran(tmp_path) == ["tidied"], f"it did not end in order:\n{said}"
    if by != signal.SIGKILL:
        assert running.returncode == pytest.ExitCode.INTERRUPTED, said


WHERE = """
import os
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range(4))
def test_it(number):
    with Path("runs").open("a") as file:
        file.write(f"{group} {{os.environ['PYTEST_XDIST_WORKER']}}\\n")
"""


def test_one_process_runs_the_fleets_and_another_the_engines(tmp_path: Path) -> None:
    """Two fleets beside one another would disturb each other's kills."""
    for group, path in (("fleet", "tests/live"), ("engine", "tests/engine")):
        (tmp_path / path).mkdir(parents=True)
        (tmp_path / path / f"test_{group}_it.py").write_text(WHERE.format(group=group))
    by_group = (*BY_GROUP, "-p", "tests.suite.run_processes")
    status, said = run(tmp_path, "", *by_group)
    assert status == pytest.ExitCode.OK, said
    where = (tmp_path / "runs").read_text().splitlines()
    assert len(where) == 8 and len(set(where)) == 2, where
    assert len({line.split()[1] for line in where}) == 2, where


def test_collecting_imports_no_vllm(request: pytest.FixtureRequest) -> None:
    """Every process of a run collects every test; vLLM would cost each 5 s of a CPU and 400 MB.
    Tests of it import it in their bodies or fixtures."""
    assert request.config.stash[HEAVY] == set()
