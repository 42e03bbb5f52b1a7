"""A simulated fleet with replicas of two builds, under load and with kills."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from msgspec.structs import replace

from relume.chaos.outcome import Outcome
from relume.chaos.runner.judge import judge
from relume.chaos.scenario import scenario_reader
from relume.chaos.sim.sim_fleet import Settings, SimFleet, run
from relume.chaos.validators.records import events_of
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.log.errors import LogFull
from relume.events.log.feature_levels import level_of
from relume.policies.leader.feature_level import SETTING, in_force
from tests.mixed_versions.next_build import NEXT, OLD, WeatherReported, next_build

WRITES_S = 0.2
"""Time between two newer events of a writer that may write them."""
ENDS_S = 0.02
"""Time that its last event takes to the log."""
REQUESTS = 480
SCENARIOS = ("gateway-killed", "engine-killed-in-decode", "agent-killed")


@pytest.fixture(autouse=True)
def newer() -> Iterator[None]:
    with next_build():
        yield


class Upgrade:
    """Replicas `old` are of the former build; the others and all agents are of the next one. At `at_s`
    after the start r1 is stopped and started as of the build of level `then`; never, if that is 0.
    Each writer of the next build writes newer events as soon as it may, or at once if it does not ask
    (`asks`)."""

    def __init__(
        self, at_s: float, asks: bool = True, old: tuple[str, ...] = ("r1",), then: int = NEXT
    ) -> None:
        self.at_s = at_s
        self.asks = asks
        self.old = old
        self.then = then
        self.fleet: SimFleet | None = None

    def watching(self, fleet: SimFleet) -> None:
        self.fleet = fleet
        for name, plane in fleet.planes.items():
            level = OLD if name in self.old else NEXT
            plane._config = replace(plane._config, feature_level=level)
        fleet.loop.call_later(WRITES_S, self.write)
        if self.at_s:
            fleet.loop.call_later(self.at_s, self.upgrade)

    def upgrade(self) -> None:
        """As a stop with a drain: no new clients, and the end when none is left."""
        fleet = self.fleet
        assert fleet is not None
        plane, clients = fleet.planes["r1"], fleet.clients
        clients._doors = [door for door in clients._doors if door != plane.address]
        if plane.replica is None or plane.replica.scheduler.live:
            fleet.loop.call_later(WRITES_S, self.upgrade)
            return
        assert plane.process is not None
        stopped = v.ReplicaStopped("r1", "upgrade")
        plane.process.context.run(plane.replica.scheduler.emit, stopped)
        fleet.loop.call_later(ENDS_S, self.start_again)

    def start_again(self) -> None:
        assert self.fleet is not None
        plane = self.fleet.planes["r1"]
        plane._config = replace(plane._config, feature_level=self.then)
        self.fleet.kill_plane("r1")
        self.fleet.clients._doors.append(plane.address)

    def write(self) -> None:
        assert self.fleet is not None
        for plane in self.fleet.planes.values():
            replica, process = plane.replica, plane.process
            if replica is None or process is None or process.stopped:
                continue
            level = in_force(replica.fleet) if self.asks else NEXT
            if min(level, replica.config.feature_level) >= NEXT:
                process.context.run(self.emit, replica.scheduler.emit)
        for host in self.fleet.hosts.values():
            agent = host.agent
            if agent is None or not agent.process.alive or (journal := agent._journal) is None:
                continue
            if journal.feature_level >= NEXT:
                agent.process.context.run(self.emit, journal.record)
        self.fleet.loop.call_later(WRITES_S, self.write)

    def emit(self, write: Callable[[Any], Any]) -> None:
        try:
            write(WeatherReported(sky="grey"))
        except LogFull:
            return


def ran(scenario: str, seed: int, upgrade: Upgrade) -> Outcome:
    """With more requests than usual."""
    found = scenario_reader.load(scenario_reader.find(scenario))
    traffic = replace(found.traffic, requests=REQUESTS)
    found = replace(found, fleet=replace(found.fleet, control_planes=3), traffic=traffic)
    return run(found, seed, settings=Settings(watching=upgrade.watching))


def writers_of(outcome: Outcome) -> set[str]:
    """Which kinds of streams have newer events."""
    return {at.stream[0] for at in events_of(outcome.groups) if level_of(at.event) == NEXT}


@pytest.mark.full
@pytest.mark.parametrize("scenario", SCENARIOS)
@pytest.mark.parametrize("seed", [1, 2])
def test_no_stream_breaks_while_replicas_are_upgraded(scenario: str, seed: int) -> None:
    outcome = ran(scenario, seed, Upgrade(at_s=8.0))
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    (raised,) = [
        at.event
        for at in events_of(outcome.groups)
        if type(at.event) is v.FeatureLevelRaised and at.event.level > at.event.was
    ]
    assert raised == v.FeatureLevelRaised(level=NEXT, was=OLD, replicas=raised.replicas)
    assert "r1" in raised.replicas
    assert writers_of(outcome) == {"r", "w"}
    assert scenario == "gateway-killed" or verdict.figures["broken_streams"] == 0
    assert not verify(outcome.groups).divergences


@pytest.mark.full
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_the_former_build_can_stay_and_reads_everything(scenario: str) -> None:
    outcome = ran(scenario, 3, Upgrade(at_s=0.0))
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    assert not any(type(at.event) is v.FeatureLevelRaised for at in events_of(outcome.groups))
    assert writers_of(outcome) == set()


@pytest.mark.full
def test_a_replica_can_return_to_the_former_build_while_another_one_has_it() -> None:
    outcome = ran("engine-killed-in-decode", 4, Upgrade(at_s=8.0, old=("r2",), then=OLD))
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    started = [at.event for at in events_of(outcome.groups) if type(at.event) is v.ReplicaStarted]
    levels = [dict(e.settings)[SETTING] for e in started if e.replica == "r1"]
    assert levels == [str(NEXT), str(OLD)]
    assert writers_of(outcome) == set()


@pytest.mark.full
def test_a_writer_that_does_not_ask_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the validators would say of a build without the guard of its writer."""
    monkeypatch.setattr(
        "relume.controlplane.replica.decision_writer.require", lambda event, level: None
    )
    verdict = judge(ran("gateway-killed", 1, Upgrade(at_s=0.0, asks=False)))
    assert verdict.result == "failed"
    assert any(f"needs feature level {NEXT}" in found.detail for found in verdict.violations)
