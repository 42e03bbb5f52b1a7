"""A rolling restart: one failure domain at a time, enough workers open, each checked, paused and
continued, by the fold alone."""

from __future__ import annotations

from typing import Any

import pytest

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind, FailureClass, HealthState, RolloutStage
from relume.policies import decision_versions
from relume.policies.health import health_settings
from relume.policies.health.health_settings import HealthConfig
from relume.policies.health.open_workers import is_open
from relume.policies.leader.duties import on_leader_elected
from relume.policies.leader.duties import step as duties
from relume.policies.migration.migration_settings import MigrationConfig, settings_of
from relume.policies.rollout import rollout_steps
from relume.policies.rollout.rollout_records import active
from relume.policies.state.fold import fold
from tests.policies.story import MODEL, Story, arrived, decided, ended, ready, replica_started

WELL = ("begun", "draining", "restarting", "checking", "returned")


class RollingFleet(Story):
    """A fleet whose leader decides at once. `stages` it decided, `effects` of agents."""

    def __init__(self, *domains: str, floor: int = 1) -> None:
        super().__init__()
        self.stages: list[v.RolloutDecided] = []
        self.effects: list[v.Effect] = []
        for number, domain in enumerate(domains):
            name = f"w{number}"
            self.tell(
                f"w.{name}",
                v.WorkerRegistered(worker=name, domain=domain, agent_pid=7),
                v.EngineStarted(name, 1, 101, 1),
                ready(name),
            )
        settings = (
            *settings_of(MigrationConfig(drain_floor=floor)),
            *health_settings.settings_of(HealthConfig()),
            *decision_versions.settings(),
        )
        self.tell("r.r0", replica_started(settings=settings))
        self.leader()
        self.healthy_ticks(10)

    def tell(self, stream: str, *events: Any) -> Any:
        group = super().tell(stream, *events)
        if self.fleet.leader:
            owed = [e for event in events for e in duties(self.fleet, event)]
            self.stages += [e for e in owed if type(e) is v.RolloutDecided]
            self.effects += [f for e in owed if type(e) is v.EffectsDecided for f in e.effects]
            if owed:
                self.tell("fleet", *owed)
        return group

    def command(self, command: str = "rollout", name: str = "c1", **more: Any) -> None:
        target = MODEL if command == "rollout" else ""
        event = v.AdminCommanded(
            command_id=name, principal="ann", command=command, target=target, **more
        )
        self.tell("r.r0", event)

    def canary(self, name: str, tokens: tuple[int, ...] = (1, 2)) -> None:
        """The engine answers a canary."""
        event = v.CanaryReported(
            worker=name,
            incarnation=self.fleet.workers[name].incarnation,
            canary=0,
            prompts=1,
            tokens=tokens,
            logprobs=(-0.5, -1.5, -0.25, -2.5),
            took_us=20_000,
            alone=True,
        )
        self.tell(f"w.{name}", event)

    def again(self, name: str, incarnation: int = 2) -> None:
        """The engine is restarted."""
        self.tell(
            f"w.{name}",
            v.EngineDied(name, incarnation - 1, "replaced"),
            v.EngineStarted(name, incarnation, 101, 1),
            ready(name, incarnation),
        )

    @property
    def told(self) -> list[tuple[str, tuple[str, ...]]]:
        """Stages and workers."""
        return [(str(e.stage), e.workers) for e in self.stages]


def test_each_domain_is_restarted_in_turn_and_then_it_is_done() -> None:
    fleet = RollingFleet("b", "a", "c")
    fleet.command()
    for name in ("w1", "w0", "w2"):  # by domain
        fleet.healthy_ticks(1)
        assert fleet.told[-1] == ("draining", (name,))
        assert not is_open(fleet.fleet, fleet.fleet.workers[name])
        fleet.healthy_ticks(2)
        assert fleet.told[-1] == ("restarting", (name,))
        assert fleet.effects[-1] == v.Effect(EffectKind.RESTART, name, 1, "rollout")
        fleet.healthy_ticks(3)
        assert fleet.told[-1] == ("restarting", (name,)), "its engine is the old one"
        fleet.again(name)
        fleet.healthy_ticks(1)
        assert fleet.told[-1] == ("checking", (name,))
        assert not is_open(fleet.fleet, fleet.fleet.workers[name])
        fleet.healthy_ticks(1)
        assert fleet.told[-1] == ("returned", (name,))
        assert is_open(fleet.fleet, fleet.fleet.workers[name])
    fleet.healthy_ticks(1)
    assert fleet.told[-1] == ("done", ()) and active(fleet.fleet) is None
    assert [stage for stage, _ in fleet.told] == [WELL[0], *WELL[1:] * 3, "done"]


def test_a_domain_s_workers_go_together_as_far_as_enough_stay_open() -> None:
    fleet = RollingFleet("a", "a", "a", "b", floor=2)
    fleet.command()
    fleet.healthy_ticks(1)
    assert fleet.told[-1] == ("draining", ("w0", "w1"))


def test_requests_have_their_time_to_leave() -> None:
    fleet = RollingFleet("a", "b")
    fleet.tell("r.r0", arrived("q1"), decided("q1", 1, "w0"))
    fleet.command(deadline_ticks=20)
    fleet.healthy_ticks(1 + 19)
    assert fleet.told[-1] == ("draining", ("w0",))
    fleet.healthy_ticks(1)
    assert fleet.told[-1] == ("restarting", ("w0",)), "the time is over"
    other = RollingFleet("a", "b")
    other.tell("r.r0", arrived("q1"), decided("q1", 1, "w0"))
    other.command(deadline_ticks=20)
    other.healthy_ticks(5)
    other.tell("r.r0", ended("q1"))
    other.healthy_ticks(1)
    assert other.told[-1] == ("restarting", ("w0",)), "it ended"


def test_a_new_engine_answers_a_canary_first_if_the_old_one_had_some() -> None:
    fleet = RollingFleet("a", "b", "c")
    for name in ("w0", "w1", "w2"):
        fleet.canary(name)
    fleet.command()
    fleet.healthy_ticks(3)
    fleet.again("w0")
    fleet.healthy_ticks(1)
    assert fleet.told[-1] == ("checking", ("w0",))
    assert fleet.effects[-1] == v.Effect(EffectKind.CANARY, "w0", 2, "rollout")
    fleet.healthy_ticks(5)
    assert fleet.told[-1] == ("checking", ("w0",)), "no answer yet"
    fleet.canary("w0", tokens=(9, 9))
    fleet.healthy_ticks(2)
    assert fleet.told[-1] == ("checking", ("w0",)), "a wrong answer"
    fleet.canary("w0")
    fleet.healthy_ticks(1)
    assert fleet.told[-1] == ("returned", ("w0",))


def health_decided(name: str, state: HealthState) -> v.HealthDecided:
    failure = FailureClass.NONE if state == HealthState.HEALTHY else FailureClass.CORRUPTION
    return v.HealthDecided(
        worker=name, incarnation=1, state=state, failure=failure, evidence="", since=1
    )


@pytest.mark.parametrize("state", [HealthState.QUARANTINED, HealthState.UNHEALTHY])
def test_it_waits_while_a_worker_s_canaries_or_requests_fail(state: HealthState) -> None:
    fleet = RollingFleet("a", "b", "c")
    fleet.command()
    fleet.healthy_ticks(3)
    fleet.again("w0")
    fleet.tell("fleet", health_decided("w2", state))
    assert fleet.told[-1] == ("restarting", ("w0",))
    fleet.healthy_ticks(4)
    assert [stage for stage, _ in fleet.told][-2:] == ["returned", "paused"]
    assert fleet.stages[-1].reason == f"w2 is {state}"
    fleet.tell("fleet", health_decided("w2", HealthState.HEALTHY))
    fleet.healthy_ticks(1)
    assert fleet.told[-1] == ("draining", ("w1",))


@pytest.mark.parametrize("kind", ["dead", "floor"])
def test_it_waits_while_a_worker_is_unwell_and_goes_on_by_itself(kind: str) -> None:
    fleet = RollingFleet("a", "b", floor=1)
    fleet.command()
    fleet.healthy_ticks(1)
    fleet.healthy_ticks(2)
    fleet.again("w0")
    fleet.healthy_ticks(1)
    if kind == "dead":
        fleet.tell("w.w1", v.EngineDied("w1", 1, "killed"))
    else:
        drained = v.Effect("drain", "w0")
        fleet.tell(
            "fleet",
            v.EffectsDecided(decision="d", basis=v.Basis(1, 0), cause="", effects=(drained,)),
        )
    fleet.healthy_ticks(3)
    assert [stage for stage, _ in fleet.told][-2:] == ["returned", "paused"]
    reason = "w1: engine dead" if kind == "dead" else "too few workers"
    assert reason in fleet.stages[-1].reason
    if kind == "dead":
        fleet.tell("w.w1", v.EngineStarted("w1", 2, 101, 1), ready("w1", 2))
    else:
        undrained = v.Effect("undrain", "w0")
        fleet.tell(
            "fleet",
            v.EffectsDecided(decision="u", basis=v.Basis(1, 0), cause="", effects=(undrained,)),
        )
    fleet.healthy_ticks(1)
    assert fleet.told[-1] == ("draining", ("w1",))
    assert active(fleet.fleet) and not active(fleet.fleet).paused


def test_an_engine_that_does_not_come_back_is_said() -> None:
    fleet = RollingFleet("a", "b")
    fleet.command()
    fleet.healthy_ticks(3 + rollout_steps.RETURN_TICKS)
    assert fleet.stages[-1].stage == RolloutStage.RESTARTING
    fleet.healthy_ticks(1)
    assert fleet.stages[-1].stage == RolloutStage.PAUSED and "w0" in fleet.stages[-1].reason
    fleet.again("w0")
    fleet.healthy_ticks(2)
    assert fleet.told[-1] == ("returned", ("w0",))


def test_a_cancelled_one_leaves_all_workers_open() -> None:
    fleet = RollingFleet("a", "b")
    fleet.command()
    fleet.healthy_ticks(1)
    fleet.command("cancel_rollout", "c2")
    assert fleet.told[-1] == ("cancelled", ("w0",))
    assert all(is_open(fleet.fleet, w) for w in fleet.fleet.workers.values())
    fleet.healthy_ticks(5)
    assert fleet.told[-1] == ("cancelled", ("w0",))
    fleet.command(name="c3")
    assert fleet.told[-1][0] == "begun", "another may begin"


def test_a_second_one_and_one_without_workers_are_refused() -> None:
    fleet = RollingFleet("a", "b")
    fleet.command()
    fleet.command(name="c2")
    event = v.AdminCommanded(command_id="c3", principal="ann", command="rollout", target="other")
    fleet.tell("r.r0", event)
    fleet.command("cancel_rollout", "c4")
    fleet.command("cancel_rollout", "c5")
    refusals = [e.value for e in fleet.seen if type(e) is v.ConfigChanged and not e.key]
    assert [why.split(":")[0] for why in refusals] == [
        "a rolling restart of m goes on",
        "a rolling restart of m goes on",
        "no rolling restart goes on",
    ]


def test_the_next_leader_repeats_the_effects_of_the_stage_under_their_names() -> None:
    fleet = RollingFleet("a", "b")
    fleet.command()
    fleet.healthy_ticks(3)
    (first,) = [e for e in fleet.seen if type(e) is v.EffectsDecided and e.effects]
    again = on_leader_elected(fleet.fleet, v.LeaderElected("r1", "b2"))
    (repeated,) = [e for e in again if type(e) is v.EffectsDecided]
    assert (repeated.decision, repeated.effects) == (first.decision, first.effects)
    fleet.again("w0")
    assert not on_leader_elected(fleet.fleet, v.LeaderElected("r1", "b2")), "it began anew"


def test_the_next_leader_does_not_repeat_what_it_cancels() -> None:
    fleet = RollingFleet("a", "b")
    fleet.command()
    fleet.healthy_ticks(3)
    cancel = v.AdminCommanded(command_id="x", principal="ann", command="cancel_rollout", target="m")
    fold(fleet.fleet, "r.r0", 1, cancel)  # its leader has died
    out = on_leader_elected(fleet.fleet, v.LeaderElected("r1", "b2"))
    assert [e.stage for e in out if type(e) is v.RolloutDecided] == ["cancelled"]
    assert not [e for e in out if type(e) is v.EffectsDecided and e.effects]


def test_a_worker_that_is_gone_is_left_out() -> None:
    fleet = RollingFleet("a", "b", "c")
    fleet.command()
    fleet.tell("w.w1", v.WorkerDeregistered("w1", "agent stopped"))
    fleet.healthy_ticks(3)
    fleet.again("w0")
    fleet.healthy_ticks(3)
    assert fleet.told[-1] == ("draining", ("w2",))


def drained_by_operator(name: str = "w2") -> v.AdminCommanded:
    return v.AdminCommanded(command_id="d", principal="ann", command="drain", target=name)


def lose(fleet: RollingFleet, name: str) -> None:
    """Its host is gone: nothing comes from there, and its lease lapses."""
    fleet.lapse(f"w.{name}")
    fleet.tell("fleet", v.WorkerLost(name, fleet.fleet.workers[name].epoch, "lease lapsed"))


def comes_back(fleet: RollingFleet, name: str, incarnation: int) -> None:
    fleet.own(f"w.{name}")
    fleet.tell(
        f"w.{name}",
        v.WorkerRegistered(worker=name, domain=name, agent_pid=8),
        v.EngineStarted(name, incarnation, 102, 1),
        ready(name, incarnation),
    )


@pytest.mark.parametrize("ticks", [1, 3], ids=["draining", "restarting"])
def test_a_step_waits_for_a_host_that_is_lost(ticks: int) -> None:
    """A restart that hosts do not survive takes one host."""
    fleet = RollingFleet("a", "b", "c")
    fleet.command()
    fleet.healthy_ticks(ticks)
    reached = fleet.told[-1]
    lose(fleet, "w0")
    fleet.healthy_ticks(5)
    assert fleet.stages[-1].stage == RolloutStage.PAUSED
    assert fleet.stages[-1].reason == "w0: host lost"
    assert fleet.told[-2] == reached
    comes_back(fleet, "w0", 2)
    fleet.healthy_ticks(6)
    assert ("draining", ("w1",)) in fleet.told


def test_the_next_step_waits_for_a_host_that_was_restarted_and_is_lost() -> None:
    fleet = RollingFleet("a", "b", "c")
    fleet.command()
    fleet.healthy_ticks(3)
    fleet.again("w0")
    lose(fleet, "w0")
    fleet.healthy_ticks(5)
    assert fleet.told[-1][0] == "paused" and "w0: host lost" in fleet.stages[-1].reason
    assert [stage for stage, _ in fleet.told].count("draining") == 1


@pytest.mark.parametrize("how", ["drained", "leaves", "forgotten", "cancelled", "before"])
def test_a_lost_host_holds_up_no_rollout_for_ever(how: str) -> None:
    fleet = RollingFleet("a", "b", "c")
    if how == "before":
        lose(fleet, "w2")
    fleet.command()
    fleet.healthy_ticks(3)
    if how != "before":
        lose(fleet, "w2")
    if how == "drained":
        fleet.tell("r.r0", drained_by_operator())
    elif how == "leaves":
        fleet.tell("w.w2", v.WorkerDeregistered("w2", "agent stopped"))
    elif how == "forgotten":
        fleet.tell("fleet", v.WorkerForgotten("w2", fleet.fleet.workers["w2"].epoch))
    elif how == "cancelled":
        fleet.command("cancel_rollout", "c2")
        fleet.command(name="c3")
        fleet.healthy_ticks(3)
        assert fleet.told[-1] == ("restarting", ("w0",))
    fleet.again("w0")
    fleet.healthy_ticks(5)
    assert fleet.told[-1][1] == ("w1",)


def test_a_step_is_given_up_if_the_other_worker_fails_while_it_drains() -> None:
    """Else no worker would serve while its engine starts."""
    fleet = RollingFleet("a", "b")
    fleet.command()
    fleet.healthy_ticks(1)
    fleet.tell("w.w1", v.EngineDied("w1", 1, "killed"))
    fleet.healthy_ticks(1)
    assert fleet.told[-1] == ("returned", ("w0",))
    assert fleet.stages[-1].reason == f"too few workers of {MODEL} are open without w0"
    assert is_open(fleet.fleet, fleet.fleet.workers["w0"])
    fleet.healthy_ticks(5)
    assert fleet.told[-1] == ("paused", ())
    fleet.tell("w.w1", v.EngineStarted("w1", 2, 101, 1), ready("w1", 2))
    fleet.healthy_ticks(1)
    assert fleet.told[-1] == ("draining", ("w0",)), "its restart is still to come"
    assert not [effect for effect in fleet.effects if effect.kind == EffectKind.RESTART]


def test_a_step_is_given_up_if_the_other_worker_fails_its_requests_while_it_drains() -> None:
    """The guard of health counts the worker that drains as serving. Without it every serving worker
    would fail, so the verdict on the other one would be withheld, and the step would go on."""
    fleet = RollingFleet("a", "b")
    fleet.command()
    fleet.healthy_ticks(1)
    assert fleet.told[-1] == ("draining", ("w0",))
    for number in range(HealthConfig().errors):
        name = f"q{number}"
        failed = v.TransportObserved(
            request=name, attempt=1, worker="w1", incarnation=1, kind="engine_error",
            delivered=0, status=500,
        )  # fmt: skip
        fleet.tell("r.r0", arrived(name), decided(name, worker="w1"), failed)
    assert not is_open(fleet.fleet, fleet.fleet.workers["w1"])
    fleet.healthy_ticks(1)
    assert fleet.told[-1] == ("returned", ("w0",))
    assert is_open(fleet.fleet, fleet.fleet.workers["w0"])


def test_one_wrong_canary_holds_up_the_next_step() -> None:
    """Two of them quarantine the worker; what a restart does to engines may show on the first one."""
    fleet = RollingFleet("a", "b", "c")
    for name in ("w0", "w1", "w2"):
        fleet.canary(name)
    fleet.canary("w1", tokens=(1, 3))
    fleet.command()
    fleet.healthy_ticks(2)
    assert fleet.stages[-1].stage == RolloutStage.PAUSED
    assert fleet.stages[-1].reason == "w1 answers a canary wrongly"
    fleet.canary("w1")
    fleet.healthy_ticks(1)
    assert fleet.told[-1] == ("draining", ("w0",))


@pytest.mark.parametrize("why", ["dead as well", "operator"])
def test_a_step_is_not_given_up_for_workers_that_could_not_serve(why: str) -> None:
    fleet = RollingFleet("a", "b")
    fleet.command()
    fleet.healthy_ticks(1)
    if why == "dead as well":
        fleet.tell("w.w0", v.EngineDied("w0", 1, "killed"))
    else:
        fleet.tell("r.r0", drained_by_operator("w0"))
    fleet.tell("w.w1", v.EngineDied("w1", 1, "killed"))
    fleet.healthy_ticks(2)
    assert fleet.told[-1] == ("restarting", ("w0",))


def test_a_step_is_given_up_only_before_its_restart() -> None:
    fleet = RollingFleet("a", "b")
    fleet.command()
    fleet.healthy_ticks(3)
    assert fleet.told[-1] == ("restarting", ("w0",))
    fleet.tell("w.w1", v.EngineDied("w1", 1, "killed"))
    fleet.healthy_ticks(2)
    assert fleet.told[-1] == ("restarting", ("w0",))


def test_replicas_of_an_earlier_version_do_not_know_steps_that_are_given_up() -> None:
    fleet = RollingFleet("a", "b")
    older = (("version.rollout", "2"),)
    fleet.tell("r.r1", replica_started("r1", settings=older))
    fleet.command()
    fleet.healthy_ticks(1)
    fleet.tell("w.w1", v.EngineDied("w1", 1, "killed"))
    fleet.healthy_ticks(2)
    assert fleet.told[-1] == ("restarting", ("w0",))


def test_replicas_of_an_earlier_build_follow_the_earlier_rule() -> None:
    fleet = RollingFleet("a", "b", "c")
    fleet.tell("r.r1", replica_started("r1"))
    fleet.command()
    fleet.healthy_ticks(3)
    fleet.again("w0")
    lose(fleet, "w0")
    fleet.healthy_ticks(4)
    assert ("draining", ("w1",)) in fleet.told
