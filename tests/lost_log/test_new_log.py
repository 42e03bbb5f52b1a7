"""A backup of etcd is restored under a fleet of real processes, and a new log begins."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
from aetcd import rpc

from relume.controlplane.history.continuity.lost_log import archived_logs
from relume.controlplane.history.replica_restore import load_history, read_archive
from relume.controlplane.replay.verify import verify
from relume.engine_shim.agent.engine_process.process_identity import is_alive
from relume.events import vocabulary as v
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.maintenance import Maintenance
from tests.agent.host import Host, left, until
from tests.agent.stage import ENGINE, environment
from tests.etcd_server import EtcdServer, free_port
from tests.history.stage import config_for

pytestmark = pytest.mark.etcd
RELUME = (sys.executable, "-m", "relume.controlplane.cli.relume_command")


class Fleet(Host):
    """One worker with a scripted engine, and replicas that keep history fast."""

    @property
    def archive(self) -> Path:
        return self.path / "archive"

    def replica(self, name: str) -> subprocess.Popen[bytes]:
        return self.spawn(
            name, *RELUME, "serve", "--name", name, "--port", str(free_port()),
            "--admin-port", "0", "--etcd", self.etcd.endpoints[0], "--lease-ttl-s", "2",
            "--tick-ms", "250", "--log-format", "json", "--spool-dir", str(self.path / "spool"),
            "--archive-dir", str(self.archive), "--snapshot-every-s", "1", "--drain-s", "5",
        )  # fmt: skip

    def said(self, name: str, event: str) -> int:
        """How often the process logged that event."""
        return (self.path / f"{name}.log").read_text().count(f'"event": "{event}"')

    def relume(self, *argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*RELUME, *argv], env=environment(), capture_output=True, text=True, timeout=60
        )

    async def identity(self) -> str:
        return await Maintenance(self.log.client).identity()

    async def verified(self) -> None:
        """The present log can be taken again, decision by decision."""
        reader = self.log.reader()
        verdict = verify(await load_history(self.archive, reader, await self.identity()))
        assert not verdict.divergences and verdict.hashes > 1


@pytest.fixture
async def fleet(tmp_path: Path, etcd: EtcdServer) -> AsyncIterator[Fleet]:
    async with EtcdLog(config_for(etcd), name="test") as log:
        found = Fleet(tmp_path, etcd, log)
        found.spawn("zygote", *ENGINE, "--as", "zygote", str(tmp_path / "z.sock"))
        try:
            yield found
        finally:
            await found.stop()


@pytest.mark.parametrize("restored", [True, False], ids=["older backup", "empty etcd"])
async def test_a_new_log_adopts_the_engines_that_run(fleet: Fleet, restored: bool) -> None:
    agent = fleet.agent("--pace", "0.05")
    replica = fleet.replica("r0")
    await until(lambda: fleet.said("r0", "snapshot_taken"), 40)
    engine = fleet.engine
    if restored:
        fleet.etcd.back_up()
    taken = fleet.said("r0", "snapshot_taken")
    await until(lambda: fleet.said("r0", "snapshot_taken") > taken + 1, 40)
    former = await fleet.identity()
    fleet.etcd.restore()
    assert await left(replica, 40) == 1
    assert fleet.said("r0", "log_replaced") == 1
    if restored:
        await until(lambda: "etcd lost the log; the engine serves on" in fleet.words(), 20)
        again = fleet.replica("r1")
        assert await left(again, 40) == 1
        assert "etcd was restored from a backup" in (fleet.path / "r1.log").read_text()
        done = fleet.relume(
            "log", "begin", "--etcd", fleet.etcd.endpoints[0], "--archive-dir", str(fleet.archive),
            "--replace", former,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    fleet.replica("r2")
    await until(lambda: fleet.said("r2", "snapshot_taken") > 1, 40)
    assert agent.poll() is None and is_alive(engine) and fleet.engine == engine
    assert await fleet.identity() not in ("", former)
    assert archived_logs(fleet.archive).keys() == {former, await fleet.identity()}
    ready = [e for e in await whole(fleet) if type(e) in (v.EngineStarted, v.EngineReady)]
    assert [(type(e), e.incarnation) for e in ready] == [(v.EngineStarted, 1), (v.EngineReady, 1)]
    await fleet.verified()
    groups, _ = read_archive(fleet.archive, former)
    assert len(groups) > 20 and not verify(groups).divergences


async def refuse_everybody(etcd: EtcdServer) -> None:
    """From now on etcd answers no process without a user."""
    async with grpc.aio.insecure_channel(etcd.endpoints[0]) as channel:
        stub = rpc.AuthStub(channel)
        await stub.UserAdd(rpc.AuthUserAddRequest(name="root", password="secret"))
        await stub.RoleAdd(rpc.AuthRoleAddRequest(name="root"))
        await stub.UserGrantRole(rpc.AuthUserGrantRoleRequest(user="root", role="root"))
        await stub.AuthEnable(rpc.AuthEnableRequest())


async def test_an_agent_that_cannot_follow_exits_with_the_remedy(fleet: Fleet) -> None:
    """The accounts of etcd were lost with the log, and made anew without one for this agent."""
    await Maintenance(fleet.log.client).name_unnamed("former")
    agent = fleet.agent("--pace", "0.05")
    await until(lambda: "engine started" in fleet.words() and fleet.state["log"] == "former", 40)
    engine = fleet.engine
    fleet.etcd.back_up()
    written = (await fleet.log.reader().read())[-1].revision
    while (await fleet.log.reader().read())[-1].revision < written + 5:
        await asyncio.sleep(0.05)
    fleet.etcd.restore()
    await until(lambda: "etcd lost the log; the engine serves on" in fleet.words(), 40)
    assert is_alive(engine)
    await refuse_everybody(fleet.etcd)
    assert await left(agent, 40) == 1
    assert "give --etcd credentials that may read and write the prefix" in fleet.words()
    await until(lambda: not is_alive(engine), 20)


async def whole(fleet: Fleet) -> list[object]:
    """All that the worker's stream ever had in the present log."""
    from relume.events.log.codec import decode

    groups = await load_history(fleet.archive, fleet.log.reader(), await fleet.identity())
    records = [r for g in groups for s in g.segments if s.stream == "w.w0" for r in s.records]
    return [await asyncio.sleep(0, decode(record)) for record in records]
