"""A replica prefers other workers to one that fails requests, before the leader has decided."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import Exclusion, HealthState, TransportKind
from relume.policies.health.health_settings import MOST_ERRORS, HealthConfig
from relume.policies.leader.duties import step
from relume.policies.routing.choose_worker import (
    POLICIES,
    RECORDED,
    WHOLE,
    Choice,
    _shortened,
    decide,
)
from relume.policies.routing.eligibility import is_failing
from relume.policies.routing.route_query import RouteQuery
from relume.policies.state import dirty_set
from relume.policies.state.overlay.view import View
from tests.policies.health.led_fleet import LedFleet
from tests.policies.story import MODEL, Story, arrived, decided, ended, engine_step, queued


def failed(name: str, worker: str = "w0", status: int = 500, incarnation: int = 1) -> Any:
    """A request's attempt ended with an error of the engine."""
    return v.TransportObserved(
        request=name,
        attempt=1,
        worker=worker,
        incarnation=incarnation,
        kind=TransportKind.ENGINE_ERROR,
        delivered=0,
        status=status,
    )


class SlowLog(LedFleet):
    """What the leader owes lands when `decide` is called."""

    def __init__(self, workers: int, config: HealthConfig) -> None:
        self.owed: list[Any] = []
        super().__init__(workers, config=config)

    def tell(self, stream: str, *events: Any) -> Any:
        group = Story.tell(self, stream, *events)
        owed = (e for event in events for e in step(self.fleet, event))
        self.owed += [e for e in owed if type(e) in (v.HealthDecided, v.VerdictsWithheld)]
        return group

    def decide(self) -> None:
        owed, self.owed = self.owed, []
        if owed:
            self.tell("fleet", *owed)


class Replica:
    """r0 of a fleet: its events are its own until they land."""

    def __init__(self, fleet: LedFleet) -> None:
        self.fleet = fleet
        self.view = View("r.r0", fleet.fleet)
        self.view.landed()
        self.pending: list[Any] = []

    def own(self, *events: Any) -> None:
        for event in events:
            self.view.own(self.view.position + 1, event)
            self.pending.append(event)

    def land(self) -> None:
        """The log is heard again."""
        events, self.pending = self.pending, []
        if events:
            self.fleet.tell("r.r0", *events)
        self.view.landed()

    def chooses(self, policy: str = "predicted_ttft", *avoid: str) -> Choice:
        self.view.now_us = 1_000
        return decide(self.view, self.asked(*avoid), policy)

    def asked(self, *avoid: str) -> RouteQuery:
        return RouteQuery(
            request="q", model=MODEL, prompt_tokens=50, delivered=0, avoid=avoid, at_us=1_000
        )

    def reasons(self, policy: str = "predicted_ttft") -> dict[str, str]:
        return {c.worker: str(c.excluded) for c in self.chooses(policy).candidates}


def few(config: HealthConfig | None = None, workers: int = 3) -> Replica:
    return Replica(LedFleet(workers, config=config))


@pytest.mark.parametrize("policy", POLICIES)
def test_after_three_different_requests_others_are_preferred(policy: str) -> None:
    replica = few()
    replica.own(failed("a"), failed("b"), failed("b"))
    assert "failing" not in replica.reasons(policy).values(), "two requests"
    replica.own(failed("c"))
    for turn in range(6):
        choice = replica.chooses(policy)
        assert choice.worker in ("w1", "w2")
        replica.own(decided(f"n{turn}", worker="elsewhere"))
    if policy != "power_of_two":
        assert replica.reasons(policy) == {"w0": Exclusion.FAILING, "w1": "", "w2": ""}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("landed", [False, True])
def test_large_fleets_prefer_others_too(policy: str, landed: bool) -> None:
    """Also when the log has the failures, and the leader has decided nothing yet."""
    replica = few(HealthConfig(unjudged=2), workers=WHOLE + 4)
    replica.own(failed("a"), failed("b"))
    if landed:
        replica.land()
        assert replica.fleet.state() == HealthState.SUSPECT
        assert not replica.view.failed
    for turn in range(2 * WHOLE):
        choice = replica.chooses(policy)
        assert choice.worker not in ("", "w0")
        named = {c.worker: c.excluded for c in choice.candidates}
        assert named.get("w0", Exclusion.FAILING) == Exclusion.FAILING
        replica.own(decided(f"n{turn}", worker="elsewhere"))


def test_a_large_fleet_that_fails_everywhere_still_serves() -> None:
    workers = WHOLE + 4
    replica = few(HealthConfig(unjudged=2, share_percent=100), workers=workers)
    for number in range(workers):
        name = f"w{number}"
        replica.own(failed(f"{name}a", name), failed(f"{name}b", name))
    replica.land()
    assert dict(replica.chooses("least_load").others) == {Exclusion.FAILING: workers - 1}
    assert replica.chooses("least_load").worker != ""


def test_a_worker_that_is_merely_full_comes_before_one_that_fails() -> None:
    replica = few(workers=2)
    full = msgspec.structs.replace(engine_step(queued("x", prompt=900)), kv_used=512)
    replica.fleet.tell("w.w1", full)
    replica.own(*map(failed, "abc"))
    replica.view.landed()
    assert replica.reasons() == {"w0": Exclusion.FAILING, "w1": Exclusion.NO_KV_SPACE}
    choice = replica.chooses()
    assert choice.candidates[0].worker == "w0" and choice.worker == "w1"


@pytest.mark.parametrize("policy", POLICIES)
def test_it_still_serves_where_there_is_no_other(policy: str) -> None:
    replica = few(workers=1)
    replica.own(*map(failed, "abcd"))
    assert replica.chooses(policy).worker == "w0"


def test_the_leaders_decision_takes_over() -> None:
    replica = few()
    replica.own(*map(failed, "abc"))
    replica.land()
    assert replica.fleet.state() == HealthState.UNHEALTHY
    assert replica.reasons()["w0"] == Exclusion.UNHEALTHY
    replica.fleet.ticks(10)
    assert replica.fleet.state() == HealthState.PROBING
    assert replica.reasons()["w0"] == "", "its probe goes there"


@pytest.mark.parametrize(
    "event", [failed("c", status=503), failed("c", status=429), failed("c", incarnation=9)]
)
def test_what_does_not_count(event: Any) -> None:
    """Announced overload, and another engine's failures."""
    replica = few()
    replica.own(failed("a"), failed("b"), event)
    assert replica.reasons()["w0"] == ""


def test_a_request_whose_client_was_at_fault_counts_no_more() -> None:
    replica = few()
    replica.own(arrived("a"), *map(failed, "abc"))
    replica.own(ended("a", outcome="rejected"))
    assert replica.reasons()["w0"] == ""


def test_verdicts_that_are_withheld_are_no_limit_here_either() -> None:
    """More than half of the workers fail: the cause is common to them."""
    replica = few()
    for worker in ("w0", "w1"):
        replica.own(*(failed(f"{worker}{n}", worker) for n in range(3)))
    replica.land()
    assert replica.fleet.fleet.withheld == {MODEL: ("w0", "w1")}
    assert "failing" not in replica.reasons().values()


def test_withheld_verdicts_change_what_a_view_says_at_once() -> None:
    """The limit was seen before they were withheld, and nothing else changes on the workers."""
    replica = few()
    for worker in ("w0", "w1"):
        replica.own(*(failed(f"{worker}{n}", worker) for n in range(3)))
    assert replica.reasons()["w0"] == Exclusion.FAILING
    names = ("w0", "w1")
    withheld = v.VerdictsWithheld(model=MODEL, workers=names, serving=3, share_percent=50)
    replica.fleet.tell("fleet", withheld)
    replica.view.landed()
    assert "failing" not in replica.reasons().values()


def test_a_long_outage_does_not_grow_what_is_remembered() -> None:
    replica = few(HealthConfig(unjudged=MOST_ERRORS), workers=1)
    replica.own(*(failed(f"q{n}") for n in range(MOST_ERRORS - 1)))
    assert replica.reasons()["w0"] == ""
    replica.own(*(failed(f"q{n}") for n in range(2 * MOST_ERRORS)))
    worker = replica.fleet.fleet.workers["w0"]
    assert replica.reasons()["w0"] == Exclusion.FAILING
    assert len(replica.view.failed_on(worker)) == MOST_ERRORS
    replica.land()
    assert not replica.view.failed_on(worker)


def test_operators_switch_it_off() -> None:
    replica = few(HealthConfig(unjudged=0))
    replica.own(*map(failed, "abcd"))
    assert replica.reasons()["w0"] == ""


def doubted(config: HealthConfig | None = None, workers: int = 3) -> Replica:
    """A request failed on w0, which has two more without a first token."""
    replica = few(config, workers)
    replica.own(arrived("a"), decided("a"), failed("a"), ended("a", outcome="failed"))
    for name in "bc":
        replica.own(arrived(name), decided(name))
    return replica


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("workers", [3, WHOLE + 4])
@pytest.mark.parametrize("landed", [False, True])
def test_after_one_failure_the_requests_under_way_must_be_answered_first(
    policy: str, workers: int, landed: bool
) -> None:
    replica = doubted(workers=workers)
    if landed:
        replica.land()
        assert replica.fleet.state() == HealthState.SUSPECT
    for turn in range(2 * workers):
        assert replica.chooses(policy).worker not in ("", "w0")
        replica.own(decided(f"n{turn}", worker="elsewhere"))


def test_a_worker_that_answers_again_gets_requests_again() -> None:
    replica = doubted()
    replica.land()
    assert replica.reasons()["w0"] == Exclusion.FAILING
    report = engine_step(queued("b"), queued("c"), v.FirstToken("b", 1))
    replica.fleet.tell("w.w0", msgspec.structs.replace(report, batch=0))
    replica.view.landed()
    assert replica.reasons()["w0"] == "", "b has its first token"
    replica.own(arrived("d"), decided("d"))
    assert replica.reasons()["w0"] == Exclusion.FAILING, "c and d have none"
    replica.fleet.ticks(1)
    replica.own(ended("b"))
    replica.land()
    replica.own(arrived("e"), decided("e"))
    assert replica.reasons()["w0"] == "", "b ended well after a failed"


def test_operators_switch_off_that_answers_come_first() -> None:
    assert doubted(HealthConfig(unanswered=0)).reasons()["w0"] == ""
    assert doubted(HealthConfig(unanswered=3)).reasons()["w0"] == ""


@pytest.mark.parametrize("old", ["r0", "r1"])
def test_in_replicas_of_earlier_builds_answers_do_not_come_first(old: str) -> None:
    replica = Replica(LedFleet(replicas=2))
    del replica.fleet.fleet.replicas[old].settings["health.unanswered"]
    replica.own(failed("a"), decided("b"), decided("c"))
    assert replica.reasons()["w0"] == ""


@pytest.mark.parametrize("old", ["r0", "r1"])
def test_replicas_of_earlier_builds_and_old_logs_do_not_have_it(old: str) -> None:
    replica = Replica(LedFleet(replicas=2))
    replica.own(*map(failed, "abcd"))
    assert replica.reasons()["w0"] == Exclusion.FAILING
    del replica.fleet.fleet.replicas[old].settings["health.unjudged"]
    dirty_set.of(replica.fleet.fleet).everything()
    assert replica.reasons()["w0"] == ""


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seed", range(4))
def test_a_view_that_was_kept_says_what_a_new_one_says(policy: str, seed: int) -> None:
    """Whatever landed in between: replay decides on a view of its own."""
    draw, under_way = random.Random(f"{policy} {seed}"), random.Random(seed)
    fleet = SlowLog(draw.choice((3, 20)), HealthConfig(window_ticks=3, hold_ticks=2))
    replica, names = Replica(fleet), list(fleet.fleet.workers)[:4]
    seen = 0
    for number in range(120):
        name, worker = f"q{number}", draw.choice(names)
        replica.own(arrived(name), decided(name, worker=worker))
        if draw.random() < 0.7:
            replica.own(failed(name, worker))
            if draw.random() < 0.2:
                replica.own(ended(name, outcome="rejected"))
        else:
            replica.own(ended(name))
        if under_way.random() < 0.2:  # to stay without a first token
            replica.own(
                arrived(f"o{number}"), decided(f"o{number}", worker=under_way.choice(names))
            )
        if draw.random() < 0.15:
            replica.land()
        if draw.random() < 0.15:
            fleet.ticks(draw.randint(1, 3))
            replica.view.landed()
        if draw.random() < 0.1:
            fleet.decide()
            replica.view.landed()
        choice = replica.chooses(policy)
        fresh = Replica(fleet)
        for event in replica.pending:
            fresh.view.own(fresh.view.position + 1, event)
        assert fresh.chooses(policy) == choice, f"seed {seed}, {number}"
        if policy == "least_load" and len(fleet.fleet.workers) > WHOLE:
            query = replica.asked()
            whole = _shortened(replica.view, query, policy, RECORDED[policy](replica.view, query))
            assert choice == whole, f"seed {seed}, {number}: by a look at all workers"
        seen += any(is_failing(replica.view, w) for w in fleet.fleet.workers.values())
    assert seen > 10
