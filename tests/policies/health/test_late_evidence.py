"""Evidence that comes late: of an engine or a replica that is over, or that is on its way to the log."""

from __future__ import annotations

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import HealthState
from relume.policies.routing.eligibility import excluded_at
from relume.policies.state.overlay.view import View
from tests.policies.crosscheck.checked_fleet import OTHER, CheckedFleet
from tests.policies.health.led_fleet import LedFleet
from tests.policies.health.test_canaries import RIGHT, all_report, restarted
from tests.policies.health.test_health import CONFIG, judged
from tests.policies.story import decided, replica_started

SUSPECTED = v.WorkerSuspected("w0", 1, "silent, probe silent")


def test_the_judgement_of_a_replica_that_restarted_counts_no_longer() -> None:
    """Only that replica could take it back, and its new life does not know of it."""
    fleet = LedFleet(replicas=2, config=CONFIG)
    fleet.tell("r.r1", judged(), SUSPECTED)
    assert fleet.state() == HealthState.UNHEALTHY
    settings = tuple(fleet.fleet.replicas["r1"].settings.items())
    fleet.tell("r.r1", replica_started("r1", "b2", settings=settings))
    assert fleet.state() == HealthState.HEALTHY
    assert fleet.excluded(replica="r0") == fleet.excluded(replica="r1") == ""


def test_half_of_the_replicas_are_not_most_of_them() -> None:
    fleet = LedFleet(replicas=4, config=CONFIG)
    for replica in ("r1", "r2"):
        fleet.fails(kind="unreachable", status=0, replica=replica)
    assert fleet.state() == HealthState.SUSPECT and fleet.excluded(replica="r0") == ""
    fleet.fails(kind="unreachable", status=0, replica="r3")
    assert fleet.state() == HealthState.UNHEALTHY


def test_a_canary_of_the_engine_before_is_no_evidence_against_the_next() -> None:
    fleet = LedFleet(workers=3)
    all_report(fleet)
    restarted(fleet, "w1", 2)
    for canary in RIGHT:
        event = v.CanaryReported(
            worker="w1", incarnation=1, canary=canary, prompts=1, tokens=(1, 2, 3),
            logprobs=RIGHT[canary][1], took_us=20_000, alone=True, exact=True,
        )  # fmt: skip
        fleet.tell("w.w1", event)
    assert fleet.state("w1") == HealthState.HEALTHY


def test_a_restarted_engine_does_not_speak_for_the_one_that_served_the_client() -> None:
    fleet = CheckedFleet()
    finished = fleet.finished("w0", "a")
    fleet.checks(finished, "w1", OTHER)
    restarted(fleet, "w0", 2)
    fleet.checks(finished, "w0", OTHER)
    assert "a" in fleet.fleet.disputes, "the two engines that differ did not come to agree"
    assert fleet.state("w1") == HealthState.SUSPECT


def test_a_probe_that_is_on_its_way_to_the_log_takes_its_place() -> None:
    """A replica decides many requests before the log has the first of them."""
    fleet = LedFleet(config=CONFIG)
    for _ in range(3):
        fleet.fails()
    fleet.ticks(fleet.health().until - fleet.fleet.tick)
    worker, view = fleet.fleet.workers["w0"], View("r.r0", fleet.fleet)
    assert fleet.state() == HealthState.PROBING and excluded_at(view, worker) == ""
    view.own(view.position + 1, decided("probe"))
    assert excluded_at(view, worker) == "probing"
