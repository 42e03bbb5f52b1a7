"""What failed with a worker is one incident, whoever noticed it, and says what clients felt."""

from __future__ import annotations

from relume.controlplane.incidents.sentences import summary
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind, FailureClass
from tests.incidents.failure_log import BEGIN_MS, FailureLog
from tests.policies.story import decided, dropped, started


def test_a_killed_engine_whose_streams_continue() -> None:
    log = FailureLog()
    for name in ("a", "b", "c"):
        log.stream(name)
    log.after(1000).tell("r.r0", v.WorkerSuspected("w0", 1, "its agent saw it die"))
    log.after(3).dies()
    for name, worker in (("a", "w1"), ("b", "w2"), ("c", "w1")):
        log.breaks(name, "engine_dead")
        log.goes_on(name, worker)
    log.restarts()
    incident = log.one()
    assert summary(incident) == (
        "w0's engine was killed; 3 streams continued on w1 and w2; longest gap 0.18 s."
    )
    assert (incident.subject, incident.failure) == ("w0:1", FailureClass.CRASH)
    assert incident.began_ms == incident.noticed_ms == BEGIN_MS + 1000
    assert incident.first_stream_on_ms == BEGIN_MS + 1083
    assert incident.last_stream_on_ms == incident.first_stream_on_ms + 2 * 580
    assert incident.noticed_ms <= incident.decided_ms <= incident.first_stream_on_ms
    assert not incident.open and incident.capacity_back_ms == log.at_ms
    assert [s.to for s in incident.touched] == [["w1"], ["w2"], ["w1"]]
    kinds = [event.type for event in incident.events]
    assert kinds[:3] == ["worker_suspected", "health_decided", "engine_died"]
    assert kinds.count("request_ended") == 3 and "engine_ready" in kinds


def test_capacity_is_back_when_health_is_decided_again() -> None:
    log = FailureLog()
    log.after(1000).dies()
    assert log.state() == "dead" and log.one().open
    log.after(700).tell("w.w0", started("w0", 2))
    assert log.one().open
    log.restarts()
    assert log.state() == "healthy"
    assert not log.one().open and log.one().capacity_back_ms == BEGIN_MS + 3700


def test_streams_that_fail_or_whose_client_leaves_are_counted() -> None:
    log = FailureLog()
    for name in ("on", "failed", "left", "waits"):
        log.stream(name)
    log.dies()
    for name in ("on", "failed", "left", "waits"):
        log.breaks(name)
    log.ended("failed", -1, "failed")
    log.ended("left", -1, "cancelled")
    log.goes_on("on", "w1")
    incident = log.one()
    assert (incident.streams, incident.continued, incident.failed, incident.left) == (4, 1, 1, 1)
    assert "1 stream continued on w1; 1 failed; 1 client left; 1 not continued yet" in summary(
        incident
    )


def test_a_hung_engine_found_by_all_and_then_restarted_is_one_incident() -> None:
    log = FailureLog(replicas=2)
    log.stream("a")
    log.after(3000).judges("r0")
    log.breaks("a", "stall")
    log.judges("r1")
    log.after(200).hung()
    log.goes_on("a", "w1")
    log.after(30_000).dies("hung")
    log.restarts()
    incident = log.one()
    assert incident.failure == FailureClass.HANG and not incident.open
    assert incident.began_ms == BEGIN_MS + 3200 - 2500, "by what its agent measured"
    assert incident.noticed_ms == BEGIN_MS + 3000
    assert summary(incident).startswith("w0's engine hung; 1 stream continued on w1")
    kinds = [event.type for event in incident.events]
    assert kinds.count("stall_judged") == 2 and {"engine_hung", "engine_died"} <= set(kinds)


def test_an_engine_that_hangs_twice_and_recovers_is_two_incidents() -> None:
    log = FailureLog()
    for _ in range(2):
        log.after(5000).hung()
        log.after(900).tell("w.w0", v.EngineRecovered("w0", 1, 900_000))
    first, second = log.incidents()
    assert not first.open and not second.open
    assert first.capacity_back_ms == BEGIN_MS + 5900
    assert second.noticed_ms == BEGIN_MS + 10_900


def test_a_hang_is_over_when_every_judge_has_cleared_the_engine() -> None:
    log = FailureLog(replicas=2)
    log.judges("r0")
    log.judges("r1")
    log.tell("r.r0", v.WorkerCleared("w0", 1, "idle and answering"))
    assert log.one().open
    log.tell("r.r1", v.WorkerCleared("w0", 1, "idle and answering"))
    assert not log.one().open


def test_the_judgement_of_a_lost_replica_is_void() -> None:
    log = FailureLog(replicas=2)
    log.judges("r1")
    assert log.incidents()[0].open
    log.tell("fleet", v.ReplicaLost("r1", log.epochs["r.r1"]))
    assert [i.subject for i in log.incidents() if i.open] == ["r1"]


def test_a_lost_host_explains_what_was_seen_before() -> None:
    log = FailureLog()
    log.stream("a")
    log.after(100).breaks("a", "unreachable")
    log.goes_on("a", "w2")
    log.lapse("w.w0")
    log.after(6000).tell("fleet", v.WorkerLost("w0", log.epochs["w.w0"], "lease lapsed"))
    incident = log.one()
    assert incident.failure == FailureClass.HOST and incident.open
    assert incident.began_ms == BEGIN_MS + 100
    assert summary(incident).startswith("w0's host was lost (lease lapsed); 1 stream continued")
    log.own("w.w0")
    log.tell("w.w0", v.WorkerRegistered(worker="w0", domain="host", agent_pid=8))
    assert log.one().open, "its engine is not ready"
    log.dies("unknown")
    log.restarts()
    assert not log.one().open and log.one().failure == FailureClass.HOST


def test_a_host_that_was_only_cut_off_returns_with_its_engine() -> None:
    log = FailureLog()
    log.tell("fleet", v.WorkerLost("w0", log.epochs["w.w0"], "lease lapsed"))
    assert log.one().open
    old, new = log.epochs["w.w0"], log.own("w.w0")
    log.tell("w.w0", v.StreamResumed(old, new))
    assert not log.one().open
    log.tell("fleet", v.WorkerLost("w0", old, "late, about the former epoch"))
    assert not log.one().open


def test_a_breaker_opened_by_errors_is_one_incident_until_it_closes() -> None:
    log = FailureLog()
    for name in ("a", "b", "c"):
        log.after(2000).stream(name)
        log.breaks(name, "engine_error")
        log.goes_on(name, "w1")
    assert log.state() == "unhealthy"
    incident = log.one()
    assert incident.failure == FailureClass.ERRORS and incident.open and incident.streams == 3
    assert incident.noticed_ms == BEGIN_MS + 2000
    for _ in range(12):
        log.after(1000).ticks(1)
    assert log.state() == "probing" and log.one().open
    for name in ("p1", "p2"):
        log.request(name=name)
        log.ends(name)
    assert log.state() == "healthy"
    assert not log.one().open and log.one().capacity_back_ms == log.at_ms


def test_a_quarantine_that_outlives_a_restart_is_one_incident() -> None:
    log = FailureLog()

    def decide(state: str, failure: str, incarnation: int) -> None:
        log.after(1000).tell(
            "fleet",
            v.HealthDecided(
                worker="w0", incarnation=incarnation, state=state, failure=failure, since=1,
                evidence="its logits differ",
            ),
        )  # fmt: skip

    decide("quarantined", "corruption", 1)
    assert summary(log.one()).startswith("w0 computed wrong results (its logits differ)")
    log.dies("replaced")
    decide("quarantined", "crash", 1)
    log.restarts()
    decide("quarantined", "corruption", 2)
    decide("probing", "corruption", 2)
    assert log.one().open and log.one().failure == FailureClass.CORRUPTION
    decide("healthy", "", 2)
    assert not log.one().open and log.one().capacity_back_ms == log.at_ms


def test_wrong_results_that_are_found_as_the_worker_leaves_are_an_incident() -> None:
    """Composed 184157: the log had at once that the answers of an engine were wrong, and that its agent
    had stopped it and left."""
    log = FailureLog()
    log.stream("a")
    log.ends("a")
    verdict = v.HealthDecided(
        worker="w0", incarnation=1, state="quarantined", failure="corruption", since=1,
        evidence="its logits differ", good_tick=0,
    )  # fmt: skip
    log.after(1000).tell("w.w0", v.EngineDied("w0", 1, "stopped"))
    log.tell("w.w0", v.WorkerDeregistered("w0", "agent stopped"))
    log.tell("fleet", verdict)
    assert log.one().failure == FailureClass.CORRUPTION and log.one().served == 1
    assert not log.one().open and log.one().capacity_back_ms == -1
    assert summary(log.one()).startswith("w0 computed wrong results (its logits differ)")


def test_a_request_that_its_client_is_at_fault_for_is_no_incident() -> None:
    log = FailureLog()
    log.stream("a")
    log.breaks("a", "engine_error")
    log.ends("a", "rejected", 400)
    assert log.incidents() == []


def test_an_overloaded_engine_is_no_incident() -> None:
    log = FailureLog()
    log.fails(status=503)
    assert log.incidents() == []


def test_a_slow_worker_is_an_incident_beside_its_death() -> None:
    log = FailureLog()
    slow = v.HealthDecided(
        worker="w0", incarnation=1, state="suspect", failure="slow", since=1,
        evidence="its steps take 3.1 times those of its class", price_percent=200,
    )  # fmt: skip
    log.after(1000).tell("fleet", slow)
    assert summary(log.one()) == (
        "w0 was slow (its steps take 3.1 times those of its class); no stream was touched."
    )
    log.after(9000).dies()
    log.restarts()
    slowness, death = log.incidents()
    assert (slowness.failure, death.failure) == (FailureClass.SLOW, FailureClass.CRASH)
    assert not slowness.open and slowness.capacity_back_ms == -1, "it died slow"
    assert not death.open and death.noticed_ms == BEGIN_MS + 10_000


def test_a_slow_worker_that_an_operator_restarts_is_over_when_it_is_fast() -> None:
    log = FailureLog()
    slow = v.HealthDecided(
        worker="w0", incarnation=1, state="suspect", failure="slow", since=1, evidence="3 times"
    )
    log.tell("fleet", slow)
    log.after(1000).dies("replaced")
    assert log.one().open
    log.restarts()
    log.tell(
        "fleet",
        v.HealthDecided(
            worker="w0", incarnation=2, state="healthy", failure="", since=2, evidence=""
        ),
    )
    assert not log.one().open and log.one().capacity_back_ms == BEGIN_MS + 3000


def test_a_slow_worker_that_is_fast_again_is_over() -> None:
    log = FailureLog()
    for at, (state, failure) in enumerate((("suspect", "slow"), ("healthy", ""))):
        log.after(1000).tell(
            "fleet",
            v.HealthDecided(
                worker="w0", incarnation=1, state=state, failure=failure, evidence="", since=at
            ),
        )
    assert not log.one().open and log.one().capacity_back_ms == BEGIN_MS + 2000


def test_slowness_that_pauses_or_hides_behind_errors_is_one_incident() -> None:
    log = FailureLog()
    for at, (state, failure) in enumerate(
        (("suspect", "slow"), ("suspect", "errors"), ("suspect", "slow"), ("healthy", ""),
         ("suspect", "slow"), ("healthy", ""))
    ):  # fmt: skip
        log.after(4000).tell(
            "fleet",
            v.HealthDecided(
                worker="w0", incarnation=1, state=state, failure=failure, evidence="", since=at
            ),
        )
    assert log.one().failure == FailureClass.SLOW
    assert log.one().capacity_back_ms == BEGIN_MS + 24_000


def test_a_death_long_after_wrong_answers_is_another_incident() -> None:
    log = FailureLog()
    log.stream("a")
    log.breaks("a", "engine_error")
    log.goes_on("a", "w1")
    log.after(20_000).dies()
    log.restarts()
    errors, death = log.incidents()
    assert (errors.failure, death.failure) == (FailureClass.ERRORS, FailureClass.CRASH)
    assert not errors.open and death.noticed_ms > errors.noticed_ms + 20_000
    assert (errors.streams, death.streams) == (1, 0)


def test_a_death_just_after_wrong_answers_explains_them() -> None:
    log = FailureLog()
    log.stream("a")
    log.breaks("a", "engine_error")
    log.after(800).dies()
    assert log.one().failure == FailureClass.CRASH and log.one().noticed_ms == BEGIN_MS


def test_an_operators_restart_is_no_incident_though_connections_break() -> None:
    log = FailureLog()
    log.stream("a")
    log.stream("b")
    effect = v.Effect(EffectKind.RESTART, "w0", 1)
    log.tell(
        "fleet",
        v.EffectsDecided(
            decision="command-1", basis=v.Basis(0, 0), cause="olga: restart w0", effects=(effect,)
        ),
    )
    log.tell("r.r0", v.WorkerSuspected("w0", 1, "its agent saw it die"))
    log.breaks("a", "engine_dead")
    log.dies("replaced")
    log.breaks("b", "engine_dead")
    log.goes_on("a", "w1")
    log.goes_on("b", "w1")
    log.restarts()
    assert log.incidents() == []


def test_a_planned_stop_and_a_drain_are_no_incidents() -> None:
    log = FailureLog()
    log.stream("a")
    log.breaks("a", "moved")
    log.tell("r.r0", v.WorkerSuspected("w0", 1, "its agent saw it die"))
    log.dies("stopped")
    log.tell("w.w0", v.WorkerDeregistered("w0", "agent stopped"))
    log.tell("fleet", v.WorkerLost("w0", log.epochs["w.w0"], "lease lapsed"))
    assert log.incidents() == []


def test_a_restart_of_a_hung_engine_by_an_operator_ends_the_incident() -> None:
    log = FailureLog()
    log.hung()
    log.after(4000).dies("replaced")
    log.restarts()
    assert log.one().failure == FailureClass.HANG
    assert not log.one().open and log.one().capacity_back_ms == BEGIN_MS + 6000


def test_engines_that_die_before_they_are_ready_belong_to_the_first_death() -> None:
    log = FailureLog()
    log.dies()
    for incarnation in (2, 3):
        log.after(1000).tell("w.w0", started("w0", incarnation))
        log.dies("exit", inc=incarnation)
    assert log.one().open
    log.restarts(inc=4)
    assert not log.one().open
    log.after(1000).dies(inc=4)
    first, second = log.incidents()
    assert (first.subject, second.subject) == ("w0:1", "w0:4")


def test_a_death_that_nobody_recorded_shows_when_the_next_engine_starts() -> None:
    log = FailureLog()
    log.tell("w.w0", started("w0", 2))
    incident = log.one()
    assert summary(incident) == "w0's engine died; no stream was touched."
    log.dies("replaced", worker="w1")
    log.tell("w.w1", started("w1", 2))
    assert len(log.incidents()) == 1, "that one was planned"


def test_a_broken_connection_is_over_when_the_worker_is_cleared() -> None:
    log = FailureLog()
    log.stream("a")
    log.breaks("a", "reset")
    log.goes_on("a", "w1")
    assert log.one().open and log.one().failure == FailureClass.UNREACHABLE
    log.tell("r.r0", v.WorkerCleared("w0", 1, "4 steps made"))
    assert not log.one().open
    assert summary(log.one()).startswith("connections to w0 broke (reset); 1 stream continued")


def test_a_stream_that_two_failures_touch_is_in_both() -> None:
    log = FailureLog()
    log.stream("a")
    log.dies()
    log.breaks("a", "engine_dead")
    log.tell("r.r0", decided("a", 2, "w1"))
    log.first_token("a", "w1", 2)
    log.dies(worker="w1")
    log.tell(
        "r.r0",
        v.TransportObserved(
            request="a", attempt=2, worker="w1", incarnation=1, kind="engine_dead", delivered=7
        ),
        decided("a", 3, "w2"),
    )
    log.first_token("a", "w2", 3)
    log.ended("a", 400_000)
    first, second = log.incidents()
    assert (first.workers, second.workers) == ({"w1": 1}, {"w2": 1})
    assert first.longest_gap_us == second.longest_gap_us == 400_000


def test_a_stream_without_a_token_shows_its_wait_as_time_to_first_token() -> None:
    log = FailureLog()
    log.request(name="a")
    log.dies()
    log.tell(
        "r.r0",
        v.TransportObserved(
            request="a", attempt=1, worker="w0", incarnation=1, kind="reset", delivered=0
        ),
        decided("a", 2, "w1"),
    )
    log.ended("a", 9_000)
    assert log.one().longest_ttft_us == 30_000
    assert "longest time to a first token 0.03 s" in summary(log.one())


def test_an_engine_whose_reports_cannot_be_read_is_one_incident() -> None:
    """The first of them may be all that comes; several make the leader exclude it."""
    log = FailureLog()
    for _ in range(3):
        log.after(1000).tell("w.w0", dropped())
        log.ticks(1)
    assert log.state() == "unhealthy"
    incident = log.one()
    assert (incident.failure, incident.open) == (FailureClass.REPORTS, True)
    assert incident.noticed_ms == BEGIN_MS + 1000
    kinds = [event.type for event in incident.events]
    assert kinds.count("reports_dropped") == 3 and kinds.count("health_decided") == 2
    assert summary(incident).startswith(
        "reports of w0's engine could not be read (malformed record); no stream was touched"
    )
    log.ticks(60)
    assert log.state() == "healthy" and not log.one().open
