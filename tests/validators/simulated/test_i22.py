"""I22: every error that no fault and no limit explains is named."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from relume.chaos.validators.ground_truth import ClientCall, GroundTruth
from relume.chaos.validators.promises.requests.i22_needless_failure import check
from relume.chaos.validators.records import ClientRecord
from relume.chaos.validators.service_limits import limits_of
from relume.chaos.validators.strikes import THE_LOG, Strike
from relume.controlplane.stream.error_codes import NO_NEWS
from relume.events import vocabulary as v
from tests.policies.story import Story, arrived, decided, ended, observed

NS = 1_000_000_000
CLIENTS = [ClientRecord(request="q1")]
DIED = Strike(what="engine-kill", targets=frozenset(("w0",)), since_ms=0, until_ms=0)


def story(wait_s: float, status: int = 503, message: str = "", failures: int = 0) -> Story:
    """q1 fails after that time, and after so many attempts that failed on w0."""
    log = Story()
    log.worker()
    log.replica()
    log.tell("r.r0", arrived())
    log.at_ms = round(1000 * wait_s)
    for number in range(1, failures + 1):
        log.tell("r.r0", decided(attempt=number), observed(attempt=number, kind="reset"))
    end = v.RequestEnded(
        **{f: getattr(ended(), f) for f in v.RequestEnded.__struct_fields__}
    )  # fmt: skip
    log.tell("r.r0", replace(end, outcome="failed", status=status, detail=message))
    return log


def truth(
    status: int = 503, at_s: float = 0.1, until_ns: int = 60 * NS, **more: Any
) -> GroundTruth:
    """The engine of w0 serves until then; the client of q1 gets that error."""
    call = ClientCall(status=status, ended_ns=round(at_s * NS), gateway="r.r0")
    serving = {"w0": [(0, True), (until_ns, False)]}
    return GroundTruth(serving=serving, calls={"q1": call, **more.pop("calls", {})}, **more)


def found(log: Story, known: GroundTruth | None, **more: Any) -> str:
    return "; ".join(map(str, check(log.groups, CLIENTS, known, **more)))


def test_an_early_503_is_named() -> None:
    assert "503 after 100 ms" in found(story(0.1), truth())


def test_so_is_one_that_the_log_never_had() -> None:
    log = Story()
    log.worker()
    assert "503 after 100 ms" in found(log, truth())


def test_one_that_a_level_of_degradation_explains_is_left_to_i11() -> None:
    log = story(0.1)
    refused = v.RequestShed(
        decision="r0.b.1", basis=v.Basis(1, 1), request="q1", at_us=0, reason="degraded", model="m",
        tier="batch", tenant="", tokens=1, size=1, deadline_us=0, waited_us=-1, ahead_requests=0,
        ahead_tokens=0, predicted_us=-1, depth=0, retry_after_s=1,
    )  # fmt: skip
    log.tell("r.r0", replace(refused, request="another"))
    assert "503 after 100 ms" in found(log, truth())
    log.tell("r.r0", refused)
    assert found(log, truth()) == ""


def test_one_after_the_whole_wait_is_not() -> None:
    assert found(story(30), truth(at_s=30)) == ""


@pytest.mark.parametrize(("until_ms", "fine"), [(86_000, True), (50_000, False), (4000, False)])
def test_neither_is_one_of_a_replica_that_stood_still(until_ms: int, fine: bool) -> None:
    """Composed 50678: it has its records of the time before in the log only now."""
    stop = replace(
        DIED, what="leader-stop", targets=frozenset(("r0",)), since_ms=1000, until_ms=until_ms
    )
    known = truth(at_s=86.2, until_ns=200 * NS)
    assert (found(story(86.2, failures=1), known, strikes=[stop]) == "") is fine


def test_the_wait_is_that_of_the_settings() -> None:
    limits = replace(limits_of({}), wait_s=0.05)
    assert found(story(0.1), truth(), limits=replace(limits, wait_s=1.0)) == ""
    assert found(story(2.5), truth(at_s=2.5), limits=replace(limits, wait_s=9.0)) != ""


def test_one_without_a_worker_is_not() -> None:
    assert found(story(0.1), truth(until_ns=NS)) == ""
    assert found(story(0.1), truth(), away=["w0"]) == ""
    assert found(story(0.1), None) == ""


def test_a_410_while_the_log_has_the_request_is_named() -> None:
    assert "410 after 5000 ms" in found(story(9, 499), truth(410, 5))


@pytest.mark.parametrize(("before_s", "fine"), [(3.5, True), (2.5, False)])
def test_one_of_a_stream_whose_record_landed_late_is_not(before_s: float, fine: bool) -> None:
    """Composed 150577: its writer was late, and etcd stopped 1.5 s before the client came."""
    log = Story()
    log.worker()
    log.replica()
    log.at_ms = round(1000 * before_s)
    log.tell("fleet", v.Tick(number=1, unix_ms=0))
    log.at_ms = 0
    log.tell("r.r0", arrived())
    assert (found(log, truth(410, 5)) == "") is fine


@pytest.mark.parametrize(("target", "fine"), [(THE_LOG, True), ("w1", False)])
def test_nor_is_a_503_of_a_replica_that_hears_nothing_from_the_log(target: str, fine: bool) -> None:
    """Composed 150797: the stream ran at another one while etcd was stopped for 22 s."""
    log = story(9, 499)
    known = truth(at_s=5.0)
    known.calls["q1"] = known.calls["q1"]._replace(message=NO_NEWS)
    stopped = Strike(what="etcd-stop", targets=frozenset((target,)), since_ms=1000, until_ms=8000)
    assert (found(log, known, strikes=[stopped]) == "") is fine


def test_one_after_its_end_is_not() -> None:
    assert found(story(9, 499), truth(410, 10)) == ""


def test_a_410_of_a_request_that_the_log_never_had_is_named() -> None:
    log = Story()
    log.worker()
    assert "never had it" in found(log, truth(410, 5))


def test_a_429_though_the_queue_has_room_is_named() -> None:
    said = found(story(0.1, 429), truth(429), limits=limits_of({"requests": 4}))
    assert "4 may wait, at most 1 did" in said


def test_one_of_a_full_queue_is_not() -> None:
    calls = {f"q{n}": ClientCall(gateway="r.r0", ended_ns=9 * NS) for n in range(2, 6)}
    limits = limits_of({"requests": 4})
    assert found(story(0.1, 429), truth(429, calls=calls), limits=limits) == ""
    taken = {name: [(f"{name}/1", "w0", 0)] for name in calls}
    late = truth(429, 5, calls=calls, attempts=taken)
    assert "at most 1 did" in found(story(5, 429), late, limits=limits)


def test_one_beyond_its_tenants_share_is_not() -> None:
    calls = {
        f"q{n}": ClientCall(gateway="r.r0", tenant="many", ended_ns=9 * NS) for n in range(2, 5)
    }
    known = truth(429, calls=calls)
    known.calls["q1"] = known.calls["q1"]._replace(tenant="many")
    limits = limits_of({"requests": 6, "tenant_percent": 50})
    assert found(story(0.1, 429), known, limits=limits) == ""
    known.calls["q1"] = known.calls["q1"]._replace(tenant="few")
    assert "6 may wait" in found(story(0.1, 429), known, limits=limits)


def test_one_beside_an_idle_engine_is_named() -> None:
    calls = {f"q{n}": ClientCall(gateway="r.r0", ended_ns=9 * NS) for n in range(2, 6)}
    known = truth(429, 5, calls=calls, idle={"w0": [(0, True)]})
    limits = limits_of({"requests": 4})
    assert "w0 had no request" in found(story(5, 429), known, limits=limits)
    known.idle["w0"].append((5 * NS + 1000, False))
    assert found(story(5, 429), known, limits=limits) == ""


@pytest.mark.parametrize(("idle_s", "fine"), [(3.9, True), (4.1, False)])
def test_reports_that_are_under_way_keep_an_engine_busy(idle_s: float, fine: bool) -> None:
    """Composed 160341: reports came 3 s late, and a client that was away let no replica write the
    end of its request."""
    calls = {f"q{n}": ClientCall(gateway="r.r0", ended_ns=99 * NS) for n in range(2, 6)}
    since_ns = round((20 - idle_s) * NS)
    known = truth(429, 20, calls=calls, idle={"w0": [(0, False), (since_ns, True)]})
    limits = limits_of({"requests": 4})
    assert "w0 had no request" in found(story(20, 429), known, limits=limits)
    assert "w0 had" in found(story(20, 429), known, limits=limits, report_ms={"w1": 3000})
    assert (found(story(20, 429), known, limits=limits, report_ms={"w0": 3000}) == "") is fine


@pytest.mark.parametrize(
    ("away", "fine"),
    [
        ([(14_000, 30_000)], True),
        ([(17_000, 30_000)], False),
        ([(14_000, 17_000), (18_500, 30_000)], True),
        ([(14_000, 16_000), (18_500, 30_000)], False),
        ([(14_000, 17_000)], False),
        ([(21_000, 30_000)], False),
    ],
)
def test_a_log_that_is_away_says_of_no_engine_that_it_is_idle(
    away: list[tuple[int, int]], fine: bool
) -> None:
    """Composed 164799: its replica had last read that another one's requests ran there."""
    known = truth(429, 20, idle={"w0": [(0, False), (15 * NS, True)]})
    calls = {f"q{n}": ClientCall(gateway="r.r0", ended_ns=99 * NS) for n in range(2, 6)}
    known.calls.update(calls)
    limits = limits_of({"requests": 4})
    stops = [
        Strike(
            what="etcd-stop", targets=frozenset((THE_LOG,)), since_ms=a, until_ms=b, stops_log=True
        )
        for a, b in away
    ]
    assert (found(story(20, 429), known, limits=limits, strikes=stops) == "") is fine
    others = [replace(stop, stops_log=False) for stop in stops]
    assert "w0 had" in found(story(20, 429), known, limits=limits, strikes=others)


def test_a_failure_without_a_fault_is_named() -> None:
    assert "0 of its attempts" in found(story(0.1, 502, failures=4), truth(502))


def test_one_after_fewer_faults_than_the_settings_permit_is_named() -> None:
    log, known = story(0.1, 502, failures=1), truth(502)
    assert "1 of its attempts" in found(log, known, strikes=[DIED])
    assert found(story(0.1, 502, failures=4), known, strikes=[DIED]) == ""


def test_one_failure_is_enough_for_a_request_that_cannot_continue() -> None:
    known = truth(502)
    known.calls["q1"] = known.calls["q1"]._replace(kind="restarting")
    assert found(story(0.1, 502, failures=1), known, strikes=[DIED]) == ""
    assert found(story(0.1, 502, failures=1), known) != ""


@pytest.mark.parametrize(("incarnation", "fine"), [(1, True), (2, False)])
def test_an_operators_restart_ends_what_cannot_continue(incarnation: int, fine: bool) -> None:
    """Composed 61041: a sampled stream whose gateway was killed ran on an engine that was restarted."""
    log = story(4, 502, failures=1)
    effect = v.Effect("restart", "w0", incarnation)
    decision = v.EffectsDecided(decision="c", basis=v.Basis(1, 0), cause="ann", effects=(effect,))
    log.tell("fleet", decision)
    known = truth(502, 4)
    assert "502" in found(log, known), "another request continues elsewhere"
    known.calls["q1"] = ClientCall(status=502, ended_ns=4 * NS, gateway="r.r0", kind="resumable")
    assert (found(log, known) == "") is fine


def test_an_old_fault_counts_if_it_struck_while_the_attempt_ran() -> None:
    log = Story()
    log.worker()
    log.replica()
    log.tell("r.r0", arrived(), decided())
    log.at_ms = 60_000
    end = replace(ended(), outcome="failed", status=502)
    log.tell("r.r0", observed(kind="engine_dead"), end)
    known = truth(502, 60, until_ns=120 * NS)
    known.calls["q1"] = known.calls["q1"]._replace(kind="resumable")
    assert found(log, known, strikes=[DIED]) == ""


@pytest.mark.parametrize(("owner", "fine"), [("r0", True), ("r1", False)])
def test_a_killed_gateway_may_leave_the_last_failure_unwritten(owner: str, fine: bool) -> None:
    """Composed 120066: its client had the error, and the log two failures of three."""
    log = Story()
    log.worker()
    log.replica()
    log.tell("r.r0", arrived())
    for number in (1, 2, 3):
        log.tell("r.r0", decided(attempt=number))
        if number < 3:
            log.tell("r.r0", observed(attempt=number, kind="engine_error"))
    lossy = replace(DIED, what="frame-lost", until_ms=12_000)
    killed = replace(DIED, what="gateway-kill", targets=frozenset((owner,)), since_ms=200)
    strikes = [lossy, replace(killed, until_ms=200)]
    assert found(log, truth(502), strikes=[lossy]) != ""
    assert (found(log, truth(502), strikes=strikes) == "") is fine


def test_an_engine_that_a_fault_lets_break_off_has_the_last_word() -> None:
    log = Story()
    log.worker()
    log.replica()
    end = replace(ended(), outcome="failed", status=502)
    log.tell("r.r0", arrived(), decided(), end)
    assert found(log, truth(502)) != ""
    assert found(log, truth(502), strikes=[DIED]) != ""
    broken = replace(DIED, what="answer-broken")
    assert found(log, truth(502), strikes=[broken]) == ""
    # Composed 100019: its gateway stood still for half a minute, and answers then.
    late = truth(502, 40, ended={"q1/1": NS // 10})
    assert found(log, late, strikes=[broken]) == ""
    assert found(log, truth(502, 40), strikes=[broken]) != ""


def test_what_was_sampled_is_not_kept_beyond_the_grace_of_its_client() -> None:
    """Nothing generates it again (composed 9035, 24051)."""
    assert found(returned(40), away(40)) == ""
    assert found(returned(31), away(31)) != ""
    assert found(returned(40), truth(502, 40)) != "", "it is not known how long it was away"


def test_what_can_be_generated_again_is_kept_unless_its_engine_had_finished() -> None:
    exact, begun = returned(40, verdict="exact"), {"q1": [("q1/1", "w0", NS)]}
    assert found(exact, away(40, attempts=begun)) != ""
    assert found(exact, away(40, attempts=begun, ended={"q1/1": 3 * NS})) != "", "it was aborted"
    assert found(exact, away(40, attempts=begun, finished={"q1/1"})) == ""


def test_a_503_to_one_that_lost_its_gateway_and_its_worker_is_no_needless_failure() -> None:
    """Composed 9035: whoever it returned to took its gateway to be alive for some seconds."""
    known = truth(503, 9)
    known.calls["q1"] = known.calls["q1"]._replace(kind="resumable")
    died = replace(DIED, since_ms=5000, until_ms=5000)
    gateway_died = replace(died, what="gateway-kill", targets=frozenset(("r0",)))
    log = returned(9)
    assert found(log, known, strikes=[died, gateway_died]) == ""
    assert found(log, known, strikes=[died]) != ""
    assert found(log, known, strikes=[gateway_died]) != ""
    # Composed 1103: the next one found no worker before it died.
    log.tell("r.r0", replace(decided(attempt=2), worker=""))
    assert found(log, known, strikes=[died, gateway_died]) == ""


@pytest.mark.parametrize(("verdict", "fine"), [("sampled", True), ("exact", False)])
def test_what_was_sampled_is_lost_with_its_gateway_and_its_worker(verdict: str, fine: bool) -> None:
    """Composed 120533: both had died half a minute before its client returned."""
    known = truth(503, 50)
    known.calls["q1"] = known.calls["q1"]._replace(kind="resumable")
    died = replace(DIED, since_ms=5000, until_ms=5000)
    strikes = [died, replace(died, what="gateway-kill", targets=frozenset(("r0",)))]
    assert (found(returned(50, verdict=verdict), known, strikes=strikes) == "") is fine


def away(at_s: int, **more: Any) -> GroundTruth:
    """Its client, which had its last token after 2 s, gets a 502 then."""
    known = truth(502, at_s, **more)
    known.calls["q1"] = known.calls["q1"]._replace(kind="resumable", last_ns=2 * NS)
    return known


def returned(at_s: int, verdict: str = "sampled", is_tried: bool = True) -> Story:
    """The client of q1, which may be away for 30 s, returns then, and its worker lacks its stream."""
    log = Story()
    log.worker()
    log.replica()
    arrival = replace(arrived(), verdict=verdict, resumable="abc", grace_ticks=30, client_id="q1")
    log.tell("r.r0", arrival, decided())
    log.at_ms = 1000 * at_s
    back = v.ClientReturned(request="q1", claim="c", attempt=1, tokens=5, events=1)
    end = replace(ended(), outcome="failed", status=502)
    log.tell("r.r0", back, *([observed(kind="detached")] if is_tried else []), end)
    return log


@pytest.mark.parametrize(
    ("verdict", "after_ms", "lets_go", "fine"),
    [
        ("sampled", 16, True, True),
        ("exact", 16, True, False),
        ("sampled", 1500, True, False),
        ("sampled", 16, False, False),
    ],
)
def test_a_client_may_take_what_was_sampled_away_from_the_only_one_that_can_continue_it(
    verdict: str, after_ms: int, lets_go: bool, fine: bool
) -> None:
    """Composed 184414: its worker had too little of the stream, and its replica was to continue it; 16 ms
    later its client had lost that connection too, and came to another replica."""
    log = Story()
    log.worker()
    log.replica()
    log.replica("r1")
    arrival = replace(arrived(), verdict=verdict, resumable="abc", grace_ticks=30, client_id="q1")
    log.tell("r.r0", arrival, decided())
    log.at_ms = 3000
    back = v.ClientReturned(request="q1", claim="c", attempt=1, tokens=5, events=1)
    log.tell("r.r0", back, *([observed(kind="detached")] if lets_go else []))
    log.at_ms += after_ms
    end = replace(ended(), outcome="failed", status=502)
    log.tell("r.r1", replace(back, claim="d"), end)
    assert (found(log, away(4)) == "") is fine


def test_faults_count_at_the_time_of_the_attempts_however_late_the_log_has_them() -> None:
    """Composed 20163: etcd was away for 26 s, and the replica's records of the whole time came after
    it. The attempts had failed by a fault that was over long before."""
    log = Story()
    log.worker()
    log.replica()
    log.at_ms = 60_000
    end = replace(ended(), outcome="failed", status=502)
    failed = [
        event
        for number in (1, 2, 3)
        for event in (decided(attempt=number), observed(attempt=number, kind="engine_error"))
    ]
    log.tell("r.r0", arrived(), *failed, end)
    begun = [(f"q1/{number}", "w0", number * NS) for number in (1, 2, 3)]
    known = truth(502, 5, until_ns=120 * NS, attempts={"q1": begun})
    repeats = replace(DIED, what="frame-repeated", until_ms=5000)
    assert found(log, known, strikes=[repeats]) == ""
    late = replace(repeats, since_ms=50_000, until_ms=60_000)
    assert "0 of its attempts" in found(log, known, strikes=[late])


@pytest.mark.parametrize("struck", ["w0", "r0", "both"])
def test_what_its_engine_had_finished_is_lost_with_its_gateway_and_its_worker(struck: str) -> None:
    """Composed 167276: holders drop what is finished, and its engine died 4 s after that."""
    ended_at = {"attempts": {"q1": [("q1/1", "w0", NS)]}, "ended": {"q1/1": 3 * NS}}
    died = replace(DIED, what="agent-kill", since_ms=7000, until_ms=7000)
    killed = replace(
        DIED, what="gateway-kill", targets=frozenset(("r0",)), since_ms=2000, until_ms=2000
    )
    strikes = {"w0": [died], "r0": [killed], "both": [died, killed]}[struck]
    exact = returned(25, verdict="exact", is_tried=False)
    finished = away(25, **ended_at, finished={"q1/1"})
    assert (found(exact, finished, strikes=strikes) == "") is (struck == "both")
    assert found(exact, away(25, **ended_at), strikes=strikes) != "", "holders have it"
    early = [replace(strike, since_ms=2000, until_ms=2000) for strike in strikes]
    assert found(exact, finished, strikes=early) != "", "its engine had not finished it"


@pytest.mark.parametrize(
    ("verdict", "killed_ms", "attempt", "fine"),
    [
        ("sampled", 3000, 1, True),
        ("exact", 3000, 1, False),
        ("sampled", 6000, 1, False),
        ("sampled", 3000, 2, False),
    ],
)
def test_what_was_sampled_is_lost_with_the_gateway_that_moves_it(
    verdict: str, killed_ms: int, attempt: int, fine: bool
) -> None:
    """Composed 167674: it was killed when the drained engine had given the attempt up."""
    log = returned(9, verdict=verdict)
    choice = v.MigrationChoice(
        request="q1", attempt=attempt, tokens=9, left=9, chosen=0, options=()
    )
    plan = v.MigrationPlanned(
        decision="r0.b.9", basis=v.Basis(1, 1), worker="w0", incarnation=1, cause="drain", tick=1,
        choices=(choice,),
    )  # fmt: skip
    log.tell("r.r0", plan)
    known = away(9, attempts={"q1": [("q1/1", "w0", NS)]}, ended={"q1/1": 3 * NS})
    killed = replace(
        DIED,
        what="gateway-kill",
        targets=frozenset(("r0",)),
        since_ms=killed_ms,
        until_ms=killed_ms,
    )
    assert (found(log, known, strikes=[killed]) == "") is fine
