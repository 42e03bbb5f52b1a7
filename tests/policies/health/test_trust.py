"""An operator ends a quarantine: who may be trusted, and how long that lasts."""

from __future__ import annotations

from typing import Any

from msgspec import UNSET

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import AdminCommand, FailureClass, HealthState
from relume.policies.leader.duties import step
from relume.policies.state.fleet import state_hash
from tests.policies.health.led_fleet import LedFleet, folded_again
from tests.policies.health.test_canaries import RIGHT, all_report, reports
from tests.policies.story import Story, died


def quarantined() -> LedFleet:
    """w1 answered two canaries wrongly."""
    fleet = LedFleet(workers=3)
    all_report(fleet)
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(1, 2, 3))
    assert fleet.state("w1") == HealthState.QUARANTINED
    return fleet


def commanded(worker: str = "w1", name: str = "alice:1") -> v.AdminCommanded:
    return v.AdminCommanded(
        command_id=name, principal="alice", command=AdminCommand.TRUST, target=worker, value=""
    )


def trust(fleet: LedFleet, worker: str = "w1") -> list[Any]:
    """The leader's answer."""
    command = commanded(worker)
    Story.tell(fleet, "r.r0", command)
    owed = step(fleet.fleet, command)
    fleet.decisions += (decided := [e for e in owed if type(e) is v.HealthDecided])
    fleet.tell("fleet", *owed)
    return [e for e in owed if e not in decided]


def test_a_trusted_worker_is_probed_and_right_answers_make_it_healthy() -> None:
    fleet = quarantined()
    (answer,) = trust(fleet)
    assert type(answer) is v.EffectsDecided and answer.decision == "alice:1"
    assert answer.effects == ()
    decided = fleet.decisions[-1]
    assert (decided.worker, decided.state) == ("w1", HealthState.PROBING)
    assert decided.failure == FailureClass.CORRUPTION and "alice" in decided.evidence
    assert fleet.health("w1").released_by is UNSET and fleet.health("w1").quarantined is UNSET
    for canary in RIGHT:
        reports(fleet, "w1", canary)
    assert fleet.state("w1") == HealthState.HEALTHY
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


def test_one_wrong_answer_of_a_trusted_worker_quarantines_it_again() -> None:
    fleet = quarantined()
    trust(fleet)
    reports(fleet, "w1", 0, tokens=(1, 2, 3))
    assert fleet.state("w1") == HealthState.QUARANTINED


def test_only_a_quarantined_worker_whose_engine_serves_can_be_trusted() -> None:
    fleet = quarantined()
    (answer,) = trust(fleet, "w0")
    assert answer == v.ConfigChanged("", "w0 is not quarantined, it is healthy", "alice:1")
    fleet = quarantined()
    (answer,) = trust(fleet, "w9")
    assert answer == v.ConfigChanged("", "nothing to trust: w9", "alice:1")
    fleet = quarantined()
    fleet.tell("w.w1", died("w1"))
    (answer,) = trust(fleet)
    why = "the engine of w1 is not ready; try again when it is"
    assert answer == v.ConfigChanged("", why, "alice:1")
    assert fleet.state("w1") == HealthState.QUARANTINED


def test_a_command_without_a_leader_is_carried_out_by_the_next_one() -> None:
    fleet = quarantined()
    fleet.tell("fleet", v.LeaderResigned("r0", "asked"))
    fleet.tell("r.r0", commanded())
    fleet.leader("r0")
    assert fleet.state("w1") == HealthState.PROBING
