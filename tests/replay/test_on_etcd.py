"""Replay of logs that stand in a real etcd, outages and all."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from relume.controlplane.cli.doctor import check_segments
from relume.controlplane.cli.relume_command import main
from relume.controlplane.history.errors import HistoryGap
from relume.controlplane.replay.recorded_log import from_etcd
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.keys import Keys
from relume.events.etcd.maintenance import Maintenance
from relume.events.etcd.writer.stream_writer import EtcdWriter
from relume.events.log.codec import decode_all
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import AdminCommand
from relume.policies.state.unreadable import has_unacknowledged
from tests.etcd_server import EtcdServer, etcd_binary
from tests.history.stage import replica_on, traffic_on, until
from tests.pace import outlast
from tests.replay.scene import Scene

pytestmark = pytest.mark.etcd

TRUSTED = v.AdminCommanded(
    command_id="c1", principal="alice", command=AdminCommand.TRUST, target="w1"
)


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    if etcd_binary() is None:
        pytest.skip("no etcd on PATH")
    with EtcdServer() as server:
        yield server


def config_for(server: EtcdServer) -> EtcdConfig:
    config = EtcdConfig(endpoints=server.endpoints)
    return msgspec.structs.replace(
        config,
        call_timeout_ms=500,
        lease_ttl_s=2,
        backoff_max_ms=200,
        silence_ms=500,
        close_timeout_ms=3_000,
        linger_ms=2,
    )


def of_type(groups: list[RevisionGroup], kind: type) -> list[tuple[str, object]]:
    return [
        (s.stream, event)
        for g in groups
        for s in g.segments
        for event in decode_all(s.records)
        if isinstance(event, kind)
    ]


async def test_log_on_etcd_replays_like_any_other(etcd: EtcdServer, tmp_path: Path) -> None:
    config = config_for(etcd)
    async with EtcdLog(config) as log:
        async with Scene(61, log=log, tick_s=0.05) as scene:
            await scene.traffic(60)
            scene.workers["w0"].die()
            await scene.traffic(30, "more")
            scene.workers["w0"].start()
            await scene.settled()
    history = await from_etcd(config)
    verdict = verify(history.groups)
    assert verdict.divergences == []
    assert verdict.contested > 50
    endpoint = ",".join(etcd.endpoints)
    stored = tmp_path / "run.rlog"
    asked = ["--etcd", endpoint, "--state-dir", str(tmp_path)]
    run = asyncio.to_thread(main, ["replay", "--verify", *asked, "--export", str(stored)])
    assert await run == 0
    assert await asyncio.to_thread(main, ["replay", "--verify", "--log", str(stored)]) == 0
    assert await asyncio.to_thread(main, ["why", "q5", *asked]) == 0


async def test_a_record_that_cannot_be_read_ends_no_replica_and_replays(
    etcd: EtcdServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its worker gets no more requests; all others do, also of a replica that begins afterwards."""
    config = config_for(etcd)
    async with EtcdLog(config) as log:
        async with Scene(64, log=log, tick_s=0.05) as scene:
            await scene.traffic(20, "before")
            scene.workers["w1"].tell(b"\x92\xabtelepathy/9\x01")
            await until(lambda: all(r.fleet.unreadable for r in scene.replicas.values()))
            await scene.stop_replica("r0")
            await scene.start_replica("r0")
            await scene.traffic(40, "after")
            await scene.settled()
    groups = (await from_etcd(config)).groups
    routes = [d for _, d in of_type(groups, v.RouteDecided) if d.request.startswith("after")]  # type: ignore[attr-defined]
    assert {route.worker for route in routes} == {"w0", "w2"}  # type: ignore[attr-defined]
    excluded = {c.excluded for r in routes for c in r.candidates if c.worker == "w1"}  # type: ignore[attr-defined]
    assert excluded == {"unreadable records"}
    verdict = verify(groups)
    assert verdict.divergences == []
    assert ["telepathy/9" in line for line in verdict.unreadable] == [True]
    capsys.readouterr()
    asked = ["--etcd", ",".join(etcd.endpoints), "--state-dir", str(tmp_path)]
    assert await asyncio.to_thread(main, ["replay", "--verify", *asked]) == 0
    assert "1 record of w.w1 unreadable" in capsys.readouterr().out
    database = tmp_path / "log.sqlite"
    assert await asyncio.to_thread(main, ["replay", "--sqlite", str(database), *asked]) == 0
    query = "SELECT stream, fields ->> '$.reason' FROM events WHERE type = 'unreadable_record'"
    with closing(sqlite3.connect(database)) as opened:
        ((stream, reason),) = opened.execute(query)
    assert stream == "w.w1" and "telepathy/9" in reason
    at = [*asked, "--do", "continue type unreadable_record", "--do", "events"]
    assert await asyncio.to_thread(main, ["replay", *at]) == 0
    assert "telepathy/9" in capsys.readouterr().out


async def test_a_segment_that_cannot_be_read_ends_no_replica_and_replays(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    """Its worker gets no more requests until it is deleted and an operator trusts the worker."""
    config = config_for(etcd)
    keys = Keys(config.prefix)
    async with EtcdLog(config) as log:
        async with Scene(65, log=log, tick_s=0.05) as scene:
            await scene.traffic(20, "before")
            key = keys.segment("w.w1", 1 << 40)
            await log.client.put(key, b"no segment")
            await until(lambda: all(r.fleet.unreadable for r in scene.replicas.values()))
            await scene.stop_replica("r0")
            await scene.start_replica("r0")
            await scene.traffic(40, "after")
            (found,) = await check_segments(log)
            assert found.level == "fail" and key.decode() in found.remedy
            await log.client.delete(key)
            assert await check_segments(log) == []
            scene.replicas["r0"].scheduler.emit(TRUSTED)
            folds = [replica.fleet for replica in scene.replicas.values()]
            await until(lambda: not any(has_unacknowledged(fold, "w1") for fold in folds))
            await scene.traffic(40, "again")
            await scene.settled()
    groups = (await from_etcd(config)).groups
    assert len(of_type(groups, v.SegmentSkipped)) == 1
    routes = [d for _, d in of_type(groups, v.RouteDecided)]
    chosen = {
        part: {r.worker for r in routes if r.request.startswith(part)}  # type: ignore[attr-defined]
        for part in ("before", "after", "again")
    }
    assert chosen["after"] == {"w0", "w2"}
    assert "w1" in chosen["before"] & chosen["again"]
    verdict = verify(groups)
    assert verdict.divergences == []
    assert [f"segment {1 << 40}" in line for line in verdict.unreadable] == [True]


async def test_stray_keys_of_replicas_and_the_leader_end_no_replica_and_replay(
    etcd: EtcdServer,
) -> None:
    """They cost no request and exclude no worker, also of a replica that begins afterwards."""
    config = config_for(etcd)
    keys = [Keys(config.prefix).segment(stream, 1 << 40) for stream in ("fleet", "r.r0")]
    async with EtcdLog(config) as log:
        async with Scene(66, log=log, tick_s=0.05) as scene:
            await scene.traffic(20, "before")
            for key in keys:
                await log.client.put(key, b"no segment")
            folds = [replica.fleet for replica in scene.replicas.values()]
            await until(lambda: all(len(fold.unreadable or ()) == 2 for fold in folds))
            await scene.stop_replica("r0")
            await scene.start_replica("r0")
            await scene.traffic(40, "after")
            await scene.settled()
            found = await check_segments(log)
            assert [key.decode() in f.remedy for f, key in zip(found, keys, strict=True)] == [
                True
            ] * 2
    groups = (await from_etcd(config)).groups
    skipped = [(e.stream, e.segment) for _, e in of_type(groups, v.SegmentSkipped)]  # type: ignore[attr-defined]
    assert sorted(skipped) == [("fleet", 1 << 40), ("r.r0", 1 << 40)]
    routes = [d for _, d in of_type(groups, v.RouteDecided)]
    after = {r.worker for r in routes if r.request.startswith("after")}  # type: ignore[attr-defined]
    assert after == {"w0", "w1", "w2"}
    verdict = verify(groups)
    assert verdict.divergences == []
    assert len(verdict.unreadable) == 2


async def test_outage_beyond_the_leases_replays(etcd: EtcdServer) -> None:
    """etcd stands still for longer than a lease: streams are resumed, spools land, and the
    decisions taken meanwhile come out the same from their bases."""
    config = config_for(etcd)
    async with EtcdLog(config) as log:
        async with Scene(62, log=log, tick_s=0.1) as scene:
            await scene.traffic(20, "before")
            etcd.stop()
            await scene.traffic(60, "during")
            await outlast(4.0, "leases of 2 s")
            await scene.traffic(20, "late")
            etcd.cont()
            await until(lambda: all(w.healthy for w in scene._writers.values()), 20.0)
            await scene.traffic(20, "after")
            await scene.settled()
    history = await from_etcd(config)
    resumed = of_type(history.groups, v.StreamResumed)
    assert {stream for stream, _ in resumed} >= {"r.r0", "r.r1", "w.w0"}
    verdict = verify(history.groups)
    assert verdict.divergences == []
    assert verdict.contested > 80
    ends = of_type(history.groups, v.RequestEnded)
    assert len(ends) == len({event.request for _, event in ends}) == 120  # type: ignore[attr-defined]
    assert of_type(history.groups, v.WorkerLost) == []
    assert of_type(history.groups, v.ReplicaLost) == []


async def test_replica_decides_nothing_before_its_predecessors_spool_is_folded(
    etcd: EtcdServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Replay has the spool in every view of the successor; so must the successor."""
    config = msgspec.structs.replace(config_for(etcd), spool_dir=str(tmp_path))
    land, reached, landing = EtcdWriter._append, asyncio.Event(), asyncio.Event()

    async def held_back(self: EtcdWriter) -> None:
        if self.stream == "r.r0":
            reached.set()
            await landing.wait()
        await land(self)

    async with EtcdLog(config) as log:
        async with Scene(63, replicas=1, log=log, tick_s=0.1) as scene:
            await scene.traffic(10, "before")
            etcd.kill9()
            await scene.traffic(31, "during")
            await scene.stop_replica("r0")
            assert list(tmp_path.glob("r.r0.*.spool"))
            monkeypatch.setattr(EtcdWriter, "_append", held_back)
            etcd.restart()
            starting = asyncio.create_task(scene.start_replica("r0"))
            async with asyncio.timeout(20):
                await reached.wait()
            async with log.writer("w.free", wait_s=10) as free:  # others land meanwhile
                for n in range(5):
                    free.append(v.Tick(n, 0))
                    await free.flush(10)
            assert not starting.done(), "serves, though it does not see its own decisions"
            landing.set()
            await starting
            await scene.traffic(40, "after")
            await scene.settled()
    history = await from_etcd(config)
    assert len(of_type(history.groups, v.ReplicaStarted)) == 2
    verdict = verify(history.groups)
    assert verdict.divergences == []
    assert verdict.contested > 40


async def test_trimmed_log_needs_its_archive(etcd: EtcdServer, tmp_path: Path) -> None:
    async with replica_on(etcd, tmp_path) as stage:
        await stage.leads()
        async with traffic_on(stage.log) as traffic:
            while not stage.keeper.status.trimmed:
                await traffic.steps(40)
            await traffic.steps(10)
        log_id = await Maintenance(stage.log.client).identity()
    config = EtcdConfig(endpoints=etcd.endpoints)
    with pytest.raises(HistoryGap, match="--archive"):
        await from_etcd(config)
    history = await from_etcd(config, tmp_path)
    verdict = verify(history.groups)
    assert verdict.divergences == []
    assert verdict.hashes > 3
    assert (tmp_path / log_id).is_dir()
    asked = ["--etcd", ",".join(etcd.endpoints), "--archive", str(tmp_path), "--json"]
    assert await asyncio.to_thread(main, ["replay", *asked]) == 0


async def test_trimmed_log_is_read_with_the_archive_of_the_state_directory(
    etcd: EtcdServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Also from a folder that has an archive of its own, which is of another log."""
    state = tmp_path / "state"
    async with replica_on(etcd, state / "archive") as stage:
        await stage.leads()
        async with traffic_on(stage.log) as traffic:
            while not stage.keeper.status.trimmed:
                await traffic.steps(40)
    (tmp_path / "here" / ".relume" / "archive" / "another-log").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    asked = ["--etcd", ",".join(etcd.endpoints), "--state-dir", str(state)]
    assert await asyncio.to_thread(main, ["replay", *asked, "--json"]) == 0
    assert f"archive {state}" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["why", "no-such-request", *asked]) == 1
    assert f"archive {state}" in capsys.readouterr().err
    monkeypatch.setenv("RELUME_ARCHIVE_DIR", str(state / "archive"))
    asked[-1] = str(tmp_path / "empty")
    assert await asyncio.to_thread(main, ["replay", *asked, "--json"]) == 0


async def test_empty_etcd_is_an_answer(
    etcd: EtcdServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--etcd", ",".join(etcd.endpoints), "--state-dir", str(tmp_path)]
    assert await asyncio.to_thread(main, ["replay", *asked]) == 1
    assert "no log" in capsys.readouterr().err
