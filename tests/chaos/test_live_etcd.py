"""Faults of etcd, of the ways to it and of clocks on real processes, one by one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relume.chaos.live.applicable import why_not
from relume.chaos.live.errors import CannotStrike
from relume.chaos.live.faults.live_faults import Faults
from relume.chaos.live.faults.tcp_links import Link
from relume.chaos.live.faults.wall_clocks import WallClocks
from relume.chaos.live.log_watch import Watch
from relume.chaos.live.processes.etcd_members import Etcd
from relume.chaos.live.processes.fleet_host import Host
from relume.chaos.scenario.schedule import PlannedFault, Schedule
from relume.controlplane.local.local_fleet import FleetOptions
from relume.events import vocabulary as v
from relume.events.etcd.client.connection import EtcdClient
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.log.codec import decode_all
from relume.events.log.damaged_segment import DamagedSegment
from relume.events.log.errors import LogUnavailable
from tests.etcd_server import etcd_binary

HANG_S = 30.0
needs_etcd = pytest.mark.skipif(etcd_binary() is None, reason="no etcd on PATH")


def planned(what: str, **more: Any) -> PlannedFault:
    return PlannedFault(**{"name": "f0", "what": what, "target": "any", **more})


def faults(**host: Any) -> Faults:
    host = {"clock_of": Path, **host}
    return Faults(SimpleNamespace(**host), Watch(), SimpleNamespace(), 0)  # type: ignore[arg-type]


async def until(found: Callable[[], bool]) -> None:
    deadline = time.monotonic() + HANG_S
    while not found():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


async def test_clocks_jump_from_where_they_are_and_drift_until_that_ends(tmp_path: Path) -> None:
    def error_of(name: str) -> float:
        return float((tmp_path / name).read_text())

    clocks = WallClocks(lambda name: tmp_path / name)
    clocks.jump("w0", 3600)
    clocks.jump("w0", -600)
    clocks.jump("r1", -5)
    assert (error_of("w0"), error_of("r1")) == (3000, -5)
    began = time.monotonic()
    drift = asyncio.create_task(clocks.drift("r1", 1e6))
    await until(lambda: error_of("r1") > -4)
    assert time.monotonic() - began >= 1.0, "a second fast a second"
    drift.cancel()
    await asyncio.gather(drift, return_exceptions=True)
    assert error_of("w0") == 3000


@pytest.mark.parametrize(
    ("what", "passes"),
    [
        ("replica-cut", {"to": False, "fro": False}),
        ("replica-calls-lost", {"to": False, "fro": True}),
        ("replica-answers-lost", {"to": True, "fro": False}),
    ],
)
async def test_a_replica_is_cut_from_each_member_and_no_other_is(
    what: str, passes: dict[str, bool]
) -> None:
    links = {name: [Link(), Link()] for name in ("r0", "r1")}
    host = faults(etcd_links=links)
    undo, _ = await host.strike(planned(what, target="r1"), ["r1"])
    assert all(link.passes == passes for link in links["r1"])
    assert all(all(link.passes.values()) for link in links["r0"])
    assert undo is not None
    await undo()
    assert all(all(link.passes.values()) for link in links["r1"])


@pytest.mark.parametrize("struck", [(), ("replica-cut", "replica-clock-jump")])
async def test_replicas_have_links_and_clocks_of_their_own_where_a_fault_needs_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, struck: tuple[str, ...]
) -> None:
    schedule = Schedule(
        scenario="s",
        seed=1,
        workers={},
        control_planes=("r0", "r1"),
        etcd=("e0",),
        requests=(),
        faults=tuple(planned(what, target="r1") for what in struck),
    )
    etcd = SimpleNamespace(endpoints=("127.0.0.1:1",))
    host = Host(FleetOptions(state_dir=str(tmp_path)), schedule, etcd, "/run", print)  # type: ignore[arg-type]
    found: dict[str, tuple[str, str]] = {}

    def start(name: str, argv: list[str], env: dict[str, str]) -> None:
        last = max(at for at, word in enumerate(argv) if word == "--etcd")
        found[name] = argv[last + 1], env.get("RELUME_CLOCK", "")

    monkeypatch.setattr(host, "_child", start)
    try:
        await host._interpose(schedule.faults)
        for index in range(2):
            host.start_replica(index)
        for name, own in found.items():
            endpoint, clock = (
                (host.etcd_links[name][0].endpoint, str(host.clock_of(name)))
                if struck
                else (host.etcd_endpoint, "")
            )
            assert own == (endpoint, clock)
        assert len(set(found.values())) == (2 if struck else 1)
    finally:
        await host.stop()


async def test_malformed_reports_need_an_engine_that_the_log_names(tmp_path: Path) -> None:
    with pytest.raises(CannotStrike, match="names no engine of w0"):
        await faults(dir=tmp_path).strike(planned("reports-unreadable", target="w0"), ["w0"])


@pytest.mark.full
@pytest.mark.etcd
@needs_etcd
async def test_a_member_that_is_cut_from_the_others_loses_its_leadership() -> None:
    async with Etcd(3, linked=True) as etcd:
        was = await etcd.leader()
        others = [name for name in etcd.names if name != was]
        assert etcd.links is not None
        config = EtcdConfig(endpoints=(etcd.endpoint(was),), call_timeout_ms=500)
        async with EtcdClient(config) as client:
            await client.put(b"/a", b"1")
            undo, _ = await faults(etcd=etcd).strike(planned("etcd-cut"), [was])
            assert undo is not None
            with pytest.raises(LogUnavailable):
                await client.put(b"/a", b"2")
            await etcd.healthy(others)
            # The former one counts itself as the leader until its own check of a majority.
            deadline = time.monotonic() + HANG_S
            while await etcd.leader() not in others:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            await undo()
            await etcd.healthy()
            await client.put(b"/a", b"3")


@pytest.mark.etcd
@needs_etcd
async def test_stray_keys_stand_in_the_streams_of_a_replica_and_of_the_leader() -> None:
    async with Etcd(1) as etcd:
        config = EtcdConfig(endpoints=etcd.endpoints)
        struck = faults(etcd=etcd, prefix=config.prefix)
        async with EtcdLog(config) as log, log.writer("fleet") as writer:
            writer.append(v.Tick(0, 0))
            await writer.flush(5)
            undo, detail = await struck.strike(planned("stray-key"), ["r1"])
            assert undo is None and detail.endswith("of r.r1, fleet")
            reader, seen = log.reader(), list[DamagedSegment]()
            reader.on_damage = seen.append
            assert [g for g in await reader.read() if g.segments], "what stands before it is read"
            assert {(one.stream, one.seq > 1 << 40) for one in seen} == {
                ("r.r1", True),
                ("fleet", True),
            }
            writer.append(v.Tick(1, 0))
            await writer.flush(5)


@pytest.mark.etcd
@needs_etcd
async def test_leases_that_had_less_left_than_the_clock_of_etcd_jumps_are_gone() -> None:
    async with Etcd(1) as etcd, EtcdClient(EtcdConfig(endpoints=etcd.endpoints)) as client:
        for key, ttl_s in ((b"/run/short", 10), (b"/run/long", 100), (b"/other/short", 10)):
            await client.put(key, b"", (await client.lease_grant(ttl_s)).ID)
        struck = faults(etcd=etcd, prefix="/run")
        assert (await struck.strike(planned("etcd-clock-jump", amount=20.0), ["e0"]))[0] is None
        left = [kv.key for kv in (await client.range(b"/", b"0")).kvs]
        assert left == [b"/other/short", b"/run/long"]
        with pytest.raises(CannotStrike):
            await struck.strike(planned("etcd-clock-jump", amount=20.0), ["e0"])


@pytest.mark.etcd
@needs_etcd
async def test_leases_end_earlier_while_the_clock_of_etcd_runs_fast() -> None:
    """At twice the speed a lease of 4 s ends after 2 s; without the fault, 4 s after its grant."""
    async with Etcd(1) as etcd, EtcdClient(EtcdConfig(endpoints=etcd.endpoints)) as client:
        struck = faults(etcd=etcd, prefix="/run")
        undo, _ = await struck.strike(planned("etcd-clock-drift", amount=1e6, for_ns=1), ["e0"])
        assert undo is not None
        for key, ttl_s in ((b"/run/short", 4), (b"/run/long", 100), (b"/other/long", 100)):
            await client.put(key, b"", (await client.lease_grant(ttl_s)).ID)
        began = time.monotonic()
        while len((await client.range(b"/", b"0")).kvs) == 3:
            assert time.monotonic() < began + HANG_S
            await asyncio.sleep(0.05)
        assert 1.0 < time.monotonic() - began < 3.9
        left = [kv.key for kv in (await client.range(b"/", b"0")).kvs]
        assert left == [b"/other/long", b"/run/long"]
        await undo()


@pytest.mark.etcd
@needs_etcd
async def test_a_member_whose_disk_hangs_takes_nothing_until_it_goes_on() -> None:
    if why := why_not("disk-hangs"):
        pytest.skip(why)
    async with Etcd(1) as etcd:
        config = EtcdConfig(endpoints=etcd.endpoints, call_timeout_ms=1000)
        async with EtcdClient(config) as client:
            await client.put(b"/a", b"1")
            undo, _ = await faults(etcd=etcd).strike(planned("disk-hangs"), ["e0"])
            assert undo is not None
            try:
                with pytest.raises(LogUnavailable):
                    await client.put(b"/a", b"2")
            finally:
                await undo()
            await etcd.healthy()
            await client.put(b"/a", b"3")


@pytest.mark.full
@pytest.mark.etcd
@needs_etcd
@pytest.mark.parametrize("members", [1, 3])
async def test_members_that_are_restored_have_what_the_backup_has(
    members: int, tmp_path: Path
) -> None:
    if why := why_not("etcd-restored"):
        pytest.skip(why)
    async with Etcd(members) as etcd:
        async with EtcdClient(EtcdConfig(endpoints=etcd.endpoints)) as client:
            await client.put(b"/a", b"1")
            await etcd.back_up(tmp_path / "backup.db")
            await client.put(b"/a", b"2")
            await client.put(b"/b", b"2")
        await etcd.restore(tmp_path / "backup.db")
        async with EtcdClient(EtcdConfig(endpoints=etcd.endpoints)) as client:
            found = (await client.range(b"/", b"0")).kvs
            assert [(kv.key, kv.value) for kv in found] == [(b"/a", b"1")]
            assert len((await client.members()).members) == members


@pytest.mark.full
@pytest.mark.etcd
@needs_etcd
async def test_members_that_defragment_or_are_replaced_cost_no_event() -> None:
    async with Etcd(3) as etcd:
        config = EtcdConfig(endpoints=etcd.endpoints, lease_ttl_s=8)
        async with EtcdLog(config) as log, log.writer("w.w0") as writer:
            epoch, count, over = writer.epoch, 0, asyncio.Event()

            async def load() -> None:
                nonlocal count
                while not over.is_set():
                    writer.append(v.Tick(count, 0))
                    count += 1
                    await asyncio.sleep(0.005)

            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(load())
                for name in etcd.names:
                    await etcd.defragment(name)
                lost = await etcd.leader()
                await etcd.replace(lost)
                over.set()
            await writer.flush(20)
            groups = await log.reader().read()
            found = [e for g in groups for s in g.segments for e in decode_all(s.records)]
            assert [e.number for e in found if type(e) is v.Tick] == list(range(count))
            assert count > 100 and writer.epoch == epoch
            assert len(list((await log.client.members()).members)) == 3
