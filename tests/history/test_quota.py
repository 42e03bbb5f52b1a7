"""A small etcd filled to its quota: what is acknowledged stays, and writing goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from relume.controlplane.history import quota
from relume.controlplane.history.quota import Level, QuotaConfig
from relume.events.etcd.errors import NoSpace
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.maintenance import Maintenance
from relume.events.log.errors import LogUnavailable
from tests.etcd_server import EtcdServer, etcd_binary
from tests.history.checks import history_is_whole
from tests.history.stage import Traffic, config_for, replica_on, traffic_on, until

MIB = 1024**2
QUOTA = 16 * MIB
NEVER = {"every_revisions": 10**9, "every_s": 1e9}
PATIENT = {"call_timeout_ms": 10_000, "lease_ttl_s": 8, "silence_ms": 5_000}
"""Nothing fails here but for want of room: calls and leases outlast a busy disk."""
BUSY_S = 90.0
"""Bound of what a busy disk delays."""


@pytest.fixture
def small() -> Iterator[EtcdServer]:
    """An etcd that takes 16 MiB."""
    if etcd_binary() is None:
        pytest.skip("no etcd on PATH")
    with EtcdServer(quota_bytes=QUOTA) as server:
        yield server


def test_levels() -> None:
    config = QuotaConfig(1000, 60, 80)
    sizes = {0: Level.CALM, 599: Level.CALM, 600: Level.SHED, 799: Level.SHED, 800: Level.ALARM}
    assert {size: quota.level(size, False, config) for size in sizes} == sizes
    assert quota.level(10, True, config) is Level.FULL
    assert quota.worth_defragmenting(700, 600, config)
    assert not quota.worth_defragmenting(700, 601, config)


async def fill(log: EtcdLog, traffic: Traffic) -> None:
    """Write until etcd refuses."""
    async with asyncio.timeout(BUSY_S):
        while traffic.writer.state != "nospace":
            for _ in range(16):
                traffic.step(8192)
            await asyncio.sleep(0.005)


async def disarm(maintenance: Maintenance) -> None:
    """Lift the alarm of an etcd that may still start."""
    async with asyncio.timeout(BUSY_S):
        while True:
            with suppress(LogUnavailable):
                space = await maintenance.space()
                if not space.full:
                    return
                await maintenance.disarm(space)
            await asyncio.sleep(0.05)


@pytest.mark.etcd
async def test_the_leader_finds_the_way_out_of_nospace(small: EtcdServer, tmp_path: Path) -> None:
    # The keeper believes in 2 GiB and a distant round, so that etcd does fill up.
    async with replica_on(small, tmp_path, etcd=PATIENT, **NEVER) as stage:
        stage.keeper.retry_s = 0.1
        await stage.leads()
        async with traffic_on(stage.log) as traffic:
            await fill(stage.log, traffic)
            acknowledged = traffic.acknowledged
            await until(lambda: stage.keeper.status.relieved, BUSY_S)
            await traffic.writer.flush(BUSY_S)
            assert traffic.acknowledged == traffic.writer.position > acknowledged
            await until(lambda: stage.keeper.status.rounds, BUSY_S)
            assert stage.keeper.status.level < Level.FULL
            assert stage.keeper.status.database_bytes < QUOTA // 2
            await history_is_whole(stage.log, tmp_path, traffic)
            # And the next time too, though trimmed once already.
            await fill(stage.log, traffic)
            await until(lambda: stage.keeper.status.relieved == 2, BUSY_S)
            await traffic.writer.flush(BUSY_S)
            await history_is_whole(stage.log, tmp_path, traffic)


@pytest.mark.etcd
@pytest.mark.parametrize("step", ["archived", "snapshot", "compacted", "trimmed", "freed"])
async def test_the_way_out_is_walked_again_when_a_step_fails(
    small: EtcdServer, tmp_path: Path, step: str
) -> None:
    failed = False

    def fail(at: str) -> None:
        nonlocal failed
        if at == step and not failed:
            failed = True
            raise OSError(f"made up at {step}")

    async with replica_on(small, tmp_path, step=fail, etcd=PATIENT, **NEVER) as stage:
        stage.keeper.retry_s = 0.1
        await stage.leads()
        async with traffic_on(stage.log) as traffic:
            await fill(stage.log, traffic)
            await until(lambda: stage.keeper.status.relieved, BUSY_S)
            assert failed
            await traffic.writer.flush(BUSY_S)
            await history_is_whole(stage.log, tmp_path, traffic)


@pytest.mark.etcd
@pytest.mark.full
async def test_with_the_quota_known_it_is_never_reached(small: EtcdServer, tmp_path: Path) -> None:
    async with replica_on(small, tmp_path, etcd=PATIENT, quota_bytes=QUOTA, **NEVER) as stage:
        stage.keeper.pressed_every_s = 0.5
        await stage.leads()
        async with traffic_on(stage.log) as traffic:
            highest = Level.CALM
            async with asyncio.timeout(BUSY_S):
                while len(traffic.taken) * 8192 < 4 * QUOTA:
                    await traffic.steps(16, 8192)
                    highest = max(highest, stage.keeper.status.level)
                    assert traffic.writer.state != "nospace"
                    await asyncio.sleep(0.02)
            assert highest >= Level.SHED
            assert stage.keeper.status.relieved == 0
            assert stage.keeper.status.rounds > 2
            await history_is_whole(stage.log, tmp_path, traffic)


@pytest.mark.etcd
async def test_a_full_etcd_without_a_leader_is_relieved_as_the_runbook_says(
    small: EtcdServer, tmp_path: Path
) -> None:
    async with EtcdLog(config_for(small, **PATIENT), name="test") as log:
        maintenance = Maintenance(log.client)
        async with traffic_on(log) as traffic:
            await fill(log, traffic)
            with pytest.raises(LogUnavailable):
                async with log.writer("fleet"):
                    pass
            small.quota_bytes = 2 * QUOTA
            small.restart(wait=False)  # not healthy while the alarm lasts
            await disarm(maintenance)
            await traffic.writer.flush(BUSY_S)
            async with replica_on(small, tmp_path, etcd=PATIENT, quota_bytes=QUOTA) as stage:
                await stage.leads()
                await until(lambda: stage.keeper.status.rounds)
                await until(lambda: stage.keeper.status.database_bytes < QUOTA // 2, BUSY_S)
                await traffic.steps(40)
                await history_is_whole(log, tmp_path, traffic)


@pytest.mark.etcd
async def test_a_replica_relieves_when_the_leaders_lease_lapsed_in_nospace(
    small: EtcdServer, tmp_path: Path
) -> None:
    async with replica_on(small, tmp_path, etcd=PATIENT, **NEVER) as stage:
        await stage.leads()
        async with traffic_on(stage.log) as traffic:
            leadership = stage.replica.leadership
            writer = leadership._writer
            stage.keeper._looked_at = float("inf")  # it does not look while it leads
            await fill(stage.log, traffic)
            await writer._own.lease.revoke()
            await until(lambda: "fleet" not in stage.fleet.owners)
            leadership.resign("its lease is gone")
            stage.keeper._looked_at = float("-inf")
            await until(lambda: stage.keeper.status.relieved, BUSY_S)
            await until(lambda: "fleet" in stage.fleet.owners, BUSY_S)
            await traffic.writer.flush(BUSY_S)
            await history_is_whole(stage.log, tmp_path, traffic)


@pytest.mark.etcd
async def test_puts_are_refused_with_a_type_of_their_own(small: EtcdServer) -> None:
    async with EtcdLog(config_for(small, **PATIENT), name="test") as log:
        async with traffic_on(log) as traffic:
            await fill(log, traffic)
        with pytest.raises(NoSpace):
            await Maintenance(log.client).commit(7, b"{}", 0)
