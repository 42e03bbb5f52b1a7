"""Spools of processes that die are damaged at their ends, and nowhere else."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relume.chaos.live.errors import CannotStrike
from relume.chaos.live.faults.live_faults import Faults
from relume.chaos.live.log_watch import Watch
from relume.chaos.live.processes.signals import state_of
from relume.chaos.scenario.schedule import PlannedFault
from relume.events.etcd.writer.spool import Spool

RECORDS = [b"one", b"two", b"three"]
PROCESS = f"""
import sys
from pathlib import Path
from relume.events.etcd.writer.spool import Spool, SpoolHead
path = Path(sys.argv[1])
head = SpoolHead(version=1, cluster=7, prefix="/p", stream="s", epoch=1, seq=0, hash=b"", position=0)
spool = Spool.create(path / "s.0a.spool", head)
if "records" in sys.argv:
    spool.write({RECORDS})
print("spooling", flush=True)
sys.stdin.read()
"""
Spooling = subprocess.Popen[str]


@pytest.fixture
def spooling(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Spooling]:
    """A process that has a spool."""
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    what = getattr(request, "param", "records")
    process = subprocess.Popen([sys.executable, "-c", PROCESS, str(tmp_path), what], **pipes)
    assert process.stdout is not None and process.stdout.readline()
    yield process
    process.kill()
    process.communicate()


async def struck(what: str, process: Spooling, seed: int) -> str:
    def pid_of(_: str) -> int:
        return process.pid

    child = SimpleNamespace(pid=process.pid, alive=True)
    host: Any = SimpleNamespace(agent_pid=pid_of, children={"r0": child}, clock_of=Path)
    clients: Any = None
    target = "r0" if what.startswith("replica") else "w0"
    planned = PlannedFault(name="f0", what=what, target=target)
    undo, detail = await Faults(host, Watch(), clients, seed).strike(planned, [target])
    assert undo is None
    return detail


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("what", "left"),
    [
        ("agent-spool-torn", 3),
        ("replica-spool-torn", 3),
        ("agent-spool-corrupt", 2),
        ("replica-spool-corrupt", 2),
    ],
)
async def test_a_process_dies_and_the_end_of_its_spool_is_damaged(
    tmp_path: Path, spooling: Spooling, what: str, left: int, seed: int
) -> None:
    path = tmp_path / "s.0a.spool"
    before = path.read_bytes()
    assert "s.0a.spool: " in await struck(what, spooling, seed)
    assert spooling.wait() == -signal.SIGKILL
    assert path.read_bytes() != before
    found = Spool.adopt(path)
    assert found is not None and found.head.cluster == 7
    records, end = found.read(found.begin, 9, 1 << 20)
    assert records == RECORDS[:left] and end < path.stat().st_size
    found.close()


@pytest.mark.parametrize("spooling", ["no"], indirect=True)
async def test_a_process_that_spools_nothing_is_not_struck(spooling: Spooling) -> None:
    """It goes on."""
    with pytest.raises(CannotStrike, match="nothing is spooled at w0"):
        await struck("agent-spool-torn", spooling, 0)
    assert state_of(Path(f"/proc/{spooling.pid}")) in "RSD"
