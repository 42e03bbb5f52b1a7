"""Limits of a fleet that its scenario makes small, and an operator in a hurry."""

from __future__ import annotations

from unittest import mock

import pytest
from msgspec.structs import replace

from relume.chaos.outcome import Outcome
from relume.chaos.runner.judge import judge
from relume.chaos.scenario.language import (
    Closed,
    Commands,
    Disorder,
    Fault,
    Fleet,
    Limits,
    Scenario,
    Traffic,
    Uniform,
    When,
)
from relume.chaos.sim import sim_fleet
from relume.chaos.sim.sim_fleet import run
from relume.chaos.sim.world.small_limits import log_limits
from relume.chaos.validators.records import events_of, log_of
from relume.events import vocabulary as v
from relume.events.etcd.writer.backlog import Backlog
from relume.policies.state.fleet import Fleet as Fold

FLEET = Fleet(workers=3, domains=3, control_planes=2, checkpoint_mb=64)


def served(fleet: Fleet, *faults: Fault, requests: int = 96) -> Outcome:
    """A run that keeps every promise."""
    scenario = Scenario(
        name="limited",
        about="",
        fleet=fleet,
        traffic=Traffic(
            arrivals=Closed(12, (0.0, 0.2)),
            lengths=Uniform(prompt=(16, 300), output=(32, 160)),
            requests=requests,
        ),
        faults=faults,
    )
    outcome = run(scenario, 3)
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    return outcome


def test_a_small_daemon_has_its_budget_and_some_requests_find_no_holder() -> None:
    outcome = served(replace(FLEET, limits=Limits(checkpoint_kb=1000)))
    budgets = {
        at.event.budget_bytes
        for at in events_of(outcome.groups, "w.")
        if type(at.event) is v.StateDaemonStarted
    }
    assert budgets == {1000 << 10}
    chosen = [
        at.event for at in events_of(outcome.groups, "r.") if type(at.event) is v.HolderChosen
    ]
    without = [one for one in chosen if not one.holders]
    assert 0 < len(without) < len(chosen) and {one.reason for one in without} == {"budget"}


def test_an_engine_computes_no_more_requests_than_it_may() -> None:
    def largest(running: int) -> int:
        outcome = served(replace(FLEET, limits=Limits(running=running)), requests=48)
        steps = (at.event for at in events_of(outcome.groups, "w."))
        return max(step.batch for step in steps if type(step) is v.EngineStep)

    assert largest(2) == 2 < largest(0)


def test_a_full_kv_cache_preempts_requests_and_the_fold_knows_what_is_left() -> None:
    """I21 of composed 111 with a small KV cache: what a request had generated before a preemption left the
    context of its worker twice."""
    outcome = served(replace(FLEET, limits=Limits(kv_blocks=28)))
    preempted = [
        change
        for at in events_of(outcome.groups, "w.")
        if type(at.event) is v.EngineStep
        for change in at.event.changes
        if type(change) is v.RequestPreempted
    ]
    assert any(change.generated for change in preempted)


def test_what_does_not_fit_a_writers_memory_is_in_its_spool_until_etcd_is_back() -> None:
    assert log_limits(Limits(unwritten_kb=8)).memory_limit_bytes == 8 << 10
    spooled: list[int] = []
    settle = Backlog.refill

    async def refill(backlog: Backlog) -> None:
        spooled.append(backlog.count)
        await settle(backlog)

    away = Fault(what="etcd-stop", when=When(at_s=1.0), target="e0", for_s=6.0)
    with mock.patch.object(Backlog, "refill", refill):
        served(FLEET, away)
        assert not spooled
        served(replace(FLEET, limits=Limits(unwritten_kb=8)), away)
        assert spooled


@pytest.mark.parametrize("kills", [(), ("w0", "w1")])
def test_requests_that_a_full_spool_took_have_their_end(kills: tuple[str, ...]) -> None:
    """I1 and I12: ends that no longer fitted were lost, and their requests live for ever."""
    scenario = Scenario(
        name="full",
        about="etcd is away until the spools of both replicas are full.",
        fleet=replace(FLEET, limits=Limits(unwritten_kb=8)),
        traffic=Traffic(
            arrivals=Closed(12, (0.0, 0.2)),
            lengths=Uniform(prompt=(16, 300), output=(32, 160)),
            requests=96,
        ),
        faults=(
            Fault(what="etcd-stop", when=When(at_s=1.0), target="e0", for_s=25.0),
            *(Fault(what="engine-kill", when=When(at_s=1.6), target=name) for name in kills),
        ),
        promises=("I1", "I2", "I4", "I7", "I12", "I21", "I25"),
    )
    small = replace(log_limits(scenario.fleet.limits), spool_limit_bytes=8 << 10)
    with mock.patch.object(sim_fleet, "log_limits", lambda _: small):
        outcome = run(scenario, 1)
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    outcomes = [history.record.outcome for history in outcome.histories]
    assert outcomes.count("failed") > 10, "the log took no arrivals"
    assert outcomes.count("completed") > 10


def test_small_segments_are_more() -> None:
    def segments(limits: Limits) -> int:
        outcome = served(replace(FLEET, limits=limits), requests=48)
        return sum(len(group.segments) for group in outcome.groups)

    assert segments(Limits(segment_bytes=64)) > segments(Limits())


def test_an_operator_restarts_what_it_holds_and_what_has_just_restarted() -> None:
    """Each is refused by the agent. Afterwards nothing is held or drained."""
    given = Commands(each=(("restart",), ("hold", "restart"), ("drain",)), every_s=0.25, most=3)
    outcome = served(replace(FLEET, operator=given))
    log = log_of(outcome.groups)
    commands = [
        at.event.command for at in events_of(log, "r.") if type(at.event) is v.AdminCommanded
    ]
    assert commands[:4] == ["restart", "hold", "restart", "drain"]
    assert commands[4:] == ["release", "undrain"]
    outcomes = {
        at.event.outcome for at in events_of(log, "w.") if type(at.event) is v.EffectApplied
    }
    assert "refused: the worker is held" in outcomes and "applied" in outcomes
    fold: Fold = log.end
    assert not any(worker.draining for worker in fold.workers.values())


def test_an_operator_ends_what_a_dead_replica_commands_late() -> None:
    """Composed 167553: etcd was away. One replica got the commands to hold and drain, and died; another
    got those to release and undrain, and wrote them first. So the worker stayed held and drained."""
    given = Commands(
        each=(("hold", "drain", "restart"), ("release", "undrain")), every_s=3.0, most=2
    )
    outcome = served(
        replace(FLEET, operator=given, disorder=Disorder(late_writer="r0", late_writer_ms=400)),
        Fault(what="etcd-stop", when=When(at_s=0.001), target="e0", for_s=9.0),
        Fault(what="gateway-kill", when=When(at_s=2.8), target="r0"),
        requests=96,
    )
    log = log_of(outcome.groups)
    landed = [at for at in events_of(log, "r.") if type(at.event) is v.AdminCommanded]
    commands = [(at.stream, at.event.command) for at in landed]
    assert commands[:2] == [("r.r1", "release"), ("r.r1", "undrain")]
    assert commands[2:4] == [("r.r0", "hold"), ("r.r0", "drain")]
    fold: Fold = log.end
    assert not any(worker.held or worker.draining for worker in fold.workers.values())
