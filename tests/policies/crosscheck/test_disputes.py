"""What follows from answers that differ."""

from __future__ import annotations

import pytest
from msgspec import UNSET

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind, FailureClass, HealthState
from relume.policies.crosscheck import disputes
from relume.policies.crosscheck.disputes import DOUBT_TICKS
from relume.policies.leader.duties import step
from relume.policies.state.fleet import state_hash
from tests.policies.crosscheck.checked_fleet import OTHER, RIGHT, WRONG, CheckedFleet
from tests.policies.health.led_fleet import folded_again
from tests.policies.health.test_canaries import all_report, reports, restarted

HEALTHY, SUSPECT, QUARANTINED = HealthState.HEALTHY, HealthState.SUSPECT, HealthState.QUARANTINED


def states(fleet: CheckedFleet) -> list[HealthState]:
    return [fleet.state(name) for name in fleet.fleet.workers]


def dispute(fleet: CheckedFleet, request: str, *, served: str, wrong: str, third: str) -> None:
    """w0, w1 and w2 are heard on a request, and `wrong` computes wrong results."""
    finished = fleet.finished(served, request)
    said = dict.fromkeys(("w0", "w1", "w2"), RIGHT if wrong != served else WRONG)
    said[wrong] = WRONG if wrong != served else RIGHT  # `finished.answer` is RIGHT in any case
    (second,) = {"w0", "w1", "w2"} - {served, third}
    for name in (second, served, third):
        fleet.checks(finished, name, said[name])


def test_equal_answers_say_nothing() -> None:
    fleet = CheckedFleet()
    fleet.checks(fleet.finished("w0"), "w1")
    assert states(fleet) == [HEALTHY] * 3 and fleet.decisions == []


def test_a_difference_makes_suspects_of_both() -> None:
    fleet = CheckedFleet()
    fleet.checks(fleet.finished("w0", "a"), "w1", WRONG)
    assert states(fleet) == [SUSPECT, SUSPECT, HEALTHY]
    health = fleet.health("w1")
    assert health.failure == FailureClass.CORRUPTION
    assert health.evidence == "it and another engine answer differently: a"


def test_their_canaries_are_due_at_once() -> None:
    fleet = CheckedFleet()
    event = fleet.checks(fleet.finished("w0", "a"), "w1", WRONG)
    (effects,) = step(fleet.fleet, event)
    assert effects.decision == f"dispute.{event.decision}"
    kinds = [(effect.worker, effect.incarnation, effect.kind) for effect in effects.effects]
    assert kinds == [("w0", 1, EffectKind.CANARY), ("w1", 1, EffectKind.CANARY)]
    again = fleet.checks(fleet.finished("w0", "a"), "w0", RIGHT)
    assert step(fleet.fleet, again) == [], "once per dispute"


def test_canaries_are_not_hurried_by_every_dispute() -> None:
    """Those of a worker without doubt are, by the first one."""
    fleet = CheckedFleet()

    def hurried(request: str, by: str) -> list[str]:
        owed = step(fleet.fleet, fleet.checks(fleet.finished("w0", request), by, WRONG))
        return [x.worker for e in owed if type(e) is v.EffectsDecided for x in e.effects]

    assert hurried("a", "w1") == ["w0", "w1"]
    fleet.ticks(disputes.HURRY_TICKS - 1)
    assert hurried("b", "w1") == []
    assert hurried("c", "w2") == ["w2"]
    fleet.ticks(1)
    assert hurried("d", "w1") == ["w0", "w1"]


def test_a_worker_that_agrees_when_it_answers_again_is_in_no_doubt() -> None:
    """A full batch can change an answer, where kernels depend on it."""
    fleet = CheckedFleet()
    finished = fleet.finished("w0", "a")
    fleet.checks(finished, "w1", OTHER)
    fleet.checks(finished, "w0", OTHER)
    assert states(fleet) == [HEALTHY] * 3
    assert fleet.fleet.disputes == {}


def test_a_worker_that_gives_a_third_answer_stays_in_doubt() -> None:
    """Its first one may have begun with blocks from before its weights changed."""
    fleet = CheckedFleet()
    finished = fleet.finished("w0", "a")
    fleet.checks(finished, "w1", OTHER)
    fleet.checks(finished, "w0", WRONG)
    assert states(fleet) == [SUSPECT, SUSPECT, HEALTHY]
    fleet.checks(finished, "w2", OTHER)
    assert disputes.record_of(fleet.fleet.workers["w0"]).outvoted == {"a": fleet.fleet.tick}
    assert states(fleet) == [SUSPECT, HEALTHY, HEALTHY]


@pytest.mark.parametrize("served", ["w0", "w1", "w2"])
def test_who_is_outvoted_twice_is_quarantined(served: str) -> None:
    fleet = CheckedFleet()
    others = [name for name in ("w0", "w1", "w2") if name != served]
    wrong = "w1"
    for request in ("a", "b"):
        third = others[0] if others[0] != wrong or served == wrong else others[1]
        dispute(fleet, request, served=served, wrong=wrong, third=third)
    assert fleet.state(wrong) == QUARANTINED
    assert [fleet.state(name) for name in ("w0", "w2")] == [HEALTHY, HEALTHY]
    health = fleet.health(wrong)
    assert (
        health.evidence == "its answers to 2 requests (a, b) differ from what most engines answer"
    )
    (verdict,) = [e for e in fleet.decisions if e.state == QUARANTINED]
    assert verdict.good_tick == -1, "nothing says when it began"
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


def test_one_request_is_not_enough() -> None:
    fleet = CheckedFleet()
    for _ in range(3):
        dispute(fleet, "a", served="w0", wrong="w1", third="w2")
    assert states(fleet) == [HEALTHY, SUSPECT, HEALTHY]
    fleet.set("confirm", 1)
    dispute(fleet, "a", served="w0", wrong="w1", third="w2")
    assert fleet.state("w1") == QUARANTINED


def test_the_quarantined_engine_is_restarted() -> None:
    fleet = CheckedFleet()
    fleet.set("confirm", 1)
    dispute(fleet, "a", served="w0", wrong="w1", third="w2")
    (verdict,) = [e for e in fleet.decisions if e.state == QUARANTINED]
    (effects,) = step(fleet.fleet, verdict)
    assert [(e.worker, e.kind) for e in effects.effects] == [("w1", EffectKind.RESTART)]
    assert effects.cause == "most engines contradict its answers"
    all_report(fleet)
    restarted(fleet, "w1", 2)
    for _ in range(2):
        all_report(fleet, "w1")
    assert fleet.state("w1") == HealthState.PROBING
    all_report(fleet, "w1")
    assert fleet.state("w1") == HEALTHY, "what the engine before it answered is forgotten"


def test_right_canaries_end_a_doubt_but_not_what_a_majority_said() -> None:
    fleet = CheckedFleet()
    all_report(fleet)
    fleet.checks(fleet.finished("w0", "a"), "w1", WRONG)
    reports(fleet, "w0", 0)
    assert fleet.state("w0") == SUSPECT, "there are two canaries"
    reports(fleet, "w0", 1)
    assert states(fleet) == [HEALTHY, SUSPECT, HEALTHY]
    fleet.checks(fleet.finished("w0", "a"), "w0", RIGHT)
    fleet.checks(fleet.finished("w0", "a"), "w2", RIGHT)
    all_report(fleet, "w1")
    assert fleet.state("w1") == SUSPECT and disputes.record_of(fleet.fleet.workers["w1"]).outvoted


def test_a_wrong_canary_decides() -> None:
    fleet = CheckedFleet()
    all_report(fleet)
    fleet.checks(fleet.finished("w0", "a"), "w1", WRONG)
    for canary in (0, 1):
        reports(fleet, "w1", canary, tokens=(1, 2, 3))
        reports(fleet, "w0", canary)
    assert states(fleet) == [HEALTHY, QUARANTINED, HEALTHY]


def test_a_dispute_that_nothing_decides_is_forgotten() -> None:
    fleet = CheckedFleet(workers=2)
    finished = fleet.finished("w0", "a")
    fleet.checks(finished, "w1", WRONG)
    fleet.checks(finished, "w0", RIGHT)
    fleet.ticks(DOUBT_TICKS)
    assert states(fleet) == [SUSPECT, SUSPECT]
    fleet.ticks(2)
    assert states(fleet) == [HEALTHY, HEALTHY] and fleet.fleet.disputes is UNSET


def test_an_outvote_is_remembered_but_no_doubt_for_ever() -> None:
    fleet = CheckedFleet()
    dispute(fleet, "a", served="w0", wrong="w1", third="w2")
    assert fleet.state("w1") == SUSPECT
    fleet.ticks(DOUBT_TICKS + 1)
    assert fleet.state("w1") == HEALTHY
    dispute(fleet, "b", served="w0", wrong="w1", third="w2")
    assert fleet.state("w1") == QUARANTINED


def test_five_engines_without_a_majority_end_it() -> None:
    fleet = CheckedFleet(workers=6)
    finished = fleet.finished("w0", "a")
    answers = {"w1": WRONG, "w0": RIGHT, "w2": OTHER, "w3": WRONG}
    for name, answer in answers.items():
        fleet.checks(finished, name, answer)
    assert len(fleet.fleet.disputes["a"].others) == 3, "two of four are no majority"
    fleet.checks(finished, "w4", OTHER)
    assert "a" not in fleet.fleet.disputes
    assert not any(
        (record := disputes.record_of(worker)) is not None and record.outvoted
        for worker in fleet.fleet.workers.values()
    )


def test_an_operator_can_trust_a_worker_that_was_outvoted() -> None:
    fleet = CheckedFleet()
    fleet.set("confirm", 1)
    dispute(fleet, "a", served="w0", wrong="w1", third="w2")
    assert fleet.state("w1") == QUARANTINED
    fleet.tell(
        "r.r0",
        v.AdminCommanded(command_id="c", principal="ann", command="trust", target="w1"),
    )
    assert fleet.state("w1") == HealthState.PROBING


def test_an_answer_that_did_not_come_says_nothing() -> None:
    fleet = CheckedFleet()
    fleet.end(fleet.begin(fleet.finished("w0", "a"), "w1"), error="status 500")
    assert states(fleet) == [HEALTHY] * 3
    fleet.checks(fleet.finished("w0", "b"), "w1", WRONG)
    fleet.end(fleet.begin(fleet.finished("w0", "b"), "w0"), error="no answer within 30 s")
    assert fleet.fleet.disputes["b"].again is None


def test_leaders_of_earlier_versions_decide_nothing_by_it() -> None:
    fleet = CheckedFleet(version=4)
    event = fleet.checks(fleet.finished("w0", "a"), "w1", WRONG)
    assert states(fleet) == [HEALTHY] * 3
    assert step(fleet.fleet, event) == []


def test_what_is_stored_has_bounds() -> None:
    fleet = CheckedFleet(workers=2)
    for number in range(100):
        fleet.checks(fleet.finished("w0", f"q{number}"), "w1", WRONG)
    assert len(fleet.fleet.disputes) == disputes.MOST_DISPUTES
    assert len(disputes.record_of(fleet.fleet.workers["w0"]).disputed) == disputes.MOST_REQUESTS
