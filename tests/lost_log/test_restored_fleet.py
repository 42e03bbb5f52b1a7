"""The fault `etcd-restored` on a worker host of real processes: what it does, and what its validator finds."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relume.chaos.live.applicable import why_not
from relume.chaos.live.faults import restored_etcd
from relume.chaos.live.faults.restored_etcd import RestoredEtcd
from relume.chaos.live.log_watch import Watch
from relume.chaos.live.processes.etcd_members import Etcd
from relume.chaos.validators.former_log import violations
from relume.chaos.validators.records import THE_RUN
from relume.events.etcd.factory import EtcdLog
from relume.events.vocabulary.enums import EnginePhase
from tests.agent.host import until
from tests.agent.stage import ENGINE
from tests.etcd_server import etcd_binary
from tests.history.stage import config_for
from tests.lost_log.test_new_log import Fleet

pytestmark = [
    pytest.mark.etcd,
    pytest.mark.full,
    pytest.mark.skipif(etcd_binary() is None, reason="no etcd on PATH"),
    pytest.mark.skipif(bool(why_not("etcd-restored")), reason=why_not("etcd-restored")),
]


class RestoredFleet(Fleet):
    """A fleet whose log is watched, and the fault that strikes it."""

    def __init__(self, path: Path, etcd: Etcd, log: EtcdLog) -> None:
        address = SimpleNamespace(endpoints=etcd.endpoints, url=f"http://{etcd.endpoints[0]}")
        super().__init__(path, address, log)  # type: ignore[arg-type]
        self.watch = Watch()
        self.watch.make_reader = log.reader
        host: Any = SimpleNamespace(
            etcd=etcd,
            prefix=log.config.prefix,
            dir=path,
            schedule=SimpleNamespace(control_planes=("r0",), workers={"w0": "d0"}),
            children={"r0": SimpleNamespace(log_path=path / "r0.log")},
        )
        self.fault = RestoredEtcd(host, self.watch)

    async def supervise(self) -> None:
        """Start r0, and again whenever it exits."""
        while True:
            replica = self.replica("r0")
            while replica.poll() is None:
                await asyncio.sleep(0.1)

    async def snapshots(self, count: int) -> None:
        taken = self.said("r0", "snapshot_taken")
        await until(lambda: self.said("r0", "snapshot_taken") >= taken + count, 60)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[RestoredFleet]:
    async with Etcd(1) as etcd, EtcdLog(config_for(etcd), name="test") as log:  # type: ignore[arg-type]
        found = RestoredFleet(tmp_path, etcd, log)
        found.spawn("zygote", *ENGINE, "--as", "zygote", str(tmp_path / "z.sock"))
        tasks = [
            asyncio.create_task(found.watch.follow(log.reader())),
            asyncio.create_task(found.supervise()),
        ]
        try:
            yield found
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await found.stop()


@pytest.mark.parametrize("is_adopted", [True, False])
async def test_the_new_log_adopts_the_engine_or_the_validator_names_it(
    fleet: RestoredFleet, monkeypatch: pytest.MonkeyPatch, is_adopted: bool
) -> None:
    monkeypatch.setattr(restored_etcd, "SERVED", 0)  # a scripted engine answers no request
    agent = fleet.agent("--pace", "0.05")
    assert await fleet.watch.until(
        lambda f: any(w.engine == EnginePhase.READY for w in f.workers.values()), 60
    )
    await fleet.snapshots(1)
    assert "backup of log" in await fleet.fault.back_up()
    await fleet.snapshots(2)
    former, engine = await fleet.identity(), fleet.engine
    renewing = asyncio.create_task(fleet.fault.renew())
    if not is_adopted:
        await until(lambda: fleet.said("r0", "log_replaced"), 60)
        agent.kill()
        agent.wait()
        fleet.agent("--pace", "0.05")
    await renewing
    assert await fleet.identity() not in ("", former) and not fleet.watch.error
    assert (fleet.engine == engine) == is_adopted
    found = [
        str(one)
        for one in violations(fleet.watch.former, fleet.watch.groups)
        if one.about != THE_RUN
    ]
    if is_adopted:
        assert found == []
    else:
        (named,) = found
        assert (
            named.startswith("I20 w0: its engine 1 (pid") and "ended with the former log" in named
        )
