"""An effect outlives the trimming of the log that held it, until its agent answers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from relume.chaos.validators.promises.log import i16_admin_logged
from relume.chaos.validators.promises.workers import i15_effects_once
from relume.controlplane.replay.verify import verify
from relume.engine_shim.agent.stream_reader import FleetReader
from relume.events import vocabulary as v
from relume.events.log.codec import decode
from relume.policies.leader.duties import step
from tests.agent.host import Host
from tests.agent.stage import ENGINE
from tests.etcd_server import EtcdServer, etcd_binary
from tests.history.stage import Stage, replica_on, traffic_on, until
from tests.policies.story import Story

pytestmark = pytest.mark.etcd


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    if etcd_binary() is None:
        pytest.skip("no etcd on PATH")
    with EtcdServer() as server:
        yield server


async def held_in_log(stage: Stage) -> bool:
    """Whether an agent still finds the decision in etcd."""
    groups = await FleetReader(stage.log.client, ("fleet",)).read()
    records = (r for g in groups for s in g.segments if s.stream == "fleet" for r in s.records)
    return any(type(event) is v.EffectsDecided for event in map(decode, records))


async def test_an_agent_that_returns_after_the_trimming_gets_its_effects(
    etcd: EtcdServer, tmp_path: Path
) -> None:
    async with replica_on(etcd, tmp_path / "kept") as stage:
        await stage.leads()
        async with traffic_on(stage.log) as traffic:
            await traffic.steps(8)
        await until(lambda: "w0" in stage.fleet.workers)
        applied: list[v.EffectApplied] = []
        stage.replica.observe(
            lambda stream, position, e: applied.append(e) if type(e) is v.EffectApplied else None
        )
        for number, command in enumerate(("hold", "release", "drain")):
            stage.replica.scheduler.emit(
                v.AdminCommanded(
                    command_id=f"c{number}", principal="ada", command=command, target="w0"
                )
            )
        await until(lambda: len(stage.fleet.pending_effects) == 2)
        async with traffic_on(stage.log, "w1") as traffic:
            while await held_in_log(stage):
                await traffic.steps(40)
        assert list(stage.fleet.pending_effects) == ["c1#0", "c2#0"]  # release replaced hold
        host = Host(tmp_path, etcd, stage.log)
        host.spawn("zygote", *ENGINE, "--as", "zygote", str(tmp_path / "z.sock"))
        try:
            host.agent()
            await until(lambda: not stage.fleet.pending_effects, 30)
        finally:
            await host.stop()
        assert [(e.decision, e.index, e.outcome) for e in applied] == [
            ("c1", 0, "applied"),
            ("c2", 0, "applied"),
        ]


def commanded(worker_present: bool) -> Story:
    """A worker that has not answered a drain yet."""
    story = Story()
    story.worker()
    story.replica()
    story.leader()
    story.tell(
        "r.r0", v.AdminCommanded(command_id="c1", principal="root", command="drain", target="w0")
    )
    basis = v.Basis(story.revision, 0)
    effects = (v.Effect("drain", "w0"),)
    story.tell(
        "fleet",
        v.EffectsDecided(decision="c1", basis=basis, cause="root: drain w0", effects=effects),
    )
    if not worker_present:
        story.tell("w.w0", v.WorkerDeregistered("w0", "asked to leave"))
    return story


def stated_again(story: Story, event: object, stream: str) -> v.EffectsDecided:
    story.tell(stream, event)
    basis = v.Basis(story.revision, 0)
    return v.EffectsDecided(
        decision="c1",
        basis=basis,
        cause="root: drain w0",
        effects=(v.Effect("drain", "w0"),),
        again=0,
    )


def test_what_is_stated_again_is_owed_and_no_new_decision() -> None:
    story = commanded(worker_present=True)
    story.tell("w.w0", v.WorkerRegistered(worker="w0", domain="d", agent_pid=7))
    again = stated_again(story, v.Tick(7, 7_000), "fleet")
    story.tell("fleet", again)
    assert step(story.fleet, v.Tick(8, 8_000)) == []
    story.tell("w.w0", v.EffectApplied("c1", 0))
    story.tell("fleet", again)  # crossed with the answer: it is pending no more
    assert story.fleet.pending_effects == {}
    assert [d.what for d in verify(story.groups).divergences] == ["answer"]
    assert verify(story.groups[:-1]).divergences == []
    assert i15_effects_once.check(story.groups, []) == []
    assert i16_admin_logged.check(story.groups, []) == []


def test_a_living_agent_is_asked_again_every_minute_an_absent_one_is_not() -> None:
    for present in (True, False):
        story = commanded(present)
        again = stated_again(story, v.Tick(60, 60_000), "fleet")
        if present:
            story.tell("fleet", again)
        assert verify(story.groups).divergences == []
        story.tell("fleet", again)
        assert len(verify(story.groups).divergences) == 1
