"""Each process with its own user of etcd, made by what `relume doctor --etcd-roles` prints."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aetcd import rpc

from relume.controlplane.cli.relume_command import main
from relume.controlplane.history.relief import shrink
from relume.controlplane.replay.recorded_log import from_etcd
from relume.engine_shim.agent.stream_ownership.takeover import free_stream
from relume.engine_shim.agent.stream_reader import FleetReader
from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.config import EtcdConfig, parse_url
from relume.events.etcd.errors import AccessRefused
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.keys import Keys
from relume.events.etcd.maintenance import Maintenance
from relume.events.log.interface import RevisionGroup
from tests.cli import etcdctl_stand_in
from tests.etcd_server import EtcdServer
from tests.events.support import tick
from tests.history.stage import config_for, replica_on, traffic_on, until

PREFIX = "/relume/v1"
KEYS = Keys(PREFIX)
CONTROL, READER, W0, W1 = (
    f"relume-{name}" for name in ("control", "reader", "worker-w0", "worker-w1")
)


def run_script(script: str, folder: Path, *shell: str, **environ: str) -> None:
    """Run what was printed, with etcdctl or what stands in for it."""
    if shutil.which("etcdctl") is None:
        stand_in = folder / "etcdctl"
        stand_in.write_text(
            f'#!/bin/sh\nexec "{sys.executable}" "{etcdctl_stand_in.__file__}" "$@"\n'
        )
        stand_in.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, **environ}
    done = subprocess.run(
        ["bash", *shell],
        input=script,
        env=env,
        cwd=folder,
        text=True,
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def printed(capsys: pytest.CaptureFixture, *argv: str) -> str:
    capsys.readouterr()
    assert main(["doctor", *argv]) == 0
    return capsys.readouterr().out


@pytest.fixture
async def etcd() -> AsyncIterator[EtcdServer]:
    async with EtcdServer(extra=("--bcrypt-cost=4",)) as server:
        yield server


@pytest.fixture
def users(
    etcd: EtcdServer, tmp_path: Path, capsys: pytest.CaptureFixture
) -> dict[str, dict[str, Any]]:
    """User and password of each process, of an etcd that refuses everybody else."""
    script = printed(capsys, "--etcd", etcd.endpoints[0], "--etcd-roles", "w0,w1")
    run_script(script, tmp_path, "-eu")
    found = {}
    for path in tmp_path.glob("*.url"):
        assert path.stat().st_mode & 0o077 == 0
        config = parse_url(path.read_text().strip())
        assert (config.endpoints, config.prefix) == (etcd.endpoints, PREFIX)
        assert config.user == path.stem and len(config.password) == 32
        assert config.password not in script
        found[path.stem] = {"user": config.user, "password": config.password}
    assert set(found) == {CONTROL, READER, W0, W1}
    return found


def as_user(etcd: EtcdServer, user: dict[str, Any], **changes: Any) -> EtcdConfig:
    return config_for(etcd, **user, call_timeout_ms=2_000, **changes)


@pytest.mark.etcd
async def test_without_a_user_there_is_no_access(etcd: EtcdServer, users: dict) -> None:
    async with EtcdClient(config_for(etcd)) as client:
        with pytest.raises(AccessRefused):
            await client.range(KEYS.identity)
    with pytest.raises(AccessRefused, match="invalid user ID or password"):
        async with EtcdClient(as_user(etcd, {**users[W0], "password": "wrong"})) as client:
            await client.range(KEYS.owner("w.w0"))


@pytest.mark.etcd
async def test_a_replica_and_agents_do_all_they_do(
    etcd: EtcdServer, users: dict, tmp_path: Path
) -> None:
    """Lead, take snapshots, trim; own, append, read orders; each as its own user."""
    archive = tmp_path / "archive"
    control = {**users[CONTROL], "call_timeout_ms": 2_000}
    async with replica_on(etcd, archive, etcd=control) as first:
        await first.leads()
        async with EtcdLog(as_user(etcd, users[W0]), name="w0") as worker:
            orders = FleetReader(worker.client, ("fleet", "w.w0"))
            async with traffic_on(worker) as traffic:
                heard: list[RevisionGroup] = []

                async def follow() -> None:
                    async for group in orders.follow():
                        heard.append(group)

                async with asyncio.TaskGroup() as tasks:
                    following = tasks.create_task(follow())
                    for _ in range(4):
                        await traffic.steps(40)
                    await until(lambda: first.keeper.status.trimmed)
                    assert first.keeper.status.snapshot and not first.keeper.status.failing
                    etcd.restart()  # it forgets tokens, and leases go on
                    await traffic.steps(8)
                    ticks = len(heard)
                    await until(lambda: len(heard) > ticks + 2)
                    following.cancel()
                assert await orders.read()
                epoch = traffic.writer.epoch
                assert not await free_stream(worker.client, "w.w0", epoch - 1)
            async with replica_on(etcd, archive, "r1", etcd=control) as second:
                await until(lambda: second.fleet.revision == first.fleet.revision)
            await lost_lease(worker)
        async with EtcdLog(as_user(etcd, users[CONTROL])) as log:
            probe = await log.probe()
            assert probe.usable and probe.revision and not probe.error
            space = await Maintenance(log.client).space()
            with pytest.raises(AccessRefused):
                await Maintenance(log.client).defragment(space)
            done: list[str] = []
            await shrink(Maintenance(log.client), space, done.append)
            assert done == []


async def lost_lease(worker: EtcdLog) -> None:
    """The stream is taken again after its lease is gone, and freed when its owner is dead."""
    async with worker.writer("w.w0", wait_s=10.0) as writer:
        before = writer.epoch
        await worker.client.lease_revoke(writer._own.lease.id)
        writer.append(tick(1))
        await writer.flush(20)
        assert writer.epoch > before
        assert await free_stream(worker.client, "w.w0", writer.epoch)


async def attempts(client: EtcdClient, key: bytes) -> None:
    """Every way to change `key` is refused, with the remedy."""
    delete = rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
    put = rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=b"x"))
    for call in (
        client.put(key, b"x"),
        client.delete(key),
        client.delete(key, b"\0"),
        client.delete(KEYS.root, key + b"\0"),
        client.txn(rpc.TxnRequest(success=[delete])),
        client.txn(rpc.TxnRequest(success=[put])),
    ):
        with pytest.raises(AccessRefused, match=r"permission denied.*--etcd-roles"):
            await call


@pytest.mark.etcd
async def test_a_workers_credential_changes_nothing_else(etcd: EtcdServer, users: dict) -> None:
    """Neither what the control plane decided, nor what other workers said; nor who may."""
    foreign = [
        key
        for stream in ("fleet", "w.w1", "w.w01", "w.w0.", "r.r0")
        for key in (KEYS.owner(stream), KEYS.segment(stream, 1), KEYS.stream(stream))
    ]
    foreign += [KEYS.identity, KEYS.snapshot(7), KEYS.own, KEYS.log, KEYS.root, b"other"]
    async with (
        EtcdLog(as_user(etcd, users[CONTROL])) as control,
        EtcdLog(as_user(etcd, users[W0])) as worker,
        control.writer("fleet") as fleet,
        control.writer("w.w1") as other,
    ):
        for writer in (fleet, other):
            writer.append(tick(1))
            await writer.flush(10)
        for key in foreign:
            await attempts(worker.client, key)
        for stream in ("w.w1", "r.r0"):
            with pytest.raises(AccessRefused):
                await worker.client.range(KEYS.segment(stream, 1))
            with pytest.raises(AccessRefused, match="--etcd-roles"):
                await FleetReader(worker.client, (stream,)).read()
        with pytest.raises(AccessRefused, match="--etcd-roles"):
            async with worker.writer("w.w1", wait_s=1.0):
                pass
        for lease in (fleet._own.lease, other._own.lease):
            with pytest.raises(AccessRefused):
                await worker.client.lease_revoke(lease.id)
        with pytest.raises(AccessRefused):
            await worker.client.call("RoleAdd", rpc.AuthRoleAddRequest(name="more"))
        fleet.append(tick(2))
        await fleet.flush(10)
        assert (fleet.healthy, other.healthy) == (True, True)


@pytest.mark.etcd
async def test_the_reader_reads_everything_and_writes_nothing(
    etcd: EtcdServer, users: dict
) -> None:
    async with EtcdLog(as_user(etcd, users[W1])) as worker, worker.writer("w.w1") as writer:
        writer.append(tick(1))
        await writer.flush(10)
    history = await from_etcd(as_user(etcd, users[READER]))
    assert [s.stream for g in history.groups for s in g.segments] == ["w.w1"]
    async with EtcdLog(as_user(etcd, users[READER])) as reader:
        assert (await reader.probe()).usable
        for key in (KEYS.owner("fleet"), KEYS.segment("w.w1", 1), KEYS.identity):
            await attempts(reader.client, key)


@pytest.mark.etcd
async def test_a_worker_is_added_later_and_passwords_stay(
    etcd: EtcdServer, users: dict, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    password = (tmp_path / "root.password").read_text().strip()
    script = printed(capsys, "--etcd", etcd.endpoints[0], "--etcd-roles", "w0,w7")
    run_script(script, tmp_path, ETCDCTL_USER=f"root:{password}")
    for name in ("relume-worker-w7", CONTROL, W0, W1):
        config = parse_url((tmp_path / f"{name}.url").read_text().strip())
        if name in users:
            assert config.password == users[name]["password"]
        stream = "fleet" if name == CONTROL else f"w.{name.rpartition('-')[2]}"
        async with EtcdLog(
            as_user(etcd, {"user": config.user, "password": config.password})
        ) as log:
            async with log.writer(stream, wait_s=5.0) as writer:
                writer.append(tick(1))
                await writer.flush(10)


def test_names_prefix_and_tls_are_quoted(capsys: pytest.CaptureFixture) -> None:
    url = "https://e0:1,e1:2/a b/it's?ca=/etc/ca.crt&cert=c.pem&key=k.pem"
    script = printed(capsys, "--etcd", url, "--etcd-roles", " w.0-_ ,,")
    assert "export ETCDCTL_ENDPOINTS=https://e0:1,https://e1:2\n" in script
    for line in ("ETCDCTL_CACERT=/etc/ca.crt", "ETCDCTL_CERT=c.pem", "ETCDCTL_KEY=k.pem"):
        assert f"export {line}\n" in script
    grant = "etcdctl role grant-permission relume-worker-w.0-_"
    assert f"""{grant} readwrite '/a b/it'"'"'s/log/w.w.0-_/' --prefix=true\n""" in script
    assert main(["doctor", "--etcd-roles", "w0,a b"]) == 1
    assert "a b" in capsys.readouterr().err


def test_the_url_of_a_user_is_read_back(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    url = "https://e0:1,e1:2/a b/it's?ca=/etc/c a.crt"
    script = printed(capsys, "--etcd", url, "--etcd-roles", "w0")
    (tmp_path / f"{W0}.password").write_text("hush\n")
    lines = [line for line in script.splitlines() if line.endswith(f"> {W0}.url")]
    run_script("\n".join(lines), tmp_path, "-eu")
    config = parse_url((tmp_path / f"{W0}.url").read_text().strip())
    assert (config.user, config.password) == (W0, "hush")
    assert config.tls is not None and config.tls.ca == "/etc/c a.crt"
    assert (config.endpoints, config.prefix) == (("e0:1", "e1:2"), "/a b/it's")
