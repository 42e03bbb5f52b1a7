"""Draft assistance while an engine loads."""

from __future__ import annotations

from msgspec.structs import replace

from relume.chaos.scenario.language import Fault, Fixed, Fleet, Poisson, Scenario, Traffic, When
from relume.chaos.sim.engine.draft_assist import Assist
from relume.chaos.sim.engine.speed import Drafts
from relume.chaos.sim.sim_fleet import Settings, SimFleet, run
from relume.chaos.sim.world.worker_machine import WorkerSettings
from relume.controlplane.replica.loop import ReplicaConfig
from relume.policies.checkpoints.checkpoint_settings import CheckpointConfig

RELOAD_S = 6.0
AT_HOLDERS = ReplicaConfig(
    checkpoints=CheckpointConfig(placement="load_aware", recovery="eq6", theta_percent=1_000_000)
)
LOST = Scenario(
    name="lost",
    about="An engine of three dies under load.",
    fleet=Fleet(
        workers=3, model="qwen3-32b", hardware="rtxpro6000x2", domains=3, checkpoint_mb=8192
    ),
    traffic=Traffic(arrivals=Poisson(1.5), lengths=Fixed(800, 100), for_s=20.0),
    faults=(Fault(what="engine-kill", when=When(at_s=5.0), target="w1"),),
)


class Looking:
    """What is to be seen of hosts ten times a second."""

    def __init__(self) -> None:
        self.drafted: list[tuple[float, str, bool]] = []
        """Time, host that is drafted for, whether w1 serves."""

    def attach(self, fleet: SimFleet) -> None:
        self.fleet = fleet
        self._look()

    def _look(self) -> None:
        loop, hosts = self.fleet.loop, self.fleet.hosts
        engine = hosts["w1"].engine
        serves = engine is not None and engine.serving and engine.process.alive
        for host in hosts.values():
            if host.drafts is not None:
                at = (loop.now_ns - self.fleet.began_ns) / 1e9
                self.drafted.append((at, host.name, serves))
        loop.call_at(loop.time() + 0.1, self._look)


def outcome_of(settings: Settings) -> Looking:
    looking = Looking()
    workers = WorkerSettings(reload_s=RELOAD_S, jitter=0.0, exact_links=True)
    settings = replace(settings, workers=workers, replica=AT_HOLDERS, watching=looking.attach)
    found = run(LOST, 1, settings=settings)
    assert not found.error and found.drained
    assert all(history.record.outcome == "completed" for history in found.histories)
    return looking


def test_a_loading_host_drafts_for_one_survivor_until_its_engine_is_there() -> None:
    looking = outcome_of(Settings(assist=Assist(Drafts(acceptance=0.6, count=4), after_s=2.0)))
    assert looking.drafted and len({name for _, name, _ in looking.drafted}) == 1
    assert looking.drafted[0][1] != "w1"
    first, last = looking.drafted[0][0], looking.drafted[-1][0]
    assert (
        7.0 <= first < 8.5
    )  # it died at 5 s, was started again soon, and had its drafts 2 s later
    assert first + RELOAD_S - 3.0 <= last <= first + RELOAD_S - 1.0
    assert sum(serves for _, _, serves in looking.drafted) <= 3  # one look of theirs
