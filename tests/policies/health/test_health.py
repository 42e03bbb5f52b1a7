"""What becomes of a worker that fails: seen by one replica, by several, by its agent."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from msgspec import UNSET

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import (
    BreakerState,
    EffectKind,
    FailureClass,
    HealthState,
    ProbeResult,
)
from relume.policies import decision_versions
from relume.policies.health.evidence import has_failures
from relume.policies.health.health_life import LIFE, STATES, Finding, breaker_of
from relume.policies.health.health_settings import MOST_ERRORS, HealthConfig
from relume.policies.routing import choose_worker
from relume.policies.routing.choose_worker import Choice
from relume.policies.routing.route_query import RouteQuery
from relume.policies.state.fleet import state_hash
from relume.policies.state.overlay.view import View
from tests.policies.health.led_fleet import LedFleet, folded_again
from tests.policies.story import (
    MODEL,
    Story,
    arrived,
    died,
    engine_step,
    finished,
    found_hung,
    observed,
    queued,
    ready,
    replica_started,
    started,
)

CONFIG = HealthConfig(hold_ticks=8, longest_ticks=64, window_ticks=20)


def judged(hung: bool = True, worker: str = "w0", incarnation: int = 1) -> v.StallJudged:
    return v.StallJudged(
        decision="r0.b1.stall1",
        basis=v.Basis(1, 0),
        worker=worker,
        incarnation=incarnation,
        silent_us=3_000_000,
        probe=ProbeResult.ANSWERED,
        probe_steps=-1,
        step_age_us=0,
        bound_us=3_000_000,
        hung=hung,
    )


CLEARED = v.WorkerCleared("w0", 1, "idle and answering", probe=ProbeResult.ANSWERED, held=0)


def opened(fleet: LedFleet, worker: str = "w0") -> None:
    for _ in range(3):
        fleet.ends(fleet.fails(worker), "failed", 502)
    assert fleet.state(worker) == HealthState.UNHEALTHY


# --- the table -----------------------------------------------------------------------


def test_every_state_has_a_way_back_to_healthy() -> None:
    reached = {HealthState.HEALTHY}
    while more := {
        state
        for row in LIFE.values()
        for state, following in row.items()
        if following in reached and state not in reached
    }:
        reached |= more
    assert reached == set(STATES) == set(HealthState)
    assert LIFE.keys() == set(Finding)


def test_a_breaker_is_open_exactly_where_a_worker_gets_nothing() -> None:
    assert {s: breaker_of(s) for s in STATES if breaker_of(s) != BreakerState.CLOSED} == {
        HealthState.UNHEALTHY: BreakerState.OPEN,
        HealthState.QUARANTINED: BreakerState.OPEN,
        HealthState.PROBING: BreakerState.HALF_OPEN,
    }


# --- errors --------------------------------------------------------------------------


def test_errors_of_different_requests_open_the_breaker_and_probes_close_it() -> None:
    fleet = LedFleet(config=CONFIG)
    fleet.fails()
    assert fleet.state() == HealthState.SUSPECT and fleet.excluded() == ""
    assert fleet.health().price_percent == 200
    fleet.fails()
    fleet.fails()
    health = fleet.health()
    assert (health.state, health.failure) == (HealthState.UNHEALTHY, FailureClass.ERRORS)
    assert fleet.excluded() == "unhealthy" and fleet.excluded("w1") == ""
    hold = health.until - fleet.fleet.tick
    assert 4 <= hold <= 8
    fleet.ticks(hold - 1)
    assert fleet.excluded() == "unhealthy"
    fleet.ticks(1)
    assert fleet.state() == HealthState.PROBING and fleet.excluded() == ""
    probe = fleet.request()
    assert fleet.excluded() == "probing", "one at a time"
    fleet.ends(probe)
    assert fleet.state() == HealthState.PROBING and fleet.excluded() == ""
    fleet.ends(fleet.request())
    assert fleet.state() == HealthState.HEALTHY and fleet.excluded() == ""
    assert [d.state for d in fleet.decisions if isinstance(d, v.HealthDecided)] == [
        "suspect", "unhealthy", "probing", "healthy"
    ]  # fmt: skip


@pytest.mark.parametrize(("version", "state"), [(2, "probing"), (3, "healthy")])
def test_a_probe_that_ended_before_its_dispatch_was_in_the_log_has_passed(
    version: int, state: str
) -> None:
    """On a busy machine a replica's records come late. Once such a probe stayed open for ever."""
    fleet = LedFleet(config=CONFIG, version=version)
    opened(fleet)
    fleet.ticks(fleet.health().until - fleet.fleet.tick)
    for name in ("q101", "q102"):
        fleet.tell("w.w0", engine_step(queued(name), us=0), engine_step(finished(name)))
        fleet.ends(fleet.request(name=name))
    assert fleet.state() == state
    assert fleet.excluded() == ("probing" if version == 2 else "")


@pytest.mark.parametrize(("version", "left_us"), [(2, 120_000), (3, 0)])
def test_a_worker_that_is_probed_begins_without_its_overhead(version: int, left_us: int) -> None:
    """Only requests correct it: a high one would keep every probe away."""
    fleet = LedFleet(config=CONFIG, version=version)
    fleet.fleet.workers["w0"].overhead_us = 120_000
    opened(fleet)
    fleet.ticks(fleet.health().until - fleet.fleet.tick)
    assert fleet.state() == HealthState.PROBING
    assert fleet.fleet.workers["w0"].overhead_us == left_us


@pytest.mark.parametrize(("version", "asked"), [(4, False), (5, True)])
def test_a_high_overhead_fades_on_a_worker_without_requests(version: int, asked: bool) -> None:
    """No request went there any more, and only requests corrected it."""
    fleet = LedFleet(config=CONFIG, version=version)
    workers = fleet.fleet.workers
    for name, overhead_us in (("w0", 240_000), ("w1", 3_000), ("w2", 4_000)):
        workers[name].overhead_us = overhead_us
    view = View("r.r0", fleet.fleet)
    query = RouteQuery(request="q", model=MODEL, prompt_tokens=50, delivered=0)

    def is_chosen() -> bool:
        view.landed()
        view.now_us = 1_000
        named = choose_worker.decide(view, query, "predicted_ttft").candidates
        (cost,) = (c.cost for c in named if c.worker == "w0")
        return cost - min(c.cost for c in named) < 10_000

    assert not is_chosen()
    fleet.ticks(40)
    assert is_chosen() == asked
    fleet.ticks(100)
    usual = [4_000, 3_000, 4_000]
    overheads = [worker.overhead_us for worker in workers.values()]
    assert overheads == (usual if asked else [240_000, *usual[1:]])


def test_an_overhead_stays_while_the_worker_has_requests() -> None:
    fleet = LedFleet(workers=5, config=CONFIG)
    workers = fleet.fleet.workers
    workers["w0"].overhead_us = workers["w1"].overhead_us = 240_000
    fleet.request("w0")
    for _ in range(10):
        fleet.tell("w.w1", engine_step(queued("other"), finished("other")))
        fleet.ticks(4)
    assert workers["w0"].overhead_us == workers["w1"].overhead_us == 240_000
    fleet.ticks(6)
    assert workers["w0"].overhead_us == 240_000 > workers["w1"].overhead_us


def test_each_further_opening_holds_longer_and_a_long_health_forgets() -> None:
    fleet = LedFleet(config=CONFIG)
    holds = []
    for _ in range(5):
        opened(fleet) if not holds else fleet.fails()
        holds.append(fleet.health().until - fleet.fleet.tick)
        assert fleet.state() == HealthState.UNHEALTHY
        fleet.ticks(holds[-1])
        assert fleet.state() == HealthState.PROBING
    for hold, most in zip(holds, (8, 16, 32, 64, 64), strict=True):
        assert most / 2 <= hold <= most
    assert len(set(holds)) > 2, "with a jitter"
    for _ in range(2):
        fleet.ends(fleet.request())
    fleet.ticks(20 * 10 + 1)
    opened(fleet)
    assert fleet.health().until - fleet.fleet.tick <= 8


def test_as_many_errors_as_a_setting_may_ask_for_are_counted() -> None:
    fleet = LedFleet(config=HealthConfig(errors=MOST_ERRORS))
    for _ in range(MOST_ERRORS - 1):
        fleet.fails()
    assert fleet.state() == HealthState.SUSPECT
    fleet.fails()
    assert fleet.state() == HealthState.UNHEALTHY


def test_the_same_request_counts_once_and_counts_fade() -> None:
    fleet = LedFleet(config=CONFIG)
    name = fleet.fails()
    for attempt in range(4):
        fleet.tell("r.r0", observed(name, attempt + 2, kind="engine_error"))
    assert fleet.state() == HealthState.SUSPECT
    fleet.fails()
    fleet.ticks(20)
    assert fleet.state() == HealthState.HEALTHY, "faded"
    fleet.ends(fleet.request())
    fleet.fails()
    fleet.fails()
    assert fleet.state() == HealthState.SUSPECT
    fleet.fails()
    assert fleet.state() == HealthState.UNHEALTHY


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("engine_error", 429), ("engine_error", 503), ("declined", 0), ("stale", 0),
        ("timeout", 0), ("moved", 0), ("detached", 0),
    ],
)  # fmt: skip
def test_what_is_no_failure_of_the_worker_never_counts(kind: str, status: int) -> None:
    fleet = LedFleet(config=CONFIG)
    for _ in range(20):
        fleet.fails(kind=kind, status=status)
    assert fleet.state() == HealthState.HEALTHY and fleet.decisions == []


def test_rejected_and_cancelled_requests_never_count() -> None:
    fleet = LedFleet(config=CONFIG)
    for outcome, status in [("rejected", 400), ("cancelled", 499), ("failed", 503)] * 8:
        fleet.ends(fleet.request(), outcome, status)
    assert fleet.decisions == []


def test_a_request_at_fault_is_no_evidence_against_the_workers_it_failed_on() -> None:
    fleet = LedFleet(config=CONFIG)
    for _ in range(2):
        fleet.ends(fleet.fails(), "rejected", 400)
        assert fleet.state() == HealthState.HEALTHY
    opened(fleet)


def test_a_worker_that_failed_another_request_lately_makes_no_request_look_wrong() -> None:
    """Two workers that fail everything would otherwise turn away every client."""
    fleet = LedFleet(config=CONFIG)
    worker = fleet.fleet.workers["w0"]
    assert not has_failures(worker)
    fleet.ends(fleet.fails(), "rejected", 400)
    assert has_failures(worker) and fleet.state() == HealthState.HEALTHY
    fleet.ticks(CONFIG.window_ticks)
    assert not has_failures(worker)


def test_a_failed_probe_opens_again_and_another_end_leaves_the_place_to_the_next() -> None:
    fleet = LedFleet(config=CONFIG)
    opened(fleet)
    fleet.ticks(8)
    assert fleet.state() == HealthState.PROBING
    fleet.ends(fleet.request(), "cancelled", 499)
    assert fleet.excluded() == "" and fleet.health().passes == 0
    fleet.fails(kind="declined", status=0)
    assert fleet.excluded() == "" and fleet.state() == HealthState.PROBING
    fleet.fails()
    assert fleet.state() == HealthState.UNHEALTHY


def test_one_replica_probes_and_one_that_has_requests_takes_over() -> None:
    fleet = LedFleet(replicas=3, config=CONFIG)
    opened(fleet)
    fleet.ticks(8)
    assert fleet.state() == HealthState.PROBING and fleet.health().prober == "r0"
    assert [fleet.excluded(replica=f"r{n}") for n in range(3)] == ["", "probing", "probing"]
    count = len(fleet.decisions)
    fleet.ticks(50)
    assert len(fleet.decisions) == count, "no replica has requests"
    fleet.request("w1", replica="r2")
    fleet.ticks(1)
    assert fleet.health().prober == "r2"
    assert [fleet.excluded(replica=f"r{n}") for n in range(3)] == ["probing", "probing", ""]
    fleet.request("w1", replica="r2")
    fleet.request("w1", replica="r0")
    fleet.ticks(5)
    assert fleet.health().prober == "r2", "it has requests"
    fleet.tell("r.r2", v.ReplicaStopped("r2", "leaves"))
    assert fleet.health().prober == "r0"


@pytest.mark.parametrize(("version", "prober"), [(8, "r0"), (9, "r1")])
def test_a_replica_whose_requests_all_wait_takes_the_probes_over(version: int, prober: str) -> None:
    fleet = LedFleet(replicas=3, config=CONFIG, version=version)
    opened(fleet)
    fleet.tell("r.r1", arrived("waits"))
    fleet.ticks(8)
    assert fleet.state() == HealthState.PROBING and fleet.health().prober == "r0"
    fleet.ticks(2)
    assert fleet.health().prober == prober
    fleet.ticks(20)
    assert fleet.health().prober == prober, "it has them still"


def test_probes_are_taken_over_also_between_two_and_from_a_replica_that_serves_others() -> None:
    fleet = LedFleet(replicas=2, config=CONFIG)
    opened(fleet)
    fleet.ticks(8)
    assert fleet.health().prober == "r0"
    fleet.ends(fleet.request())
    assert fleet.health().passes == 1
    fleet.tell("r.r1", arrived("waits"))
    fleet.ticks(2)
    assert (fleet.health().prober, fleet.health().passes) == ("r1", 1)
    fleet.ends("waits", replica="r1")
    fleet.tell("r.r0", arrived("also waits"))
    fleet.request("w1", replica="r1")
    fleet.ticks(3)
    assert fleet.health().prober == "r0", "r1 has decisions, and none of its requests waits"


def test_a_replica_with_waiting_requests_keeps_the_probes() -> None:
    """Others that wait take turns only if it suspects the worker: then it may not send them."""
    fleet = LedFleet(replicas=2, config=CONFIG)
    opened(fleet)
    for name in ("r0", "r1"):
        fleet.tell(f"r.{name}", arrived(f"waits at {name}"))
    fleet.ticks(30)
    assert fleet.state() == HealthState.PROBING and fleet.health().prober == "r0"
    assert sum(d.state == HealthState.PROBING for d in fleet.decisions) == 1  # type: ignore[union-attr]
    fleet.tell("r.r0", v.WorkerSuspected("w0", 1, "reset"))
    fleet.ticks(2)
    assert fleet.health().prober == "r1"


def test_requests_of_another_model_or_without_a_client_do_not_move_the_probes() -> None:
    fleet = LedFleet(replicas=3, config=CONFIG)
    opened(fleet)
    fleet.tell("r.r1", msgspec.structs.replace(arrived("elsewhere"), model="other"))
    fleet.tell("r.r2", arrived("left"))
    fleet.tell("r.r2", v.ReplicaStopped("r2", "leaves"))
    fleet.tell("r.r2", replica_started("r2", settings=decision_versions.settings()))
    fleet.ticks(20)
    assert fleet.state() == HealthState.PROBING and fleet.health().prober == "r0"


# --- hangs and connections -----------------------------------------------------------


def test_one_replicas_judgement_excludes_a_hung_worker_for_all_until_it_is_cleared() -> None:
    fleet = LedFleet(replicas=2, config=CONFIG)
    fleet.tell("r.r0", judged(), v.WorkerSuspected("w0", 1, "silent, probe answered"))
    health = fleet.health()
    assert (health.state, health.failure) == (HealthState.UNHEALTHY, FailureClass.HANG)
    assert health.evidence == "judged hung by r0"
    assert fleet.excluded(replica="r1") == "unhealthy"
    fleet.ticks(100)
    assert fleet.excluded(replica="r1") == "unhealthy", "no time ends a hang"
    fleet.tell("r.r0", CLEARED)
    assert fleet.state() == HealthState.HEALTHY
    assert fleet.excluded(replica="r1") == fleet.excluded(replica="r0") == ""


@pytest.mark.parametrize(
    ("probe", "step", "version", "state"),
    [
        (ProbeResult.SILENT, None, 16, HealthState.SUSPECT),
        (ProbeResult.SILENT, None, 15, HealthState.UNHEALTHY),
        (ProbeResult.SILENT, engine_step(queued("q")), 16, HealthState.UNHEALTHY),
        (ProbeResult.REFUSED, None, 16, HealthState.UNHEALTHY),
        (ProbeResult.ANSWERED, None, 16, HealthState.UNHEALTHY),
    ],
)
def test_a_replica_whose_probes_an_idle_engine_does_not_answer_may_itself_be_cut_off(
    probe: ProbeResult, step: v.EngineStep | None, version: int, state: HealthState
) -> None:
    """Others go on with the worker, until more than half of them cannot reach it."""
    fleet = LedFleet(replicas=3, config=CONFIG, version=version)
    if step is not None:
        fleet.tell("w.w0", step)
    event = msgspec.structs.replace(judged(), probe=probe)
    fleet.tell("r.r0", event, v.WorkerSuspected("w0", 1, f"silent, probe {probe}"))
    assert fleet.state() == state
    if state == HealthState.SUSPECT:
        assert fleet.health().failure == FailureClass.UNREACHABLE
        assert fleet.excluded(replica="r1") == "" and fleet.excluded(replica="r0") != ""
        fleet.tell("r.r1", event, v.WorkerSuspected("w0", 1, "silent, probe silent"))
        assert (fleet.state(), fleet.health().failure) == ("unhealthy", FailureClass.UNREACHABLE)
        fleet.tell("r.r1", CLEARED)
        assert fleet.state() == HealthState.SUSPECT
        fleet.tell("r.r0", CLEARED)
        assert fleet.state() == HealthState.HEALTHY
        assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


def test_an_agents_word_excludes_its_hung_engine_for_all_until_it_recovers() -> None:
    """Also an idle one, of which no replica sees anything; replicas come and go meanwhile."""
    fleet = LedFleet(replicas=2, config=CONFIG)
    fleet.tell("w.w0", found_hung())
    health = fleet.health()
    assert (health.state, health.failure) == (HealthState.UNHEALTHY, FailureClass.HANG)
    assert health.evidence == "judged hung by its agent"
    fleet.tell("r.r1", v.ReplicaStopped("r1", "leaves"))
    fleet.tell("r.r0", CLEARED)
    assert fleet.excluded(replica="r0") == "unhealthy", "a replica does not take it back"
    fleet.tell("w.w0", v.EngineRecovered("w0", 1, 9_000_000))
    assert fleet.state() == HealthState.HEALTHY
    assert fleet.excluded(replica="r0") == ""


def test_a_restarted_engine_is_not_held_for_its_predecessors_hang() -> None:
    fleet = LedFleet(config=CONFIG)
    fleet.tell("w.w0", found_hung())
    fleet.tell("w.w0", died("w0", 1), started("w0", 2), ready("w0", 2))
    assert fleet.state() == HealthState.HEALTHY
    fleet.tell("w.w0", found_hung(incarnation=1))
    assert fleet.state() == HealthState.HEALTHY, "late word of an engine that is gone"


def test_the_judgement_of_a_replica_that_left_counts_no_longer() -> None:
    fleet = LedFleet(replicas=2, config=CONFIG)
    fleet.tell("r.r1", judged(), v.WorkerSuspected("w0", 1, "silent, probe silent"))
    assert fleet.state() == HealthState.UNHEALTHY
    fleet.tell("r.r1", v.ReplicaStopped("r1", "leaves"))
    assert fleet.state() == HealthState.HEALTHY


def test_lost_connections_of_one_replica_make_a_suspect_of_most_exclude_it() -> None:
    fleet = LedFleet(replicas=3, config=CONFIG)
    fleet.fails(kind="unreachable", status=0, replica="r1")
    health = fleet.health()
    assert (health.state, health.failure) == (HealthState.SUSPECT, FailureClass.UNREACHABLE)
    assert fleet.excluded(replica="r0") == "" and fleet.excluded(replica="r1") == "suspected"
    fleet.fails(kind="unreachable", status=0, replica="r2")
    assert fleet.state() == HealthState.UNHEALTHY
    assert fleet.excluded(replica="r0") == "unhealthy"
    fleet.tell("r.r2", CLEARED)
    assert fleet.state() == HealthState.SUSPECT
    fleet.tell("r.r1", CLEARED)
    assert fleet.state() == HealthState.HEALTHY


def test_an_error_storm_seen_by_several_replicas_opens_one_breaker() -> None:
    fleet = LedFleet(replicas=3, config=CONFIG)
    for number in range(3):
        fleet.fails(replica=f"r{number}")
    assert fleet.state() == HealthState.UNHEALTHY


# --- lives ---------------------------------------------------------------------------


def test_a_death_and_a_restart_are_decided_and_the_evidence_dies_with_the_engine() -> None:
    fleet = LedFleet(config=CONFIG)
    opened(fleet)
    fleet.tell("w.w0", died())
    assert (fleet.health().state, fleet.health().failure) == ("dead", "crash")
    fleet.tell("w.w0", started("w0", 2))
    assert fleet.state() == HealthState.DEAD
    fleet.tell("w.w0", ready("w0", 2))
    assert fleet.state() == HealthState.HEALTHY and fleet.excluded() == ""
    assert fleet.health().trips == 1, "its next breaker still opens for longer"


def test_a_decision_about_an_earlier_engine_changes_nothing() -> None:
    fleet = LedFleet(config=CONFIG)
    opened(fleet)
    late = fleet.decisions[-1]
    fleet.tell("w.w0", died(), started("w0", 2), ready("w0", 2))
    assert fleet.state() == HealthState.HEALTHY
    fleet.tell("fleet", late)
    assert fleet.state() == HealthState.HEALTHY


def test_a_drain_is_a_state_and_its_end_returns_to_what_the_evidence_says() -> None:
    fleet = LedFleet(config=CONFIG)
    drain, undrain = (
        v.EffectsDecided(
            decision=f"d{n}", basis=v.Basis(1, 0), cause="op: drain w0",
            effects=(v.Effect(kind, "w0"),),
        )
        for n, kind in enumerate((EffectKind.DRAIN, EffectKind.UNDRAIN))
    )  # fmt: skip
    fleet.tell("fleet", drain)
    assert fleet.state() == HealthState.DRAINING and fleet.excluded() == "draining"
    fleet.tell("r.r0", judged())
    fleet.tell("fleet", undrain)
    assert fleet.state() == HealthState.UNHEALTHY
    fleet.tell("r.r0", CLEARED)
    assert fleet.state() == HealthState.HEALTHY


def test_a_host_without_lease_is_dead_until_it_returns() -> None:
    fleet = LedFleet(config=CONFIG)
    worker = fleet.fleet.workers["w0"]
    fleet.tell("fleet", v.WorkerLost("w0", worker.epoch, "lease lapsed"))
    assert (fleet.health().state, fleet.health().failure) == ("dead", "host")
    fleet.own("w.w0")
    fleet.tell("w.w0", v.StreamResumed(1, fleet.epochs["w.w0"]))
    assert fleet.state() == HealthState.HEALTHY


def test_by_version_1_a_slow_worker_is_a_suspect_until_it_is_clearly_faster() -> None:
    """By what predictions have learned of it."""
    fleet = LedFleet(config=CONFIG, version=1)
    worker = fleet.fleet.workers["w0"]
    for slowness, state in ((2.4, "healthy"), (2.6, "suspect"), (2.1, "suspect"), (1.9, "healthy")):
        worker.slowness = slowness
        fleet.ticks(1)
        assert fleet.state() == state, slowness
    worker.slowness = 4.04
    fleet.ticks(1)
    assert fleet.health().failure == FailureClass.SLOW
    assert fleet.health().evidence == "its steps take 4.0 times those of its class"
    assert fleet.excluded() == "" and fleet.health().price_percent == 200


# --- the guard -----------------------------------------------------------------------


def test_no_breaker_opens_while_too_many_workers_fail() -> None:
    fleet = LedFleet(workers=4, config=CONFIG)
    for name in ("w0", "w1", "w2", "w3"):
        for _ in range(4):
            fleet.fails(name)
    assert [fleet.state(f"w{n}") for n in range(4)] == [HealthState.SUSPECT] * 4
    assert all(fleet.excluded(f"w{n}") == "" for n in range(4))
    (withheld,) = [d for d in fleet.decisions if isinstance(d, v.VerdictsWithheld)]
    assert withheld.workers == ("w0", "w1", "w2") and withheld.serving == 4
    assert fleet.health().evidence.startswith("withheld, too many workers fail at once")
    fleet.ticks(CONFIG.window_ticks)
    assert [fleet.state(f"w{n}") for n in range(4)] == [HealthState.HEALTHY] * 4
    assert fleet.decisions[-1].workers == () and fleet.fleet.withheld == {}  # type: ignore[union-attr]


def test_a_breaker_that_opened_long_ago_stays_open_when_others_fail() -> None:
    config = msgspec.structs.replace(CONFIG, hold_ticks=64)
    fleet = LedFleet(workers=3, config=config)
    opened(fleet)
    fleet.ticks(config.window_ticks + 1)
    for _ in range(3):
        fleet.fails("w1")
    assert fleet.state("w0") == HealthState.UNHEALTHY
    assert fleet.state("w1") == HealthState.SUSPECT
    assert fleet.excluded("w2") == ""


def test_neither_does_one_that_was_probed_and_failed_since() -> None:
    """Its last decision is new; the breaker is not."""
    fleet = LedFleet(workers=3, config=CONFIG)
    opened(fleet)
    while fleet.fleet.tick <= CONFIG.window_ticks + 2:
        fleet.ticks(1)
        if fleet.state() == HealthState.PROBING:
            fleet.fails()
    for _ in range(3):
        fleet.fails("w1")
    assert fleet.excluded("w0") != "" and fleet.state("w1") == HealthState.SUSPECT


def test_the_only_worker_is_never_excluded_by_a_verdict() -> None:
    fleet = LedFleet(workers=1, config=CONFIG)
    for _ in range(9):
        fleet.fails()
    fleet.tell("r.r0", judged())
    assert fleet.state() == HealthState.SUSPECT
    assert fleet.excluded() == ""


# --- who decides ---------------------------------------------------------------------


def test_a_successor_repeats_that_verdicts_are_withheld() -> None:
    fleet = LedFleet(workers=2, replicas=2, config=CONFIG)
    for name in ("w0", "w1"):
        for _ in range(3):
            fleet.fails(name)
    fleet.leader("r1")
    withheld = [d for d in fleet.decisions if isinstance(d, v.VerdictsWithheld)]
    assert [d.workers for d in withheld] == [("w0", "w1")] * 2


def test_what_a_leader_owed_and_did_not_write_its_successor_writes_once() -> None:
    fleet = LedFleet(replicas=2, config=CONFIG)
    fleet.fleet.leader = ""  # from here on nothing is written
    names = [fleet.request() for _ in range(3)]
    fleet.fleet.leader = "r0"
    for name in names:
        Story.tell(
            fleet,
            "r.r0",
            v.TransportObserved(
                request=name, attempt=1, worker="w0", incarnation=1, kind="engine_error",
                delivered=0, status=500,
            ),
        )  # fmt: skip
    assert fleet.decisions == [] and fleet.health().owed[0] == HealthState.UNHEALTHY
    fleet.leader("r1")
    assert [d.state for d in fleet.decisions if isinstance(d, v.HealthDecided)] == ["unhealthy"]
    assert fleet.excluded() == "unhealthy"


def test_nothing_is_collected_while_a_replica_does_not_decide_health() -> None:
    fleet = LedFleet(config=CONFIG)
    fleet.tell("r.old", replica_started("old"))
    fleet.tell("r.r0", judged())
    fleet.tell("w.w1", died("w1"))
    for _ in range(4):
        fleet.fails()
    assert fleet.decisions == []
    assert all(worker.health is UNSET for worker in fleet.fleet.workers.values())
    assert b'"health"' not in msgspec.json.encode(fleet.fleet)
    fleet.tell("r.old", v.ReplicaStopped("old", "upgraded"))
    opened(fleet)


def test_the_fold_of_the_same_log_is_the_same() -> None:
    fleet = LedFleet(replicas=2, config=CONFIG)
    opened(fleet)
    fleet.ticks(8)
    fleet.fails()
    fleet.tell("r.r1", judged(worker="w1"))
    fleet.tell("w.w2", died("w2"))
    assert state_hash(folded_again(fleet)) == state_hash(fleet.fleet)


# --- routing -------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["predicted_ttft", "jsq", "power_of_two", "least_load"])
def test_a_suspect_is_second_choice_and_its_prediction_stays(policy: str) -> None:
    fleet = LedFleet(workers=2, config=CONFIG)
    query = RouteQuery(request="q", model=MODEL, prompt_tokens=100)

    def choices() -> list[Choice]:
        found = []
        for turn in range(6):
            view = View("r.r0", fleet.fleet)
            fleet.fleet.replicas["r0"].decisions = turn
            view.now_us = 0
            found.append(choose_worker.decide(view, query, policy))
        return found

    before = choices()
    assert {c.worker for c in before} == {"w0", "w1"}
    fleet.ends(fleet.fails("w0"))
    assert fleet.state("w0") == HealthState.SUSPECT
    after = choices()
    assert {c.worker for c in after} == {"w1"}
    assert {c.ttft_us for c in after} == {c.ttft_us for c in before}
    for choice in after:
        costs = {c.worker: (c.cost, c.ttft_us) for c in choice.candidates}
        assert costs["w0"][0] > costs["w1"][0] and costs["w0"][1] == costs["w1"][1]


# --- routing in turn -----------------------------------------------------------------


def in_turn(fleet: LedFleet, count: int, version: int = 0) -> Counter[str]:
    """How many of the next requests each worker gets, each in its turn."""
    found: Counter[str] = Counter()
    for number in range(count):
        view = View("r.r0", fleet.fleet)
        query = RouteQuery(
            request=f"turn{number}", model=MODEL, prompt_tokens=9, delivered=0, avoid=()
        )
        worker = choose_worker.decide(view, query, "round_robin", version).worker
        found[worker] += 1
        fleet.request(worker)
    return found


def test_a_suspect_has_its_turn_in_every_second_round() -> None:
    """It has twice the price. Where all are suspects, each has every turn. None of the requests here is
    answered, and that is no limit here."""
    fleet = LedFleet(config=msgspec.structs.replace(CONFIG, unanswered=0))
    assert in_turn(fleet, 12) == {"w0": 4, "w1": 4, "w2": 4}
    fleet.fails("w0")
    assert fleet.state("w0") == HealthState.SUSPECT
    assert in_turn(fleet, 12, version=1)["w0"] == 4
    assert in_turn(fleet, 24) == {"w0": 4, "w1": 10, "w2": 10}
    fleet.fails("w1")
    fleet.fails("w2")
    assert {fleet.state(name) for name in fleet.fleet.workers} == {HealthState.SUSPECT}
    assert in_turn(fleet, 12) == {"w0": 4, "w1": 4, "w2": 4}
