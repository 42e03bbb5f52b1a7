"""Canaries: golden values by the majority of a class, and quarantine for wrong answers."""

from __future__ import annotations

from math import nan
from typing import Any

import pytest
from msgspec import UNSET

from relume.engine_shim.canary_prompts import COUNT
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind, FailureClass, HealthState
from relume.policies.canary import canary_settings
from relume.policies.canary.answers import MOST_CLASSES
from relume.policies.canary.canary_state import CanaryAnswer, CanaryValues
from relume.policies.canary.comparison import difference
from relume.policies.leader.duties import step
from relume.policies.state.fleet import state_hash
from tests.policies.health.led_fleet import LedFleet, folded_again
from tests.policies.story import (
    arrived,
    decided,
    died,
    engine_step,
    finished,
    queued,
    ready,
    started,
)

RIGHT = {0: ((5, 6, 7), (-0.1, -3.0, -0.2, -2.5, -0.3, -2.0)),
         1: ((8, 9, 8), (-0.5, -1.0, -0.6, -1.1, -0.7, -1.2))}  # fmt: skip
ALMOST = (-0.1, -3.0, -0.2, -2.5, -0.3000001, -2.0)


def reports(
    fleet: LedFleet,
    worker: str,
    canary: int = 0,
    tokens: tuple[int, ...] = (),
    logprobs: tuple[float, ...] = (),
    exact: bool = True,
    alone: bool = True,
    took_us: int = 20_000,
    **more: Any,
) -> None:
    """The worker answers a canary, rightly unless the answer is given."""
    event = v.CanaryReported(
        worker=worker,
        incarnation=fleet.fleet.workers[worker].incarnation,
        canary=canary,
        prompts=1,
        tokens=tokens or RIGHT[canary][0],
        logprobs=logprobs or RIGHT[canary][1],
        took_us=took_us,
        alone=alone,
        exact=exact,
        **more,
    )
    fleet.tell(f"w.{worker}", event)


def wrong_answer(canary: int) -> v.CanaryReported:
    """Of the first engine of w1."""
    return v.CanaryReported(
        worker="w1", incarnation=1, canary=canary, prompts=1, tokens=(1, 2, 3),
        logprobs=RIGHT[canary][1], took_us=20_000, alone=True, exact=True,
    )  # fmt: skip


def all_report(fleet: LedFleet, *workers: str, **more: Any) -> None:
    for canary in RIGHT:
        for worker in workers or fleet.fleet.workers:
            reports(fleet, worker, canary, **more)


def restarted(fleet: LedFleet, worker: str, incarnation: int) -> None:
    fleet.tell(f"w.{worker}", died(worker, incarnation - 1))
    fleet.tell(f"w.{worker}", started(worker, incarnation), ready(worker, incarnation))


def test_golden_values_are_those_of_a_majority_with_two_witnesses() -> None:
    fleet = LedFleet(workers=3)
    reports(fleet, "w0", tokens=(1, 2, 3))
    reports(fleet, "w1")
    assert fleet.values == [], "one against one"
    reports(fleet, "w2")
    (values,) = fleet.values
    assert values.witnesses == ("w1", "w2") and values.workers == 3
    assert values.tokens == RIGHT[0][0] and values.low == values.high == RIGHT[0][1]
    assert values.version == 1 and values.exact


def test_a_worker_that_differed_before_there_was_a_majority_is_found_then() -> None:
    fleet = LedFleet(workers=3)
    for canary in RIGHT:
        reports(fleet, "w0", canary, tokens=(1, 2, 3))
    all_report(fleet, "w1", "w2")
    assert fleet.state("w0") == HealthState.QUARANTINED
    assert fleet.state("w1") == fleet.state("w2") == HealthState.HEALTHY


def test_logits_convict_where_tokens_are_equal() -> None:
    """One wrong canary makes a suspect, a second one a quarantine, dated to the last right answers."""
    fleet = LedFleet(workers=3)
    all_report(fleet)
    at = fleet.fleet.tick
    fleet.ticks(5)
    reports(fleet, "w1", 0)
    fleet.ticks(5)
    reports(fleet, "w1", 0, logprobs=ALMOST)
    assert fleet.state("w1") == HealthState.SUSPECT and fleet.excluded("w1") == ""
    reports(fleet, "w1", 1, tokens=(8, 9, 9), confirms=True)
    health = fleet.health("w1")
    assert (health.state, health.failure) == (HealthState.QUARANTINED, FailureClass.CORRUPTION)
    assert fleet.excluded("w1") == "quarantined"
    assert f"last right answers at tick {at}" in health.evidence
    assert "canaries 0, 1: token 3 is 9 instead of 8" in health.evidence
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


def test_right_answers_to_another_canary_do_not_date_a_verdict() -> None:
    """Corruption that only one prompt touches may be as old as its last right answer to that one."""
    fleet = LedFleet(workers=3)
    all_report(fleet)
    at = fleet.fleet.tick
    fleet.ticks(5)
    for _ in range(3):
        reports(fleet, "w1", 1)
        fleet.ticks(5)
        reports(fleet, "w1", 0, logprobs=ALMOST)
    (verdict,) = [e for e in fleet.decisions if e.state == HealthState.QUARANTINED]
    assert verdict.good_tick == at
    assert f"last right answers at tick {at}" in verdict.evidence


def test_a_worker_that_was_never_right_is_in_doubt_from_its_beginning() -> None:
    fleet = LedFleet(workers=3)
    all_report(fleet, "w0", "w2")
    reports(fleet, "w1", 0)
    for _ in range(3):
        reports(fleet, "w1", 1, tokens=(1, 2, 3))
    (verdict,) = [e for e in fleet.decisions if e.state == HealthState.QUARANTINED]
    assert verdict.good_tick == -1


def test_requests_of_a_quarantined_worker_are_in_doubt() -> None:
    """Also one of which its engine's end was folded before its dispatch."""
    fleet = LedFleet(workers=3)
    all_report(fleet)
    fleet.tell("r.r0", arrived("there"), decided("there", worker="w1"), arrived("elsewhere"))
    fleet.tell("r.r0", decided("elsewhere", worker="w0"))
    fleet.tell("w.w1", engine_step(queued("early"), v.FirstToken("early", 1), finished("early")))
    fleet.tell("r.r0", arrived("early"), decided("early", worker="w1"))
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(1, 2, 3))
    assert fleet.state("w1") == HealthState.QUARANTINED
    doubted = {name for name, one in fleet.fleet.requests.items() if one.doubted is True}
    assert doubted == {"there", "early"}


def test_a_mismatch_that_is_not_confirmed_is_forgiven_with_the_next_right_answer() -> None:
    fleet = LedFleet(workers=3)
    all_report(fleet)
    reports(fleet, "w1", 0, logprobs=ALMOST)
    reports(fleet, "w1", 1, confirms=True)
    assert fleet.state("w1") == HealthState.SUSPECT
    reports(fleet, "w1", 0)
    assert fleet.state("w1") == HealthState.HEALTHY


def test_bits_of_a_busy_engine_are_not_compared() -> None:
    """Its batch may use other kernels. What differs by more than the tolerance is wrong all the same."""
    fleet = LedFleet(workers=3)
    all_report(fleet)
    reports(fleet, "w1", 0, logprobs=ALMOST, alone=False)
    reports(fleet, "w1", 1, logprobs=(-0.50001, *RIGHT[1][1][1:]), alone=False, confirms=True)
    assert fleet.state("w1") == HealthState.HEALTHY
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(1, 2, 3), alone=False)
    assert fleet.state("w1") == HealthState.QUARANTINED


def test_busy_answers_are_no_part_of_exact_values() -> None:
    fleet = LedFleet(workers=4)
    for worker in fleet.fleet.workers:
        reports(fleet, worker, 1)
    fleet.values.clear()
    reports(fleet, "w0", logprobs=ALMOST, alone=False)
    reports(fleet, "w1")
    reports(fleet, "w2")
    (values,) = fleet.values
    assert not values.exact, "two exact ones are no majority of four"
    reports(fleet, "w3")
    (_, values) = fleet.values
    assert values.exact and values.witnesses == ("w1", "w2", "w3")
    assert values.low == values.high == RIGHT[0][1]


def test_exact_answers_replace_values_that_are_not_exact() -> None:
    """A witness without exact answers would hide small differences of its class for good."""
    fleet = LedFleet(workers=3)
    for worker in ("w0", "w1"):
        all_report(fleet, worker, exact=worker != "w0")
    all_report(fleet, "w2")
    assert [e.exact for e in fleet.values] == [False, False, True, True]
    for canary, logprobs in ((0, ALMOST), (1, (-0.5000001, *RIGHT[1][1][1:]))):
        reports(fleet, "w1", canary, logprobs=logprobs)
    assert fleet.state("w1") == HealthState.QUARANTINED
    assert len(fleet.values) == 4


def test_a_class_of_one_gets_exact_values_with_its_first_exact_answer() -> None:
    fleet = LedFleet(workers=1)
    reports(fleet, "w0", alone=False)
    reports(fleet, "w0", tokens=(1, 2, 3))
    assert [e.exact for e in fleet.values] == [False], "nor does a wrong one replace them"
    reports(fleet, "w0")
    assert [e.exact for e in fleet.values] == [False, True]


def test_one_canary_that_is_wrong_again_and_again_is_enough() -> None:
    """Corruption that the other prompts do not touch."""
    fleet = LedFleet(workers=3)
    all_report(fleet)
    for _ in range(3):
        assert fleet.state("w1") != HealthState.QUARANTINED
        reports(fleet, "w1", 0, logprobs=ALMOST)
        reports(fleet, "w1", 1)
    assert fleet.state("w1") == HealthState.QUARANTINED


def test_a_quarantine_outlives_a_restart_and_ends_with_right_answers() -> None:
    fleet = LedFleet(workers=3)
    all_report(fleet)
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(1, 2, 3))
    for _ in range(3):
        all_report(fleet, "w1")
    fleet.ticks(200)
    assert fleet.state("w1") == HealthState.QUARANTINED, "the same engine is not trusted again"
    restarted(fleet, "w1", 2)
    fleet.ticks(3)
    assert fleet.state("w1") == HealthState.QUARANTINED
    assert fleet.health("w1").failure == FailureClass.CORRUPTION
    all_report(fleet, "w1")
    assert fleet.state("w1") == HealthState.QUARANTINED
    all_report(fleet, "w1")
    assert fleet.state("w1") == HealthState.PROBING
    assert fleet.health("w1").failure == FailureClass.CORRUPTION
    all_report(fleet, "w1")
    assert fleet.state("w1") == HealthState.HEALTHY, "canaries are probes: no request is needed"
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


@pytest.mark.parametrize("version", [13, 14])
@pytest.mark.parametrize("next_started", [False, True])
def test_a_quarantine_outlives_an_engine_that_ends_before_it_is_in_the_log(
    version: int, next_started: bool
) -> None:
    """Composed 184157: the log took nothing for 14 s. Then it had at once that the answers of an engine
    were wrong, and that its agent had stopped it and left."""
    fleet = LedFleet(workers=3, version=version)
    all_report(fleet)
    both = map(wrong_answer, RIGHT)
    left = (died("w1"), v.WorkerDeregistered("w1", "agent stopped"))
    back = (v.WorkerRegistered(worker="w1", domain="d1", agent_pid=8), started("w1", 2))
    fleet.tell("w.w1", *both, *left, *(back if next_started else ()))
    if not next_started:
        fleet.tell("w.w1", *back)
    fleet.tell("w.w1", ready("w1", 2))
    fleet.ticks(3)
    outlives = version == 14
    assert fleet.state("w1") == (HealthState.QUARANTINED if outlives else HealthState.HEALTHY)
    for _ in range(3):
        all_report(fleet, "w1")
    assert fleet.state("w1") == HealthState.HEALTHY, "as after any quarantine"
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


@pytest.mark.parametrize("version", [8, 9, 10])
@pytest.mark.parametrize("weights", ["", "damaged"])
def test_the_next_engine_s_own_word_ends_no_quarantine(version: int, weights: str) -> None:
    """With other weights it is in a class of its own, whose golden values are its answers."""
    fleet = LedFleet(workers=3, version=version)
    all_report(fleet)
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(1, 2, 3))
    restarted(fleet, "w1", 2)
    wrong = {"tokens": (1, 2, 3), "weights": weights} if weights else {}
    for _ in range(4):
        all_report(fleet, "w1", **wrong)
    proven = version == 8 or not weights
    assert fleet.state("w1") == (HealthState.HEALTHY if proven else HealthState.QUARANTINED)
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)
    if not proven:  # until another engine has these weights too
        restarted(fleet, "w2", 2)
        all_report(fleet, "w2", **wrong)
        all_report(fleet, "w1", **wrong)
        assert fleet.state("w1") == HealthState.HEALTHY


@pytest.mark.parametrize("version", [9, 10])
def test_nor_does_that_of_the_engine_before(version: int) -> None:
    """The second engine with the damaged weights finds the golden values of the first one."""
    fleet = LedFleet(workers=3, version=version)
    all_report(fleet)
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(1, 2, 3))
    for incarnation in (2, 3, 4):
        fleet.ticks(1)
        restarted(fleet, "w1", incarnation)
        for _ in range(4):
            all_report(fleet, "w1", tokens=(1, 2, 3), weights="damaged")
    released = version == 9
    assert fleet.state("w1") == (HealthState.HEALTHY if released else HealthState.QUARANTINED)
    restarted(fleet, "w1", 5)
    for _ in range(4):
        all_report(fleet, "w1")
    assert fleet.state("w1") == HealthState.HEALTHY, "the weights of its class"
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


def test_its_own_word_of_before_the_quarantine_ends_it() -> None:
    """It is alone with these weights, returns to the ones it had, and answers as it did then."""
    fleet = LedFleet(workers=3)
    all_report(fleet, "w0", "w2")
    all_report(fleet, "w1", weights="former")
    fleet.ticks(1)
    restarted(fleet, "w1", 2)
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(1, 2, 3))
    assert fleet.state("w1") == HealthState.QUARANTINED
    restarted(fleet, "w1", 3)
    for _ in range(4):
        all_report(fleet, "w1", weights="former")
    assert fleet.state("w1") == HealthState.HEALTHY


@pytest.mark.parametrize("restart", (1, 0))
def test_the_engine_of_a_quarantined_worker_is_restarted_once(restart: int) -> None:
    fleet = LedFleet(workers=3)
    fleet.tell("fleet", v.ConfigChanged("canary.restart", str(restart)))
    all_report(fleet)
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(1, 2, 3))
    (verdict,) = [
        e
        for e in fleet.decisions
        if type(e) is v.HealthDecided and e.state == HealthState.QUARANTINED
    ]
    owed = step(fleet.fleet, verdict)
    effects = [effect for event in owed for effect in event.effects]
    assert effects == [v.Effect(EffectKind.RESTART, "w1", 1, "quarantined")] * restart
    again = step(fleet.fleet, v.LeaderElected("r0", "b1"))
    assert [e.decision for e in again if type(e) is v.EffectsDecided] == (
        ["quarantine.w1.1"] * restart
    ), "a new leader cannot know whether its predecessor wrote it"
    restarted(fleet, "w1", 2)
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(1, 2, 3))
    assert fleet.health("w1").quarantined == 2 and fleet.health("w1").condemned == 1
    assert step(fleet.fleet, verdict) == [], "of the engine before"
    again = step(fleet.fleet, v.LeaderElected("r0", "b1"))
    assert not [e for e in again if type(e) is v.EffectsDecided], "once, whoever leads"


def test_the_next_engine_may_be_as_wrong() -> None:
    fleet = LedFleet(workers=3)
    all_report(fleet)
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(1, 2, 3))
    restarted(fleet, "w1", 2)
    reports(fleet, "w1", 0, tokens=(1, 2, 3))
    for _ in range(4):
        all_report(fleet, "w1")
    assert fleet.state("w1") == HealthState.QUARANTINED
    assert fleet.health("w1").quarantined == 2


def test_a_class_of_one_goes_by_its_own_first_answers() -> None:
    """It is not excluded: no other worker could take its requests."""
    fleet = LedFleet(workers=1)
    all_report(fleet)
    assert [e.witnesses for e in fleet.values] == [("w0",), ("w0",)]
    assert {e.workers for e in fleet.values} == {1}
    for canary in RIGHT:
        reports(fleet, "w0", canary, tokens=(1, 2, 3))
    assert fleet.state("w0") == HealthState.SUSPECT
    assert any(type(e) is v.VerdictsWithheld for e in fleet.decisions)
    assert len(fleet.values) == 2, "it does not replace what it is compared with"


def test_two_workers_that_differ_are_not_judged_by_each_other() -> None:
    fleet = LedFleet(workers=1)
    all_report(fleet, "w0")
    fleet.worker("w1")
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(1, 2, 3))
    assert fleet.state("w1") == HealthState.SUSPECT and fleet.state("w0") == HealthState.HEALTHY
    assert "its class does not agree on canar" in fleet.health("w1").evidence
    fleet.worker("w2")
    all_report(fleet, "w2")
    assert fleet.state("w1") == HealthState.QUARANTINED


@pytest.mark.parametrize("led", (True, False))
def test_workers_that_start_together_and_differ_are_both_suspects(led: bool) -> None:
    """There are no values then, so that nothing else would show it. A third one decides."""
    fleet = LedFleet(workers=2)
    if not led:
        fleet.tell("fleet", v.LeaderResigned("r0", "asked"))
    for canary in RIGHT:
        reports(fleet, "w0", canary)
    assert fleet.state("w0") == HealthState.HEALTHY, "the other one has not answered"
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(1, 2, 3))
    if not led:
        fleet.leader("r0")
    assert fleet.values == []
    for worker in ("w0", "w1"):
        assert fleet.state(worker) == HealthState.SUSPECT and fleet.excluded(worker) == ""
        assert "its class does not agree on canar" in fleet.health(worker).evidence
    fleet.worker("w2")
    all_report(fleet, "w0", "w2")
    assert fleet.state("w0") == fleet.state("w2") == HealthState.HEALTHY
    assert fleet.state("w1") == HealthState.QUARANTINED
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


def test_weights_that_change_in_place_quarantine_the_first_worker_until_most_have_changed() -> None:
    """Its agent confirms at once. It is released without an operator, and no other one is quarantined."""
    fleet = LedFleet(workers=3)
    fleet.tell("fleet", v.ConfigChanged("canary.restart", "0"))
    all_report(fleet)
    all_report(fleet, "w0", tokens=(1, 2, 3))
    assert fleet.state("w0") == HealthState.QUARANTINED
    all_report(fleet, "w1", tokens=(1, 2, 3))
    assert [(e.version, e.tokens) for e in fleet.values[-2:]] == [(2, (1, 2, 3))] * 2
    assert fleet.state("w0") == HealthState.QUARANTINED, "until it has answered rightly"
    assert fleet.state("w2") == HealthState.SUSPECT, "its answers may be from before"
    all_report(fleet, "w2", tokens=(1, 2, 3))
    assert fleet.state("w2") == HealthState.HEALTHY
    for _ in range(4):
        all_report(fleet, tokens=(1, 2, 3))
    assert {fleet.state(w) for w in ("w0", "w1", "w2")} == {HealthState.HEALTHY}
    quarantined = [e.worker for e in fleet.decisions if e.state == HealthState.QUARANTINED]
    assert quarantined == ["w0"]
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


def test_a_worker_that_does_not_change_with_its_class_is_quarantined() -> None:
    fleet = LedFleet(workers=5)
    all_report(fleet)
    all_report(fleet, "w0", "w1", "w2", "w3", tokens=(1, 2, 3))
    assert fleet.state("w4") == HealthState.SUSPECT
    all_report(fleet, "w4")
    assert fleet.state("w4") == HealthState.QUARANTINED


def test_answers_from_before_there_was_a_leader_are_judged_by_the_first_one() -> None:
    """Engines answer all canaries at once when they are ready, and then one at a time."""
    fleet = LedFleet(workers=3)
    fleet.tell("fleet", v.LeaderResigned("r0", "asked"))
    all_report(fleet, "w0", "w2")
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(1, 2, 3))
    assert fleet.values == []
    fleet.leader("r0")
    assert {e.canary for e in fleet.values} == set(RIGHT)
    assert fleet.state("w1") == HealthState.QUARANTINED
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


def test_classes_without_workers_are_forgotten() -> None:
    fleet = LedFleet(workers=1)
    for number in range(2 * MOST_CLASSES):
        reports(fleet, "w0", weights=f"{number}")
    assert len(fleet.fleet.canaries) == MOST_CLASSES
    assert fleet.fleet.workers["w0"].canary.kind in fleet.fleet.canaries


def test_another_digest_of_the_weights_is_another_class() -> None:
    fleet = LedFleet(workers=3)
    all_report(fleet)
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(1, 2, 3), weights="new")
    assert fleet.state("w1") == HealthState.HEALTHY


def test_most_workers_are_never_quarantined() -> None:
    """Answers that differ everywhere show that the class is not exact after all."""
    fleet = LedFleet(workers=3)
    all_report(fleet)
    for number, worker in enumerate(("w0", "w1", "w2")):
        for canary in RIGHT:
            reports(fleet, worker, canary, tokens=(number, number, number))
    open_ = [w for w in ("w0", "w1", "w2") if fleet.excluded(w) == ""]
    assert len(open_) >= 2, "one may have been quarantined before the others differed"


def test_a_quarantine_stands_when_another_worker_dies() -> None:
    """Also while its worker is probed: only its own right answers end it."""
    fleet = LedFleet(workers=3)
    fleet.tell("fleet", v.ConfigChanged("canary.restart", "0"))
    all_report(fleet)
    fleet.tell("w.w2", died("w2"))
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(1, 2, 3))
    assert fleet.state("w1") == HealthState.QUARANTINED, "one of two"
    fleet.tell("w.w0", died("w0"))
    assert fleet.state("w1") == HealthState.QUARANTINED and fleet.excluded("w1") == "quarantined"
    fleet.tell("w.w0", started("w0", 2), ready("w0", 2))
    restarted(fleet, "w1", 2)
    for _ in range(2):
        all_report(fleet, "w1")
    assert fleet.state("w1") == HealthState.PROBING
    fleet.tell("w.w0", died("w0", 2))
    assert fleet.state("w1") == HealthState.PROBING
    assert not any(type(e) is v.VerdictsWithheld for e in fleet.decisions), "nothing is withheld"


def test_workers_in_quarantine_count_towards_the_share() -> None:
    """Also while their engines are restarted: half of the workers at most are excluded."""
    fleet = LedFleet(workers=3)
    all_report(fleet)
    for canary in RIGHT:
        reports(fleet, "w0", canary, tokens=(1, 2, 3))
    fleet.tell("w.w0", died("w0"))
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(3, 2, 1))
    assert fleet.state("w0") == HealthState.QUARANTINED
    assert fleet.state("w1") == HealthState.SUSPECT
    (withheld,) = [e for e in fleet.decisions if type(e) is v.VerdictsWithheld]
    assert withheld.workers == ("w1",) and withheld.serving == 3


@pytest.mark.parametrize(
    ("version", "states", "withheld"),
    [
        (7, (HealthState.SUSPECT, HealthState.QUARANTINED), [("w0",)]),
        (6, (HealthState.SUSPECT, HealthState.SUSPECT), [("w0", "w1")]),
    ],
)
@pytest.mark.parametrize("wrong_first", [True, False])
def test_failures_of_other_workers_keep_no_wrong_worker_open(
    version: int,
    states: tuple[HealthState, ...],
    withheld: list[tuple[str, ...]],
    wrong_first: bool,
) -> None:
    """Composed 82332: it gave 26 wrong answers to canaries while others failed requests."""
    fleet = LedFleet(workers=3, version=version)
    all_report(fleet)
    if wrong_first:
        reports(fleet, "w1", 0, tokens=(1, 2, 3))
    for _ in range(3):
        fleet.fails("w0")
    for canary in RIGHT:
        reports(fleet, "w1", canary, tokens=(1, 2, 3))
    assert (fleet.state("w0"), fleet.state("w1")) == states
    found = [e.workers for e in fleet.decisions if type(e) is v.VerdictsWithheld]
    assert found[-1:] == withheld


def test_wrong_results_of_most_workers_are_withheld_beside_other_failures() -> None:
    """Not all of them: one may have been quarantined before the others differed."""
    fleet = LedFleet(workers=4)
    all_report(fleet)
    for _ in range(3):
        fleet.fails("w0")
    for worker in ("w1", "w2", "w3"):
        for canary in RIGHT:
            reports(fleet, worker, canary, tokens=(1, 2, 3))
    states = [fleet.state(f"w{n}") for n in range(4)]
    assert states.count(HealthState.QUARANTINED) == 2 and states[0] == HealthState.SUSPECT
    assert fleet.excluded("w3") == ""


def test_a_canary_without_an_answer_is_no_evidence_of_corruption() -> None:
    fleet = LedFleet(workers=3)
    all_report(fleet)
    fleet.tell("w.w1", v.CanaryReported(
        worker="w1", incarnation=1, canary=0, prompts=1, error="no answer within 10 s"
    ))  # fmt: skip
    assert fleet.state("w1") == HealthState.HEALTHY


@pytest.mark.parametrize("version", (1, 2))
def test_older_versions_have_no_canaries(version: int) -> None:
    fleet = LedFleet(workers=3, version=version)
    before = state_hash(fleet.fleet)
    all_report(fleet)
    assert fleet.values == [] and fleet.fleet.canaries is UNSET
    assert before != state_hash(fleet.fleet)  # its order has the segments
    assert fleet.fleet.workers["w0"].canary is UNSET


def test_no_setting_asks_for_more_wrong_canaries_than_there_are() -> None:
    """It would switch the quarantine off without a word."""
    _, most, _ = canary_settings.SETTINGS.limits["confirm"]
    assert most == COUNT


def values(exact: bool = False) -> CanaryValues:
    tokens, logprobs = RIGHT[1]
    return CanaryValues(
        version=1, tokens=tokens, low=logprobs, high=logprobs, exact=exact, witnesses=("a", "b")
    )


@pytest.mark.parametrize(
    ("tokens", "logprobs", "exact", "what"),
    [
        ((8, 9, 8), RIGHT[1][1], True, ""),
        ((8, 9, 8), (-0.5, -1.0, -0.6, -1.1, -0.7, -1.2000001), True, "log probability 2 of token 3"),
        ((8, 9, 8), (-0.5, -1.0, -0.6, -1.1, -0.7, -1.2000001), False, ""),
        ((8, 9, 8), (-0.5, -1.0, -0.8, -1.1, -0.7, -1.2), False, "log probability 1 of token 2"),
        ((8, 9, 1), RIGHT[1][1], False, "token 3 is 1 instead of 8"),
        ((8, 9, 8), (nan, -1.0, -0.6, -1.1, -0.7, -1.2), False, "log probability 1 of token 1 is nan"),
        ((8, 9), RIGHT[1][1], True, "2 tokens instead of 3"),
        ((8, 9, 8), RIGHT[1][1][:-1], True, "5 log probabilities instead of 6"),
    ],
)  # fmt: skip
def test_comparison(
    tokens: tuple[int, ...], logprobs: tuple[float, ...], exact: bool, what: str
) -> None:
    answer = CanaryAnswer(tokens=tokens, logprobs=logprobs, exact=exact, tick=0)
    found = difference(answer, values(exact), 0.05)
    assert found.startswith(what) and bool(found) == bool(what), found


def test_a_near_tie_ends_the_comparison_where_nothing_is_exact() -> None:
    near = CanaryValues(
        version=1,
        tokens=(8, 9),
        low=(-0.70, -0.72, -0.1, -3.0),
        high=(-0.70, -0.72, -0.1, -3.0),
        exact=False,
        witnesses=("a", "b"),
    )
    other = CanaryAnswer(tokens=(7, 4), logprobs=(-0.70, -0.71, -2.0, -2.5), exact=False, tick=0)
    assert difference(other, near, 0.05) == ""
