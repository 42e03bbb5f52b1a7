"""Streams that fall silent in simulated fleets: the stuck move, the others do not."""

from __future__ import annotations

import pytest
from msgspec import structs

from relume.chaos.outcome import Outcome
from relume.chaos.runner.judge import judge
from relume.chaos.scenario.language import Closed, Fault, Fleet, Scenario, Traffic, Uniform, When
from relume.chaos.sim.engine import host_types
from relume.chaos.sim.sim_fleet import Settings, run
from relume.chaos.validators.records import events_of
from relume.events import vocabulary as v


def told(outcome: Outcome, kind: type) -> list:
    return [at.event for at in events_of(outcome.groups) if type(at.event) is kind]


def scenario(outputs: tuple[int, int], *faults: Fault, clients: int = 12) -> Scenario:
    return Scenario(
        name="silences",
        about="Streams fall silent.",
        fleet=Fleet(workers=3, control_planes=2),
        traffic=Traffic(
            arrivals=Closed(clients, (0.0, 0.2)),
            lengths=Uniform(prompt=(16, 200), output=outputs),
            requests=150,
        ),
        faults=faults,
    )


def stuck(at_s: float, worker: str) -> Fault:
    return Fault(what="stream-stuck", when=When(at_s=at_s), target=worker)


def test_a_stuck_stream_moves_alone_within_its_bound_and_every_promise_holds() -> None:
    outcome = run(scenario((1000, 1500), stuck(1.0, "w0"), stuck(2.0, "w1")), 3)
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    judged = told(outcome, v.StreamJudged)
    assert {(j.worker, j.stuck, j.decodes, j.finished) for j in judged} == {
        ("w0", True, True, False), ("w1", True, True, False),
    }  # fmt: skip
    assert all(j.silent_us <= j.bound_us + 1_500_000 for j in judged)
    moved = [e for e in told(outcome, v.RouteDecided) if e.attempt > 1]
    assert sorted(e.request for e in moved) == sorted(j.request for j in judged)
    assert all(e.cause == "stuck" and e.mode == "continue" and e.avoid for e in moved)


def test_a_stream_that_its_engine_finished_moves_too() -> None:
    outcome = run(scenario((48, 64), stuck(1.0, "w0")), 4)
    assert judge(outcome).why == ()
    (judged,) = told(outcome, v.StreamJudged)
    assert judged.finished and judged.silent_us < 2_500_000


@pytest.mark.parametrize("what", ["cut", "cut-one-way"])
def test_streams_leave_an_engine_that_is_out_of_reach_and_makes_steps(what: str) -> None:
    """Composed 140659: they waited until the path was back, as long as the engine had work."""
    long = (1500, 2000)
    slow = Fault(what="worker-slow", when=When(at_s=0.5), target="w0", for_s=30.0, amount=8.0)
    cut = Fault(what=what, when=When(at_s=1.0), target="w0", peer="gateway", for_s=14.0)
    outcome = run(scenario(long, slow, cut), 3)
    assert judge(outcome).why == ()
    judged = told(outcome, v.StreamJudged)
    assert judged and {(j.worker, j.probe, j.stuck) for j in judged} == {("w0", "silent", True)}
    assert max(j.silent_us for j in judged) < 5_000_000
    lost = [e for e in told(outcome, v.TransportObserved) if e.worker == "w0"]
    assert {j.request for j in judged} <= {e.request for e in lost if e.kind == "unreachable"}
    assert told(outcome, v.StallJudged) == [], "the engine makes steps"


def test_one_that_its_engine_finished_moves_also_while_etcd_is_away() -> None:
    """Composed 229: the engine had nothing else to do, and its report waited for etcd."""
    away = Fault(what="etcd-kill", when=When(at_s=0.9), target="e0", for_s=12.0)
    few = scenario((48, 64), stuck(1.0, "w0"), stuck(1.0, "w1"), away, clients=3)
    outcome = run(structs.replace(few, fleet=structs.replace(few.fleet, etcd=1)), 4)
    assert judge(outcome).why == ()
    judged = told(outcome, v.StreamJudged)
    assert len(judged) == 2 and all(j.held == 0 and j.silent_us < 4_000_000 for j in judged)


def test_streams_of_a_gateway_that_was_taken_for_lost_move_after_its_return() -> None:
    """Composed 843: the leader ended their requests in the log, so the fold knew nothing of them."""
    stands_still = Fault(what="leader-stop", when=When(at_s=1.6), for_s=12.0)
    fell_silent = [stuck(1.5, name) for name in ("w0", "w1", "w2") for _ in range(3)]
    outcome = run(scenario((48, 64), *fell_silent, stands_still), 4)
    assert judge(outcome).why == ()
    (lost,) = told(outcome, v.ReplicaLost)
    ended = {e.request for e in told(outcome, v.RequestEnded) if e.finish == "error"}
    late = [e for e in told(outcome, v.StreamJudged) if e.request in ended]
    assert late and all(e.decision.startswith(lost.replica) and e.finished for e in late)


def test_preempted_streams_of_a_full_engine_are_not_stuck() -> None:
    """Each is silent for seconds while its engine makes steps."""
    small = structs.replace(host_types.spec("tiny", "cpu"), kv_blocks=300)
    outcome = run(scenario((800, 1200), clients=60), 5, settings=Settings(spec=small))
    silent: dict[tuple[str, int], int] = {}
    longest_ms = 0
    for at in events_of(outcome.groups):
        for change in at.event.changes if type(at.event) is v.EngineStep else ():
            of = change.request, change.attempt
            if type(change) is v.RequestPreempted:
                silent[of] = at.at_ms
            elif type(change) is v.FirstToken and of in silent:
                longest_ms = max(longest_ms, at.at_ms - silent.pop(of))
    assert longest_ms > 3000, "the test is about streams that are silent for longer than the bound"
    assert told(outcome, v.StreamJudged) == []
    assert [e for e in told(outcome, v.RouteDecided) if e.attempt > 1] == []
