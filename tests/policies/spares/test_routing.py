"""Which requests a spare gets, by each way to choose a worker."""

from __future__ import annotations

import random

import pytest

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import Exclusion, Tier
from relume.policies.admission.admission_queue import AdmissionQueue, rank_of
from relume.policies.admission.admission_settings import WaitingConfig
from relume.policies.admission.fair_queue import Entry
from relume.policies.routing import saturation as saturation_module
from relume.policies.routing.choose_worker import decide
from relume.policies.routing.eligibility import excluded_at
from relume.policies.routing.route_query import RouteQuery
from relume.policies.routing.saturation import (
    BEHIND,
    FREE,
    NO_WORKER,
    SATURATED,
    UNKNOWN,
    call_next,
    on_arrival,
    open_workers,
    saturation,
)
from relume.policies.spares.spare_settings import SparesConfig
from relume.policies.state.overlay.view import View
from tests.policies.spares.spared_fleet import SparedFleet
from tests.policies.story import MODEL, arrived, decided, ended

ONE = SparesConfig(share_percent=1, dwell_ticks=3)
SMALL = WaitingConfig(queued=1)


@pytest.mark.parametrize("policy", ["least_load", "round_robin", "predicted_ttft", "jsq"])
@pytest.mark.parametrize("workers", [4, 20])
def test_a_spare_gets_no_request_while_another_worker_is_open(policy: str, workers: int) -> None:
    fleet = SparedFleet(workers)
    fleet.healthy_ticks(6)
    spares = fleet.spares()
    assert spares
    for _ in range(3 * workers):
        choice = fleet.choice(policy)
        assert choice.worker and choice.worker not in spares
        fleet.tell("r.r0", decided(f"q{fleet.revision}", worker=choice.worker))
    excluded = {c.worker: str(c.excluded) for c in choice.candidates}
    others = dict(choice.others)
    assert [excluded.get(name, "") for name in spares] == ["spare"] * len(spares) or others.get(
        "spare"
    ) == len(spares)


@pytest.mark.parametrize("policy", ["least_load", "predicted_ttft"])
@pytest.mark.parametrize("query", [{"tier": Tier.BATCH}, {"lost": 1}])
@pytest.mark.parametrize("workers", [4, 20])
def test_batch_requests_and_those_that_a_worker_failed_may_use_a_spare(
    policy: str, query: dict[str, object], workers: int
) -> None:
    fleet = SparedFleet(workers, ONE)
    fleet.healthy_ticks(6)
    for number in range(1, workers):
        fleet.tell("r.r0", arrived(f"q{number}"), decided(f"q{number}", worker=f"w{number}"))
    assert fleet.choice(policy).worker not in fleet.spares()
    assert fleet.choice(policy, **query).worker == "w0"
    assert fleet.choice(policy).worker not in fleet.spares()


@pytest.mark.parametrize("policy", ["least_load", "predicted_ttft"])
@pytest.mark.parametrize("workers", [4, 20])
def test_the_only_open_worker_gets_requests_although_it_is_a_spare(
    policy: str, workers: int
) -> None:
    fleet = SparedFleet(workers, ONE)
    fleet.healthy_ticks(6)
    assert fleet.choice(policy).worker != "w0"
    for number in range(1, workers):
        fleet.tell("r.r0", v.WorkerSuspected(f"w{number}", 1, "reset"))
    assert fleet.spares() == ("w0",)
    assert fleet.choice(policy).worker == "w0"
    fleet.tell("r.r0", v.WorkerCleared("w1", 1, "it serves"))
    assert fleet.choice(policy).worker == "w1"


def full_but_for_the_spare() -> SparedFleet:
    """Each of w1, w2 and w3 has as many requests as it may have; w0 is the spare."""
    fleet = SparedFleet(config=ONE)
    fleet.healthy_ticks(6)
    for number in range(1, 4):
        fleet.tell("r.r0", arrived(f"q{number}"), decided(f"q{number}", worker=f"w{number}"))
    fleet.view.landed()
    return fleet


def test_the_admission_queue_uses_a_spare_only_if_no_other_worker_is_open() -> None:
    fleet, config = full_but_for_the_spare(), SMALL
    assert saturation(fleet.view, MODEL, config, 0)[0] == SATURATED
    for number in range(1, 4):
        fleet.tell("r.r0", v.WorkerSuspected(f"w{number}", 1, "reset"))
    fleet.view.landed()
    assert open_workers(fleet.view, MODEL) == 1
    assert saturation(fleet.view, MODEL, config, 0)[0] == FREE
    fleet.tell("r.r0", v.WorkerSuspected("w0", 1, "reset"))
    fleet.view.landed()
    assert saturation(fleet.view, MODEL, config, 0)[0] == NO_WORKER


def test_the_admission_queue_lets_batch_requests_use_a_spare_before_it_is_full() -> None:
    fleet = full_but_for_the_spare()
    assert saturation(fleet.view, MODEL, SMALL, 0) == (SATURATED, UNKNOWN)
    assert saturation(fleet.view, MODEL, SMALL, 0, spares=True) == (FREE, UNKNOWN)
    fleet.tell("r.r0", arrived("q0"), decided("q0", worker="w0"))
    fleet.view.landed()
    assert saturation(fleet.view, MODEL, SMALL, 0, spares=True) == (SATURATED, UNKNOWN)


def waiting(*tiers: Tier) -> AdmissionQueue:
    """A queue with one request of each of these tiers, named by it, in the order of their arrival."""
    queue = AdmissionQueue()
    for tier in tiers:
        entry = Entry(
            request=str(tier), model=MODEL, rank=rank_of(tier), tenant="", tokens=1, size=1,
            entered_us=0, until_us=30_000_000,
        )  # fmt: skip
        queue.put(entry, 0)
    return queue


@pytest.mark.parametrize("overload", [False, True])
def test_a_spare_gets_the_next_batch_request_and_no_higher_one(overload: bool) -> None:
    fleet, queue = full_but_for_the_spare(), waiting(Tier.INTERACTIVE, Tier.STANDARD, Tier.BATCH)
    called, _ = call_next(fleet.view, queue, MODEL, SMALL, 0, overload)
    assert called is not None and called.request == Tier.BATCH
    queue.take(Tier.BATCH, 0, -1, SMALL)
    called, _ = call_next(fleet.view, queue, MODEL, SMALL, 0, overload)
    assert (called.request if called is not None else "") == (Tier.INTERACTIVE if overload else "")


def test_a_worker_with_room_gets_the_highest_tier_although_a_spare_is_idle() -> None:
    fleet, queue = full_but_for_the_spare(), waiting(Tier.BATCH, Tier.INTERACTIVE)
    fleet.tell("r.r0", ended("q1"))
    fleet.view.landed()
    called, _ = call_next(fleet.view, queue, MODEL, SMALL, 0)
    assert called is not None and called.request == Tier.INTERACTIVE


@pytest.mark.parametrize("tier", [Tier.INTERACTIVE, Tier.BATCH])
def test_only_a_batch_request_passes_those_who_wait_and_only_to_a_spare_with_room(
    tier: Tier,
) -> None:
    fleet, before = full_but_for_the_spare(), waiting(Tier.INTERACTIVE)
    cause, _ = on_arrival(fleet.view, before, MODEL, tier, SMALL, 0)
    assert cause == (FREE if tier == Tier.BATCH else BEHIND)
    fleet.tell("r.r0", arrived("q0"), decided("q0", worker="w0"))
    fleet.view.landed()
    assert on_arrival(fleet.view, before, MODEL, tier, SMALL, 0)[0] == BEHIND
    assert on_arrival(fleet.view, AdmissionQueue(), MODEL, tier, SMALL, 0)[0] == SATURATED


def test_an_arrival_is_looked_at_again_when_the_spare_has_room_by_the_clock(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def busy(*args: object, spares: bool = False, glance: bool = True) -> tuple[str, int]:
        return SATURATED, 70 if spares else 90

    monkeypatch.setattr(saturation_module, "saturation", busy)
    before = waiting(Tier.INTERACTIVE)
    fleet = full_but_for_the_spare()
    assert on_arrival(fleet.view, before, MODEL, Tier.BATCH, SMALL, 0) == (BEHIND, 70)
    assert on_arrival(fleet.view, before, MODEL, Tier.INTERACTIVE, SMALL, 0) == (BEHIND, UNKNOWN)


def test_a_batch_request_that_arrives_passes_none_of_its_tier() -> None:
    fleet, before = full_but_for_the_spare(), waiting(Tier.BATCH)
    assert on_arrival(fleet.view, before, MODEL, Tier.BATCH, SMALL, 0)[0] == BEHIND


def test_a_batch_request_waits_its_turn_for_the_other_workers() -> None:
    fleet, before = full_but_for_the_spare(), waiting(Tier.INTERACTIVE)
    fleet.tell("r.r0", ended("q1"))
    fleet.view.landed()
    assert on_arrival(fleet.view, before, MODEL, Tier.BATCH, SMALL, 0)[0] == BEHIND


def test_nobody_is_called_without_a_worker() -> None:
    fleet, queue = full_but_for_the_spare(), waiting(Tier.BATCH)
    for number in range(4):
        fleet.tell("r.r0", v.WorkerSuspected(f"w{number}", 1, "reset"))
    fleet.view.landed()
    assert call_next(fleet.view, queue, MODEL, SMALL, 0, overload=True) == (None, UNKNOWN)


@pytest.mark.parametrize("policy", ["least_load", "predicted_ttft", "jsq", "session_affinity"])
@pytest.mark.parametrize("workers", [6, 20])
def test_indexes_stay_what_a_look_at_all_workers_gives(policy: str, workers: int) -> None:
    """A long view's decisions equal those of a new one, whatever happens to spares and others."""
    rng = random.Random(f"{policy} {workers}")
    fleet = SparedFleet(workers, SparesConfig(share_percent=30, dwell_ticks=1))
    incarnations = dict.fromkeys(fleet.fleet.workers, 1)
    excluded = 0
    for turn in range(300):
        name = rng.choice(sorted(incarnations))
        engine, suspects = incarnations[name], fleet.fleet.replicas["r0"].suspects
        match rng.randrange(6):
            case 0 if dead := [w.name for w in fleet.fleet.workers.values() if not w.engine_pid]:
                for other in dead:
                    incarnations[other] += 1
                    fleet.returns(other, incarnations[other])
            case 0:
                fleet.dies(name, engine)
            case 1 if suspects:
                for suspect, incarnation in list(suspects.items()):
                    fleet.tell("r.r0", v.WorkerCleared(suspect, incarnation, "it serves"))
            case 1:
                for other in rng.sample(sorted(incarnations), rng.randrange(workers)):
                    fleet.tell("r.r0", v.WorkerSuspected(other, incarnations[other], "reset"))
            case 2:
                request = f"q{turn}"
                there = decided(request, worker=name, incarnation=engine)
                fleet.tell("r.r0", arrived(request), there)
            case _:
                fleet.healthy_ticks(1)
        new = View("r.r0", fleet.fleet)
        for landed in (new, fleet.view):
            landed.landed()
        for tier in (Tier.BATCH, Tier.INTERACTIVE):
            query = RouteQuery(model=MODEL, prompt_tokens=100, tier=tier, session="s")
            assert decide(fleet.view, query, policy) == decide(new, query, policy)
        reasons = [excluded_at(new, worker) for worker in fleet.fleet.workers.values()]
        excluded += Exclusion.SPARE in reasons
        assert Exclusion.SPARE not in reasons or Exclusion.NONE in reasons
    assert 20 < excluded < 300, "spares were held back at times"
