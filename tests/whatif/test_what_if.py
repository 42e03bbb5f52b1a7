"""What-if with its continuation: on a log of real engines, and round trips through simulations."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from relume.chaos.runner.run_statistics import quantile, real
from relume.chaos.scenario.language import (
    Burst,
    Fault,
    Fixed,
    Fleet,
    Poisson,
    Scenario,
    Traffic,
    Uniform,
    When,
)
from relume.chaos.sim.engine.step_cost import load
from relume.chaos.sim.sim_fleet import Settings, run
from relume.chaos.validators.records import Log, events_of
from relume.chaos.whatif import asking, facts
from relume.chaos.whatif.__main__ import main
from relume.chaos.whatif.asking import Answer, Continuation, ask
from relume.chaos.whatif.costs import NoCost, PacedStepCost, cost_of, off_by, paces
from relume.chaos.whatif.facts import Facts
from relume.chaos.whatif.outcome_statistics import of_run
from relume.chaos.whatif.start import Start
from relume.controlplane.cli.relume_command import main as relume
from relume.controlplane.replay.recorded_log import History, from_file
from relume.controlplane.replay.what_if import parse, what_if
from relume.controlplane.replica.loop import ReplicaConfig
from relume.events import vocabulary as v
from relume.events.log.entries import Entry
from relume.policies.routing import choose_worker as routing
from relume.policies.state.fleet import Fleet as Fold
from relume.policies.state.fold import apply_group

KILLED = Path(__file__).parents[1] / "replay" / "logs" / "engine-killed.rlog"
SKEWED = Scenario(
    name="skewed",
    about="Prompts of very different lengths, nearly more than three workers can take.",
    fleet=Fleet(workers=3, model="qwen3-32b", hardware="rtxpro6000x2"),
    traffic=Traffic(arrivals=Poisson(2.5), lengths=Uniform((50, 16_000), (20, 60)), requests=120),
)
STRUCK = Scenario(
    name="struck",
    about="An engine dies among others that hold its blocks.",
    fleet=Fleet(workers=4, domains=4, checkpoint_mb=256),
    traffic=Traffic(arrivals=Poisson(40.0), lengths=Uniform((64, 600), (50, 300)), requests=220),
    faults=(Fault(what="engine-kill", when=When(at_s=4.0), target="w1"),),
)


def simulated(scenario: Scenario, policy: str = "least_load", seed: int = 3) -> Any:
    outcome = run(scenario, seed, settings=Settings(replica=ReplicaConfig(policy=policy)))
    assert not outcome.error
    return outcome


def history_of(outcome: Any) -> History:
    return History(groups=list(outcome.groups), origin="simulated")


@pytest.fixture(scope="module")
def struck() -> History:
    return history_of(simulated(STRUCK))


def continued(answer: Answer) -> Continuation:
    assert answer.continuation is not None
    assert answer.continuation.errors == ()
    return answer.continuation


def log_of(*events: tuple[str, int, Any]) -> list[Entry]:
    return [
        Entry(index=0, revision=i, stream=stream, epoch=1, position=i, at_ms=ms, event=event)
        for i, (stream, ms, event) in enumerate(events, 1)
    ]


# --- round trips -----------------------------------------------------------------------------


@pytest.mark.full
def test_the_effect_of_a_policy_is_foretold_as_it_comes_true() -> None:
    """Round robin's log says what least load would have given: a run under it agrees, and the
    continuation under the recorded policy is the recorded run."""
    recorded = simulated(SKEWED, "round_robin", 6)
    told = continued(ask(history_of(recorded), parse(["policy=least_load"])))
    assert told.agreement.judged == "close"
    assert told.agreement.same_worker == 1.0
    off = told.agreement.off
    assert abs(off["ttft_ms_mean"] or 1) < 0.05 and abs(off["makespan_s"] or 1) < 0.02
    change = told.changes["ttft_ms_p99"]
    assert change is not None and change < -0.2
    truly = [p99(outcome) for outcome in (recorded, simulated(SKEWED, "least_load", 6))]
    assert change == pytest.approx(truly[1] / truly[0] - 1, abs=0.05)
    assert told.most_changed[0].changed_ms < told.most_changed[0].recorded_ms


def p99(outcome: Any) -> float:
    ttft = [h.first_ns - h.sent_ns for h in real(outcome) if h.first_ns is not None]
    return quantile(ttft, 0.99) or 0.0


@pytest.mark.full
def test_a_recovery_without_checkpoints_takes_longer(struck: History) -> None:
    told = continued(ask(struck, parse(["checkpoints.recovery=recompute"])))
    fit = told.agreement
    assert fit.judged == "close"
    assert fit.real.recoveries == fit.simulated.recoveries > 3
    assert fit.real.broken == fit.simulated.broken == told.changed.broken == 0
    assert [f.split(" at ")[0] for f in told.begun.faults] == ["engine-kill w1"]
    assert told.begun.live > 20
    assert told.begun.live + told.begun.coming == told.recorded.requests
    recomputed = told.changes["recovery_ms_mean"]
    assert recomputed is not None and recomputed > 0.5


@pytest.fixture
def simulations(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Start]]:
    """What is simulated: outcomes and their starts, first with recorded settings."""
    found: list[tuple[Any, Start]] = []

    def kept(outcome: Any, start: Start, known: facts.Read) -> Any:
        found.append((outcome, start))
        return of_run(outcome, start, known)

    monkeypatch.setattr(asking, "of_run", kept)
    return found


@pytest.mark.full
def test_an_engine_that_was_down_comes_back_when_it_did(
    struck: History, simulations: list[tuple[Any, Start]]
) -> None:
    """Settings that change while an engine loads: it takes nothing until it is there again."""
    events = list(events_of(Log(struck.groups)))
    (died,) = [at for at in events if type(at.event) is v.EngineDied]
    (again,) = [
        at for at in events if type(at.event) is v.EngineReady and at.event.incarnation == 2
    ]
    answer = ask(struck, parse(["policy=round_robin"]), since=died.revision + 20)
    told = continued(answer)
    assert told.begun.revision < again.revision
    assert told.begun.down == ("w1",)
    assert told.begun.faults == ()
    assert told.agreement.judged == "close"
    outcome, start = simulations[0]
    ready_ms = [
        at.at_ms - outcome.began_ms
        for at in events_of(Log(outcome.groups))
        if type(at.event) is v.EngineReady and at.event.incarnation == 2
    ]
    assert ready_ms == [pytest.approx(again.at_ms - start.at_ms, abs=700)]


@pytest.mark.full
def test_the_same_question_has_the_same_answer(struck: History) -> None:
    words = parse(["checkpoints.recovery=recompute"])
    assert ask(struck, words) == ask(struck, words)
    assert routing.RECORDED.keys() == {*routing.POLICIES, "planned"}


@pytest.mark.full
def test_a_log_behind_a_snapshot(struck: History, simulations: list[tuple[Any, Start]]) -> None:
    """Requests that only the snapshot knows go on too."""
    words = parse(["checkpoints.recovery=recompute"])
    revision = continued(ask(struck, words)).begun.revision + 10
    base = Fold()
    for group in struck.groups:
        if group.revision < revision:
            apply_group(base, group)
    later = [group for group in struck.groups if group.revision >= revision]
    told = continued(ask(History(groups=later, origin="later", base=base), words))
    assert told.agreement.judged in ("close", "rough")
    assert told.recorded.broken == 0
    _, start = simulations[-1]
    assert len(base.requests) > 20
    assert base.requests.keys() <= start.made.keys()


def test_commands_of_operators_are_given_again(simulations: list[tuple[Any, Start]]) -> None:
    """What operators commanded in the log they command in the continuation."""
    scenario = Scenario(
        name="drained", about="An operator drains workers.", fleet=Fleet(workers=3, domains=3, checkpoint_mb=128),
        traffic=Traffic(arrivals=Burst(6, 0.4), lengths=Fixed(200, 200), requests=60),
        faults=(Fault(what="agent-kill", when=When(during="effect", nth=3), target="subject"),),
    )  # fmt: skip
    history = history_of(simulated(scenario))
    told = continued(ask(history, parse(["policy=round_robin"])))
    assert told.agreement.simulated.broken == 0
    assert told.agreement.judged in ("close", "rough")
    outcome, start = simulations[0]
    given = [command(at) for at in events_of(Log(outcome.groups)) if command(at)]
    asked = [command(at) for at in events_of(Log(history.groups)) if command(at)]
    assert len(given) > 5 and given == asked[-len(start.commands) :][: len(given)]


def command(at: Entry) -> tuple[str, str] | None:
    event = at.event
    return (event.command, event.target) if type(event) is v.AdminCommanded else None


# --- real engines ----------------------------------------------------------------------------


def test_a_log_of_real_engines_continues() -> None:
    history = from_file(KILLED)
    words = parse(["policy=round_robin"])
    told = continued(ask(history, words))
    first = what_if(history, words).first
    assert first is not None and told.begun.faults[0].startswith("engine-kill w0")
    assert told.begun.live + told.begun.coming == 56 == told.recorded.requests
    assert "its own recorded pace" in told.cost
    assert told.agreement.real.recoveries == told.agreement.simulated.recoveries == 14
    assert abs(told.agreement.off["makespan_s"] or 1) < 0.3
    assert abs(told.agreement.off["tpot_ms_mean"] or 1) < 0.3
    assert told.telling is not None


@pytest.mark.full
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(KILLED), "checkpoint-recovery=recompute", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["first"]["kind"] == "plan"
    assert told["continuation"]["changes"]["recovery_ms_mean"] > 0.5
    assert main([str(KILLED), "checkpoint-recovery=recompute"]) == 1
    text = capsys.readouterr().out
    for line in ("TTFT p99", "how far to trust it", "what happened", "from there"):
        assert line in text
    assert main([str(KILLED), "policy=round_robin"]) == 1
    assert "changed most" in capsys.readouterr().out
    assert main([str(KILLED), "checkpoints.recovery=least_total"]) == 0
    assert "no decision in this log" in capsys.readouterr().out
    assert main([str(KILLED), "nonsense=1"]) == 2
    assert main([str(KILLED), "policy=round_robin", "--cost", "nonsense"]) == 2
    assert "tiny_cpu" in capsys.readouterr().err
    broken = tmp_path / "x.rlog"
    broken.write_bytes(b"x")
    assert main([str(broken), "policy=round_robin"]) == 2


def test_the_debugger_names_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert relume(["replay", "--what-if", "policy=round_robin", "--log", str(KILLED)]) == 1
    assert f"relume-chaos what-if {KILLED} policy=round_robin" in capsys.readouterr().out


# --- parts -----------------------------------------------------------------------------------


def test_tokens_lie_evenly_between_what_is_known() -> None:
    one = Facts(request="q", arrived_ms=1000, points=[(1200, 1), (2200, 101)], first_ms=1200)
    assert [one.tokens_at(ms) for ms in (900, 1100, 1200, 1700, 2200, 9000)] == [
        0, 0, 1, 51, 101, 101,
    ]  # fmt: skip


def test_an_engines_word_may_come_before_the_gateways() -> None:
    route = v.RouteDecided(
        decision="d",
        basis=v.Basis(1, 1),
        request="q",
        attempt=1,
        cause="arrival",
        mode="new",
        delivered=0,
        prompt_tokens=90,
        worker="w0",
        incarnation=1,
        policy="least_load",
        model="m",
    )
    queued = v.RequestQueued("q", 1, 100)
    step = v.EngineStep(
        incarnation=1,
        step=1,
        duration_us=10,
        batch=0,
        sum_context=0,
        prefill_tokens=100,
        waiting=0,
        kv_used=5,
        changes=(queued, v.FirstToken("q", 1)),
    )
    arrived = v.RequestArrived(
        request="q",
        model="m",
        route="/",
        stream=True,
        prompt_tokens=90,
        max_tokens=50,
        verdict="exact",
    )
    late = v.RequestArrived(
        request="z",
        model="m",
        route="/",
        stream=True,
        prompt_tokens=90,
        max_tokens=50,
        verdict="exact",
    )
    events = log_of(("w.w0", 5, step), ("r.r0", 9, arrived), ("r.r0", 9, route), ("r.r0", 10, late))
    known = facts.read(events, 3, 10, 3)
    assert known.live.keys() == {"q"}
    assert known.facts["q"].prompt == 100 and known.facts["q"].first_ms == 5
    assert known.facts["q"].arrived_ms == 5
    assert facts.read(events, 1, 9, 1).live == {}, "its gateway has yet to say so"


def steps(took_us: int, gap_ms: int, count: int = 40) -> list[Entry]:
    """Steps one by one of a worker that has always something to do."""
    found = []
    for n in range(count):
        prompt = 256 if n % 4 == 0 else 0
        batch = 3 + n % 3
        event = v.EngineStep(
            incarnation=1,
            step=n + 1,
            duration_us=took_us,
            batch=batch,
            sum_context=100 * batch,
            prefill_tokens=prompt + n * (n % 4 == 0),
            waiting=1,
            kv_used=5,
        )
        found.append(("w.w0", n * (took_us // 1000 + gap_ms), event))
    return log_of(*found)


def test_a_worker_keeps_its_own_pace() -> None:
    cost = load("tiny_cpu")
    slow = steps(40_000, 10)
    (paced,) = paces(slow, cost).values()
    assert paced.pace[2] == pytest.approx(10_000, rel=0.05)
    assert paced.decode(4, 400)[0] == pytest.approx(50e6, rel=0.05)
    assert paced.step([(256, 0)], 4, 400) == pytest.approx(50e6, rel=0.05)
    merged = [replace(at, event=replace(at.event, step=at.event.step * 7)) for at in slow]
    assert paces(merged, cost) == {}


def test_costs_come_from_the_log_where_the_known_formula_does_not_fit() -> None:
    slow = [at.event for at in steps(90_000, 0)]
    own, source = cost_of(slow, "tiny")
    assert "fitted to 40 steps" in source and off_by(own, slow) < 0.05
    known, source = cost_of(slow, "tiny", "tiny_cpu")
    assert source == "tiny_cpu" and off_by(known, slow) > 1
    assert not isinstance(own, PacedStepCost)
    with pytest.raises(NoCost, match="--cost"):
        cost_of([], "a model nobody knows")
