"""An etcd that fills up: agents write steps with less detail until there is room again."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from relume.controlplane.history.quota import Level
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.policies.leader import log_detail
from tests.agent.host import Host
from tests.agent.stage import ENGINE
from tests.etcd_server import EtcdServer, etcd_binary
from tests.history.stage import Stage, replica_on, traffic_on, until
from tests.policies.story import Story

pytestmark = pytest.mark.etcd

QUOTA = 16 * 1024**2
WHEN_TOLD = {"every_revisions": 10**9, "every_s": 1e9, "quota_bytes": QUOTA}


@pytest.fixture
def small() -> Iterator[EtcdServer]:
    """An etcd that takes 16 MiB."""
    if etcd_binary() is None:
        pytest.skip("no etcd on PATH")
    with EtcdServer(quota_bytes=QUOTA) as server:
        yield server


class Steps:
    """Step records of worker w0 as the replica folds them: how many steps each stands for."""

    def __init__(self, stage: Stage) -> None:
        self.gaps: list[int] = []
        self.finished: list[int] = []
        self._last = 0
        stage.replica.observe(self._seen)

    def _seen(self, stream: str, position: int, event: object) -> None:
        if stream != "w.w0" or type(event) is not v.EngineStep:
            return
        self.gaps.append(event.step - self._last)
        self._last = event.step
        ended = (c for c in event.changes if type(c) is v.EngineFinished)
        self.finished += [c.output_tokens for c in ended]

    async def next(self, count: int) -> list[int]:
        """Gaps of the next `count` records."""
        begun = len(self.gaps)
        await until(lambda: len(self.gaps) >= begun + count, 30)
        return self.gaps[begun : begun + count]

    async def become(self, merged: bool) -> None:
        """Wait until records stand for many steps each, or for one."""
        async with asyncio.timeout(60):
            while (sum(await self.next(5)) > 10) is not merged:
                pass


def test_between_the_marks_it_stays_as_it_was() -> None:
    at = {
        size: tuple(log_detail.detail(was, size, 100, 60) for was in ("full", "shed"))
        for size in (0, 49, 50, 59, 60, 90)
    }
    assert at[0] == at[49] == ("full", "full")
    assert at[50] == at[59] == ("full", "shed")
    assert at[60] == at[90] == ("shed", "shed")


async def test_steps_are_shed_while_etcd_is_short_of_room_and_back_afterwards(
    small: EtcdServer, tmp_path: Path
) -> None:
    async with replica_on(small, tmp_path / "kept", **WHEN_TOLD) as stage:
        stage.keeper.pressed_every_s = float("inf")  # no room is made until we say so
        stage.keeper._pressed_at = 0.0
        await stage.leads()
        host = Host(tmp_path, small, stage.log)
        host.spawn("zygote", *ENGINE, "--as", "zygote", str(tmp_path / "z.sock"))
        steps = Steps(stage)
        try:
            agent = host.agent("--pace", "0.005")
            assert set(await steps.next(40)) == {1}
            async with traffic_on(stage.log, "w1") as traffic:
                while stage.keeper.status.level < Level.SHED:
                    await traffic.steps(16, 8192)
                    if 8192 * len(traffic.taken) > QUOTA // 2:
                        looked = stage.keeper._looked_at
                        await until(lambda: stage.keeper._looked_at > looked)  # noqa: B023
            await until(lambda: stage.fleet.detail == "shed")
            assert stage.keeper.status.level < Level.FULL
            await steps.become(merged=True)

            agent.kill()  # its successor has seen nothing of it, and is told
            agent.wait()
            host.agent("--pace", "0.005")
            await until(lambda: stage.fleet.workers["w0"].incarnation == 2, 30)
            steps.finished.clear()
            await steps.become(merged=True)
            assert verify(await stage.log.reader().read()).divergences == []

            stage.keeper.pressed_every_s = 0.5
            await until(lambda: stage.fleet.detail == "full", 60)
            assert stage.keeper.status.database_bytes < QUOTA // 2
            await steps.become(merged=False)
            assert steps.finished == list(range(1, len(steps.finished) + 1))
        finally:
            await host.stop()


def test_a_forged_reason_to_shed_is_found() -> None:
    story = Story()
    story.worker()
    story.leader()
    story.tell(
        "fleet",
        v.DetailDecided(
            detail="shed", was="full", database_bytes=50, quota_bytes=100, shed_percent=60
        ),
    )
    (found,) = verify(story.groups).divergences
    assert (found.what, found.expected, found.actual) == ("decision", "shed", "full")
