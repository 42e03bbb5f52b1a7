"""Whoever dies at whatever step of keeping history, nothing acknowledged is lost."""

from __future__ import annotations

import asyncio
import signal
import sys
from pathlib import Path

import pytest

from relume.controlplane.history import snapshots
from relume.controlplane.history.archive import Archive
from relume.controlplane.history.errors import HistoryGap
from relume.controlplane.history.replica_restore import History, load_history
from relume.events import vocabulary as v
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.maintenance import Maintenance
from relume.events.log.codec import decode
from relume.events.log.errors import Fenced
from relume.policies.state.fleet import state_hash
from tests.etcd_server import EtcdServer
from tests.history.checks import history_is_whole
from tests.history.stage import Stage, Traffic, config_for, folded, replica_on, traffic_on, until

pytestmark = pytest.mark.etcd

STEPS = ("archived", "snapshot", "committed", "announced", "compacted", "trimmed", "pruned")


async def _process(
    etcd: EtcdServer, root: Path, name: str, step: str, signal_name: str
) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "tests.history.leader_process",
        etcd.endpoints[0], str(root), name, step, signal_name,
        stdout=asyncio.subprocess.DEVNULL,
    )  # fmt: skip


async def _under_traffic(traffic: Traffic, process: asyncio.subprocess.Process) -> None:
    """Write until the process is dead."""
    async with asyncio.timeout(90):
        while process.returncode is None:
            await traffic.steps(8)
            await asyncio.sleep(0.02)


@pytest.mark.full
async def test_a_leader_killed_at_any_step_loses_nothing(etcd: EtcdServer, tmp_path: Path) -> None:
    async with EtcdLog(config_for(etcd), name="test") as log, traffic_on(log) as traffic:
        for number, step in enumerate(STEPS):
            process = await _process(etcd, tmp_path, f"r{number}", step, "SIGKILL")
            try:
                await _under_traffic(traffic, process)
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            assert process.returncode == -signal.SIGKILL, step
            await history_is_whole(log, tmp_path, traffic)
        async with replica_on(etcd, tmp_path, "last") as stage:
            await stage.leads()
            before = stage.keeper.status.rounds
            while stage.keeper.status.rounds < before + 3:
                await traffic.steps(40)
            await history_is_whole(log, tmp_path, traffic)
            assert stage.keeper.status.failures == 0


@pytest.mark.parametrize("step", STEPS)
async def test_a_round_that_fails_at_any_step_is_done_again(
    etcd: EtcdServer, tmp_path: Path, step: str
) -> None:
    failures = 0

    def fail_twice(at: str) -> None:
        nonlocal failures
        if at == step and failures < 2:
            failures += 1
            raise OSError(f"made up at {step}")

    async with replica_on(etcd, tmp_path, step=fail_twice) as stage:
        stage.keeper.retry_s = 0.05
        await stage.leads()
        async with traffic_on(stage.log) as traffic:
            while stage.keeper.status.rounds < 4 or failures < 2:
                await traffic.steps(24)
            assert stage.keeper.status.failures == 2
            assert stage.keeper.status.failing == ""
            await history_is_whole(stage.log, tmp_path, traffic)


@pytest.mark.full
@pytest.mark.parametrize("fault", ["kill9", "stop"])
async def test_etcd_killed_or_stopped_at_any_step(
    etcd: EtcdServer, tmp_path: Path, fault: str
) -> None:
    loop = asyncio.get_running_loop()
    left = list(STEPS)
    broken = False

    def break_etcd(at: str) -> None:
        nonlocal broken
        if broken or not left or at != left[0]:
            return
        left.pop(0)
        broken = True
        if fault == "kill9":
            etcd.kill9()
            loop.call_later(0.3, mend)
        else:
            etcd.stop()
            # Beyond the call deadline, and once beyond the lease.
            loop.call_later(3.5 if at == "committed" else 0.8, mend)

    def mend() -> None:
        nonlocal broken
        broken = False
        etcd.restart(wait=False) if fault == "kill9" else etcd.cont()

    async with replica_on(etcd, tmp_path, step=break_etcd) as stage:
        stage.keeper.retry_s = 0.1
        await stage.leads()
        async with traffic_on(stage.log) as traffic:
            async with asyncio.timeout(90):
                while left:
                    await traffic.steps(24, flush_s=15.0)
                rounds = stage.keeper.status.rounds
                while stage.keeper.status.rounds < rounds + 2:
                    await traffic.steps(24, flush_s=15.0)
            await history_is_whole(stage.log, tmp_path, traffic)


@pytest.mark.full
@pytest.mark.parametrize("step", ["snapshot", "committed", "announced"])
async def test_a_stopped_leader_that_comes_back_neither_announces_nor_trims(
    etcd: EtcdServer, tmp_path: Path, step: str
) -> None:
    async with EtcdLog(config_for(etcd), name="test") as log, traffic_on(log) as traffic:
        stale = await _process(etcd, tmp_path, "stale", step, "SIGSTOP")
        try:
            status = Path(f"/proc/{stale.pid}/status")
            async with asyncio.timeout(90):
                while "T (stopped)" not in status.read_text():
                    await traffic.steps(8)
            epoch = (await log.reader().owners())["fleet"]
            async with replica_on(etcd, tmp_path, "r1") as stage:
                await stage.leads()
                ours = stage.replica.leadership.epoch
                assert ours > epoch
                # Its own stream has another lease, which may end later than the leader's.
                async with asyncio.timeout(90):
                    while "r.stale" in await log.reader().owners():
                        await traffic.steps(8)
                stale.send_signal(signal.SIGCONT)
                while stage.keeper.status.rounds < 3:
                    await traffic.steps(24)
                await _resumed(stage, tmp_path, "r.stale")
                assert stage.replica.leadership.epoch == ours
                await history_is_whole(log, tmp_path, traffic)
                groups = await load_history(tmp_path, log.reader())
            for group in groups:
                for segment in group.segments:
                    if segment.stream == "fleet" and group.revision > ours:
                        assert segment.epoch == ours
        finally:
            stale.kill()
            await stale.wait()


async def _resumed(stage: Stage, archive: Path, stream: str) -> None:
    """Wait until the process whose stream it is continues under a new epoch. The leader may have
    trimmed the event already: the archive has it then."""
    async with asyncio.timeout(90):
        while True:
            try:
                groups = await load_history(archive, stage.log.reader())
            except HistoryGap:  # the leader trimmed while we read
                continue
            segments = (s for g in groups for s in g.segments if s.stream == stream)
            events = [decode(record) for segment in segments for record in segment.records]
            if any(isinstance(event, v.StreamResumed) for event in events):
                return
            await asyncio.sleep(0.05)


async def test_upkeep_of_a_deposed_leader_is_refused(etcd: EtcdServer, tmp_path: Path) -> None:
    async with replica_on(etcd, tmp_path) as stage:
        await stage.leads()
        async with traffic_on(stage.log) as traffic:
            await traffic.steps(40)
            maintenance = Maintenance(stage.log.client)
            stale = stage.replica.leadership.epoch - 1
            before = await maintenance.manifests()
            for refused in (
                maintenance.commit(5, b"{}", stale),
                maintenance.trim({"w.w0": 3}, stale),
                maintenance.forget(before or [1], stale),
                maintenance.trim({"w.w0": 3}, 0),
            ):
                with pytest.raises(Fenced):
                    await refused
            assert 5 not in await maintenance.manifests()
            await history_is_whole(stage.log, tmp_path, traffic)


async def test_a_damaged_snapshot_is_passed_over_and_in_the_end_the_archive_is_folded(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    async with replica_on(etcd, tmp_path) as stage:
        await stage.leads()
        async with traffic_on(stage.log) as traffic:
            while stage.keeper.status.rounds < 5:
                await traffic.steps(40)
    async with EtcdLog(config_for(etcd)) as log:
        maintenance = Maintenance(log.client)
        directory = tmp_path / await maintenance.identity()
        history = History(tmp_path, maintenance)
        groups = await load_history(tmp_path, log.reader())
        kept = snapshots.present(directory)
        assert len(kept) >= 3
        archive = Archive(directory, directory.name)
        for number, covers in enumerate(kept):
            restored = await history.restore()
            # The two newest are met by etcd, further back the archive comes in between.
            assert restored.covers == (covers if number < 2 else archive.last)
            known = [g for g in groups if g.revision <= restored.covers]
            assert state_hash(restored.fleet) == state_hash(folded(known))
            path = snapshots.path_of(directory, covers)
            data = bytearray(path.read_bytes())
            data[len(data) // 2] ^= 0xFF
            path.write_bytes(data)
        restored = await history.restore()
        assert restored.covers == archive.last
        known = [g for g in groups if g.revision <= archive.last]
        assert state_hash(restored.fleet) == state_hash(folded(known))
        (directory / archive.entries[0].file).unlink()
        with pytest.raises(HistoryGap):
            await history.restore()


async def test_a_follower_that_fell_behind_takes_the_fold_from_history(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    async with replica_on(etcd, tmp_path) as leader:
        await leader.leads()
        async with replica_on(etcd, tmp_path, "r1") as follower, traffic_on(leader.log) as traffic:
            await traffic.steps(8)
            await until(lambda: "w0" in follower.fleet.workers)
            gate = asyncio.Event()

            async def broken():  # its watch hangs while the log is trimmed past it
                await gate.wait()
                async for group in follower.log.reader().follow(follower.fleet.revision):
                    yield group

            follower.replica._groups = broken()
            await traffic.steps(8)
            while leader.keeper.status.trimmed <= follower.fleet.revision:
                await traffic.steps(40)
            behind = follower.fleet.revision
            gate.set()
            await until(lambda: follower.replica.covered > behind)
            await traffic.steps(8)
            last = len(traffic.taken)
            await until(lambda: follower.fleet.workers["w0"].step == last)
            await until(lambda: follower.fleet.revision == leader.fleet.revision)
            assert state_hash(follower.fleet) == state_hash(leader.fleet)


async def test_snapshot_taken_is_written_by_leaders_alone(etcd: EtcdServer, tmp_path: Path) -> None:
    async with replica_on(etcd, tmp_path) as first, replica_on(etcd, tmp_path, "r1") as second:
        await until(lambda: first.fleet.leader)
        async with traffic_on(first.log) as traffic:
            while first.keeper.status.rounds + second.keeper.status.rounds < 3:
                await traffic.steps(40)
        assert 0 in (first.keeper.status.rounds, second.keeper.status.rounds)
        groups = await load_history(tmp_path, first.log.reader())
        streams = {
            s.stream
            for g in groups
            for s in g.segments
            for e in map(decode, s.records)
            if isinstance(e, v.SnapshotTaken)
        }
        assert streams == {"fleet"}
