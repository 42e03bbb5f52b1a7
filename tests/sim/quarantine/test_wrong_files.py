"""A worker whose model files are damaged on disk stays in quarantine, although all its canaries are right."""

from __future__ import annotations

import pytest

from relume.chaos.outcome import Outcome
from relume.chaos.runner.judge import judge
from relume.chaos.scenario import scenario_reader
from relume.chaos.scenario.language import Scenario
from relume.chaos.sim.sim_fleet import run
from relume.chaos.sim.world.model_files import SimModelFiles
from relume.chaos.validators.records import events_of
from relume.controlplane.replay.verify import verify
from relume.engine_shim.agent.canaries.weights_digest import ModelDigest, Reading
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import HealthState, WeightsOutcome
from relume.policies.weights import comparison


def scenario() -> Scenario:
    return scenario_reader.load(scenario_reader.find("wrong-files"))


@pytest.fixture(scope="module")
def outcome() -> Outcome:
    return run(scenario(), 1)


def test_it_is_held_until_its_files_are_right(outcome: Outcome) -> None:
    verdict = judge(outcome)
    assert (verdict.result, verdict.why) == ("passed", ())
    events = list(events_of(outcome.groups))
    compared = [at for at in events if type(at.event) is v.WeightsCompared]
    assert [at.event.outcome for at in compared] == [WeightsOutcome.DIFFERENT, WeightsOutcome.SAME]
    assert {at.event.worker for at in compared} == {"w1"}
    assert compared[0].event.witnesses == compared[1].event.witnesses == ("w0", "w2", "w3")
    assert compared[0].event.files == ("model.safetensors",)
    states = [at for at in events if type(at.event) is v.HealthDecided and at.event.worker == "w1"]
    released = [at for at in states if at.event.state == HealthState.PROBING]
    assert [at.event.incarnation for at in released] == [3], "the engine with the right files"
    assert released[0].at_ms >= compared[1].at_ms
    wrong = [
        at.event
        for at in events
        if type(at.event) is v.CanaryReported and at.event.worker == "w1" and at.event.incarnation == 2
    ]  # fmt: skip
    assert len(wrong) > 8, "its canaries were right all the time"


def test_healthy_workers_read_their_files_once(outcome: Outcome) -> None:
    digests = [at.event for at in events_of(outcome.groups) if type(at.event) is v.WeightsDigested]
    by_worker = {
        name: [e for e in digests if e.worker == name] for name in ("w0", "w1", "w2", "w3")
    }
    assert [len(by_worker[name]) for name in ("w0", "w1", "w2", "w3")] == [1, 3, 1, 1]
    assert all(event.reread for event in digests), "in quarantine nothing that is remembered counts"


def test_replay_compares_again(outcome: Outcome, monkeypatch: pytest.MonkeyPatch) -> None:
    assert verify(outcome.groups).divergences == []
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "is_held", lambda worker, health: False)
        released = verify(outcome.groups).divergences
    assert any("PROBING" in str(found.expected) + str(found.actual) for found in released), released
    with monkeypatch.context() as patch:
        patch.setattr(comparison, "_different", lambda *given: ())
        other = verify(outcome.groups).divergences
    assert any("WeightsCompared" in str(found.actual) for found in other), other


def test_a_digest_that_overlooks_the_damage_breaks_a_promise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one of the beginnings of files would."""

    async def overlooks(self: SimModelFiles, anew: bool, reading: Reading) -> ModelDigest:
        return ModelDigest(
            digest=self._files.short, files=(), size_bytes=reading.done_bytes, reread=True
        )

    monkeypatch.setattr(SimModelFiles, "read", overlooks)
    verdict = judge(run(scenario(), 1))
    assert verdict.result == "failed"
    texts = [str(one) for one in verdict.violations]
    assert any("its files are damaged, and have the digest" in text for text in texts), texts


def test_a_leader_that_does_not_compare_breaks_a_promise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparison, "is_held", lambda worker, health: False)
    verdict = judge(run(scenario(), 1))
    assert verdict.result == "failed"
    texts = [str(one) for one in verdict.violations]
    assert any("it is released, although" in text for text in texts), texts
