"""Simulated fleets with two models: each request is served by a worker of the one that it names."""

from __future__ import annotations

import pytest

from relume.chaos.outcome import Outcome
from relume.chaos.runner.judge import judge
from relume.chaos.scenario import scenario_reader
from relume.chaos.sim.sim_fleet import run
from relume.chaos.validators.records import events_of
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind


def passed(name: str) -> Outcome:
    outcome = run(scenario_reader.load(scenario_reader.find(name)), 1)
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    assert not verify(outcome.groups).divergences
    return outcome


@pytest.mark.full
def test_each_model_has_its_workers_and_keeps_one_open() -> None:
    outcome = passed("all-drained")
    assert outcome.truth is not None
    events = [at.event for at in events_of(outcome.groups)]
    models = {event.request: event.model for event in events if type(event) is v.RequestArrived}
    sent = {(e.worker, models[e.request]) for e in events if type(e) is v.RouteDecided}
    assert sent == {(f"w{n}", "second" if n > 2 else "tiny") for n in range(5)}
    called = {call.model for call in outcome.truth.calls.values()}
    assert called == {*models.values()} == {"tiny", "second"}
    drained = [
        effect.worker
        for event in events
        if type(event) is v.EffectsDecided and event.again < 0
        for effect in event.effects
        if effect.kind == EffectKind.DRAIN
    ]
    assert drained == ["w0", "w1", "w3"] * 2


@pytest.mark.full
def test_a_trusted_worker_waits_for_the_operator_again_after_its_next_unreadable_record() -> None:
    outcome = passed("trusted-again")
    sent = [at for at in events_of(outcome.groups) if type(at.event) is v.RouteDecided]
    at_ms = [at.at_ms - outcome.began_ms for at in sent if at.event.worker == "w1"]
    first, second = (fault.at_ns // 1_000_000 for fault in outcome.fired)
    assert any(first + 500 < ms < second for ms in at_ms), "the operator trusted it"
    assert not any(second + 500 < ms for ms in at_ms)
