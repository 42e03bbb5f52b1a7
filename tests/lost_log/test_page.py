"""The commands of the page about disasters, run as they stand there."""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relume.controlplane.history.continuity.lost_log import archived_logs
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.maintenance import Maintenance
from tests.etcd_server import EtcdServer
from tests.history.stage import config_for, replica_on, traffic_on

PAGE = Path(__file__).resolve().parents[2] / "docs/operations/disaster.md"
ETCDCTL = os.environ.get("RELUME_ETCDCTL") or shutil.which("etcdctl")
NEEDS_ETCDCTL = pytest.mark.skipif(ETCDCTL is None, reason="no etcdctl: install etcd-client")
pytestmark = [pytest.mark.etcd, NEEDS_ETCDCTL]


def commands(heading: str) -> list[str]:
    """The shell blocks under a heading, in order."""
    section = PAGE.read_text().partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```sh\n(.*?)```", section, re.DOTALL)


class Operator:
    """Runs blocks of the page with the variables that they name."""

    def __init__(self, etcd: EtcdServer, folder: Path) -> None:
        self.etcd = etcd
        self.folder = folder
        self.archive = folder / "archive"
        self.backup = folder / "backup.db"

    def run(self, block: str, **variables: object) -> subprocess.CompletedProcess[str]:
        path = f"{Path(ETCDCTL or '').parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
        named = {
            "ENDPOINT": ",".join(self.etcd.endpoints),
            "ARCHIVE": str(self.archive),
            "BACKUP": str(self.backup),
            **variables,
        }
        missing = set(re.findall(r"\$([A-Z_]+)", block)) - named.keys()
        assert not missing, f"the page names {missing}"
        return subprocess.run(
            ["bash", "-euo", "pipefail", "-c", block],
            env={**os.environ, **{k: str(v) for k, v in named.items()}, "PATH": path,
                 "ETCDCTL_API": "3"},
            cwd=self.folder, capture_output=True, text=True, timeout=60,
        )  # fmt: skip

    def restore(self, block: str) -> None:
        """The restore block on each member's host."""
        peers = [f"http://127.0.0.1:{port}" for port in self.etcd.peer_ports]
        for member, peer in enumerate(peers):
            data = self.etcd.data_dir / f"m{member}"
            if data.exists():
                data.rename(data.with_suffix(".former"))
            done = self.run(
                block, NAME=f"m{member}", DATA=data, TOKEN="another",
                CLUSTER=",".join(f"m{i}={p}" for i, p in enumerate(peers)), PEER_URL=peer,
            )  # fmt: skip
            assert done.returncode == 0, done.stderr
        for member in range(len(peers)):
            self.etcd.restart(member, wait=False)
        self.etcd.wait_healthy()

    async def traffic(self, rounds: int) -> None:
        """A replica that archives so often, and a worker that makes steps."""
        async with EtcdLog(config_for(self.etcd), name="test") as log, traffic_on(log) as steps:
            async with replica_on(self.etcd, self.archive) as stage:
                while stage.keeper.status.rounds < rounds:
                    await steps.steps(16)

    async def identity(self) -> str:
        async with EtcdLog(config_for(self.etcd)) as log:
            return await Maintenance(log.client).identity()


@pytest.fixture(params=[1, 3], ids=["one member", "three members"])
def operator(request, tmp_path: Path) -> Iterator[Operator]:
    with EtcdServer(members=request.param) as etcd:
        yield Operator(etcd, tmp_path)


async def begins_anew(operator: Operator) -> None:
    """The doctor sees the loss; the commands of the page end it."""
    (former,) = archived_logs(operator.archive)
    doctor, begin, replay = commands("Begin a new log")
    found = operator.run(doctor)
    assert found.returncode == 1 and "etcd was restored from a backup" in found.stdout
    assert f"relume log begin --replace {former}" in found.stdout
    done = operator.run(begin, LOG_ID=former)
    assert done.returncode == 0, done.stderr
    await operator.traffic(1)
    assert archived_logs(operator.archive).keys() == {former, await operator.identity()}
    assert operator.run(doctor).stdout.count("fail ") == 0
    assert operator.run(replay, LOG_ID=former).returncode == 0


@pytest.mark.parametrize("bump", [False, True], ids=["", "with more revisions"])
async def test_a_backup_is_taken_and_restored_as_the_page_says(
    operator: Operator, bump: bool
) -> None:
    (save,), (restore,) = commands("Back up"), commands("Restore")
    if bump:
        option = re.search(r"`(--bump-revision \d+ --mark-compacted)`", PAGE.read_text())
        assert option is not None, "the page names it"
        if "--bump-revision" not in operator.run("etcdctl snapshot restore --help").stdout:
            pytest.skip("this etcdctl has no --bump-revision")
        restore = restore.replace('restore "$BACKUP"', f'restore "$BACKUP" {option[1]}')
    await operator.traffic(1)
    one = save.replace("$ENDPOINT", operator.etcd.endpoints[0])  # etcdctl saves from one member
    done = await asyncio.to_thread(operator.run, one)
    assert done.returncode == 0, done.stderr
    await operator.traffic(2)
    for member in range(operator.etcd.members):
        operator.etcd.kill9(member)
    operator.restore(restore)
    await begins_anew(operator)


async def test_two_of_three_members_are_replaced_as_the_page_says(tmp_path: Path) -> None:
    copy, restore, doctor = commands("Loss of two of three members")
    with EtcdServer(members=3) as etcd:
        operator = Operator(etcd, tmp_path)
        await operator.traffic(2)
        for member in (0, 1):
            etcd.kill9(member)
            shutil.rmtree(etcd.data_dir / f"m{member}")
        etcd.terminate_member(2)
        assert operator.run(copy, SURVIVOR=etcd.data_dir / "m2").returncode == 0
        operator.restore(restore)
        found = operator.run(doctor)
        assert "ok    log" in found.stdout, found.stdout
        (former,) = archived_logs(operator.archive)
        await operator.traffic(1)
        assert await operator.identity() == former, "the log goes on"
