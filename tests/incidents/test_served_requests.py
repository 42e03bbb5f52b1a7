"""An incident of wrong results lists the requests that the worker served since it was right."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from relume.chaos.validators import corrupt_engines
from relume.controlplane.incidents import served_requests
from relume.controlplane.incidents.case import Case
from relume.controlplane.incidents.incident import Incident
from relume.controlplane.incidents.incident_fold import IncidentObserver
from relume.controlplane.incidents.sentences import lines, summary
from relume.controlplane.incidents.served_requests import ServedRequests
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import FailedPart, FailureClass, Guarantee, RequestOutcome
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group
from tests.incidents.failure_log import FailureLog, live
from tests.policies.story import decided, ended, engine_step, queued


def quarantined(log: FailureLog, good_tick: int, incarnation: int = 1) -> None:
    log.after(500).tell(
        "fleet",
        v.HealthDecided(
            worker="w0", incarnation=incarnation, state="quarantined", failure="corruption",
            evidence="wrong answer to canaries 0, 1", since=log.fleet.tick, good_tick=good_tick,
        ),
    )  # fmt: skip


def served(record: Incident) -> dict[str, str]:
    assert record.served == len(record.served_requests)
    return {one.request: one.state for one in record.served_requests}


def test_requests_since_the_last_right_answers_are_listed_and_earlier_ones_are_not() -> None:
    log = FailureLog()
    for name in ("early", "late", "running", "queued", "elsewhere"):
        log.request("w1" if name == "elsewhere" else "w0", "r0", name)
    log.ended("early")
    log.ticks(3)
    good_tick = log.fleet.tick
    log.ended("late")
    quarantined(log, good_tick)
    assert served(log.one()) == {"late": "completed"}
    assert summary(log.one()).startswith(
        "w0 computed wrong results (wrong answer to canaries 0, 1); "
        "1 request got tokens from it since its last right answers; "
    )
    log.breaks("running", "corrupt")
    log.tell(
        "r.r0",
        v.TransportObserved(
            request="queued", attempt=1, worker="w0", incarnation=1, kind="corrupt", delivered=0
        ),
    )
    assert served(log.one()) == {"late": "completed", "running": "live"}, "one had no token"
    log.goes_on("running", "w2")
    record = log.one()
    assert served(record) == {"late": "completed", "running": "completed"}
    assert record.streams == 2 and record.workers == {"w2": 1}, "queued and running moved"
    text = list(lines(record))
    assert "  late  completed" in text and "  running  completed" in text
    assert live(log.groups) == log.incidents()


@pytest.mark.parametrize("good_tick", [-1, 2, 9])
def test_after_a_snapshot_the_list_says_that_it_may_lack_some(good_tick: int) -> None:
    """What was served since a tick that the observer did not see is not all known to it."""
    log, observer = FailureLog(), IncidentObserver()
    log.ticks(8)
    seen = len(log.groups)
    observer.restart(log.revision)
    log.request("w0", "r0", "late")
    log.ticks(3)
    log.ended("late")
    quarantined(log, good_tick)
    for group in log.groups[seen:]:
        apply_group(Fleet(), group, observer.seen)
        observer.folded(group)
    (record,) = observer.incidents
    assert served(record) == {"late": "completed"}
    assert record.served_at_least == (good_tick < 9)
    assert not log.one().served_at_least, "all of the log was read"


def test_a_request_that_left_the_worker_before_the_verdict_is_listed() -> None:
    log = FailureLog()
    log.stream("moved")
    log.breaks("moved", "moved")
    log.goes_on("moved", "w1")
    log.ticks(2)
    quarantined(log, good_tick=-1)
    assert served(log.one()) == {"moved": "completed"}


@pytest.mark.parametrize("at_once", [False, True])
def test_one_whose_blocks_a_later_attempt_restored_is_listed(at_once: bool) -> None:
    """It got no token of the worker. `at_once`: the log has the restore before the failure."""
    log = FailureLog()
    log.request("w0", "r0", "q")
    log.request("w0", "r0", "other")
    lost = [
        v.TransportObserved(
            request=name, attempt=1, worker="w0", incarnation=1, kind="moved", delivered=0
        )
        for name in ("q", "other")
    ]
    restored = v.RestoreDone(
        incarnation=1, request="q", child=0, attempt=2, holder="w2", tokens=64, bytes=9,
        duration_us=9,
    )  # fmt: skip
    if at_once:
        log.tell("w.w1", restored)
    log.tell("r.r0", *lost, decided("q", 2, "w1"), decided("other", 2, "w1"))
    if not at_once:
        log.tell("w.w1", restored)
    log.ended("q")
    log.ended("other")
    quarantined(log, good_tick=-1)
    assert served(log.one()) == {"q": "completed"}


@pytest.mark.parametrize("has_ended", [False, True])
def test_one_that_borrowed_blocks_of_a_served_request_is_listed(has_ended: bool) -> None:
    """No attempt of it was on the worker. One that borrowed from it has such blocks, too."""
    log = FailureLog()
    for name in ("lender", "old"):
        log.request("w0", "r0", name)
    for name in ("borrower", "next", "late", "other"):
        log.request("w1", "r0", name)
    log.ended("old")
    log.ticks(2)
    good_tick = log.fleet.tick
    if has_ended:
        log.ended("lender")
    log.ticks(2)
    for name, lender in (
        ("borrower", "lender"),
        ("next", "borrower"),
        ("late", "old"),
        ("other", ""),
    ):
        common = {"incarnation": 1, "request": name, "child": 0, "attempt": 1, "holder": "w2"}
        log.tell(
            "w.w1",
            v.RestoreStarted(**common, tokens=64, lender=lender),
            v.RestoreDone(**common, tokens=64, bytes=9, duration_us=9),
        )
    for name in ("borrower", "next", "late", "other"):
        log.ended(name)
    quarantined(log, good_tick)
    expected = {"borrower": "completed", "next": "completed"}
    if has_ended:
        expected["lender"] = "completed"
    assert served(log.one()) == expected


def test_nothing_is_added_once_an_operator_trusts_the_worker() -> None:
    log = FailureLog()
    log.stream("before")
    log.ended("before")
    quarantined(log, good_tick=-1)
    log.tell(
        "fleet",
        v.HealthDecided(
            worker="w0", incarnation=1, state="probing", failure="corruption",
            evidence="ops ended its quarantine", since=log.fleet.tick,
        ),
    )  # fmt: skip
    log.stream("after")
    log.ended("after")
    assert served(log.one()) == {"before": "completed"}


def test_an_answer_of_which_no_token_was_counted_is_listed_if_it_is_complete() -> None:
    """Composed seed 258."""
    log = FailureLog()
    for name, outcome in (("whole", "completed"), ("failed", "failed")):
        log.request("w0", "r0", name)
        end = v.RequestEnded(
            request=name, outcome=RequestOutcome(outcome), status=200, tokens=0, finish="stop",
            attempts=1, verdict=Guarantee.EXACT,
        )  # fmt: skip
        log.tell("r.r0", end)
    quarantined(log, good_tick=-1)
    assert served(log.one()) == {"whole": "completed"}


@pytest.mark.parametrize("broke_before", [True, False])
def test_a_failed_stream_whose_tokens_had_no_ids_is_listed(broke_before: bool) -> None:
    """Composed seed 90056: its client had 74 wrong tokens, of which none was counted."""
    log = FailureLog()
    for name, ttft_us in (("text", 13_000), ("nothing", -1)):
        log.request("w0", "r0", name)
        if broke_before:
            stalled = v.TransportObserved(
                request=name, attempt=1, worker="w0", incarnation=1, kind="stall", delivered=0
            )
            log.tell("r.r0", stalled)
        end = v.RequestEnded(
            request=name, outcome=RequestOutcome.FAILED, status=502, tokens=0, finish="-",
            attempts=1, verdict=Guarantee.EXACT, ttft_us=ttft_us,
        )  # fmt: skip
        log.tell("r.r0", end)
    quarantined(log, good_tick=-1)
    found = [record for record in log.incidents() if record.served]
    assert [served(record) for record in found] == [{"text": "failed"}]
    assert set(corrupt_engines.served(log.groups, {("w0", 1): 1})) == {"text"}


@pytest.mark.parametrize("in_time", [True, False], ids=["ended before", "ended after"])
def test_a_request_that_its_engine_alone_reported_is_listed(in_time: bool) -> None:
    """Composed 171092: its gateway was killed before it wrote of it, and its client had all of it."""
    log = FailureLog()
    dispatch = b"of a gateway that is gone"
    log.tell("w.w0", engine_step(queued("lost", dispatch=dispatch)))
    log.tell("w.w1", engine_step(queued("elsewhere", dispatch=dispatch)))
    log.tell("w.w0", engine_step(queued("written", dispatch=dispatch)))
    log.request("w1", "r0", "written")
    gone = [ended(name, "failed") for name in ("lost", "elsewhere", "written")]
    if in_time:
        log.tell("fleet", *gone)
    quarantined(log, 0)
    if not in_time:
        log.tell("fleet", *gone)
    assert served(log.one()) == {"lost": "failed"}
    (record,) = live(log.groups)
    assert served(record) == {"lost": "failed"}, "a replica that follows the log knows it too"


def test_requests_that_engines_alone_reported_are_bounded() -> None:
    many = ServedRequests()
    for number in range(served_requests.MOST_UNWRITTEN + 1):
        many.on_step("w0", engine_step(queued(f"q{number}")))
    assert len(many._unwritten) == served_requests.MOST_UNWRITTEN
    many.forget_worker("w0")
    assert not many._unwritten, "no names of a worker that left long ago"


def test_another_incarnation_is_not_in_doubt() -> None:
    log = FailureLog()
    log.stream("before")
    log.ended("before")
    log.dies()
    log.restarts()
    log.stream("after")
    log.ended("after")
    quarantined(log, good_tick=-1, incarnation=2)
    record = log.incidents()[-1]
    assert record.failure == FailureClass.CORRUPTION and served(record) == {"after": "completed"}


def test_a_second_decision_lists_nobody_twice() -> None:
    log = FailureLog()
    log.stream("a")
    log.ended("a")
    quarantined(log, good_tick=-1)
    quarantined(log, good_tick=-1)
    assert served(log.one()) == {"a": "completed"}


def test_no_request_is_said_to_be_in_doubt_if_none_is() -> None:
    log = FailureLog()
    quarantined(log, good_tick=-1)
    assert "; no request got tokens from it since its last right answers; " in summary(log.one())


def test_what_is_remembered_is_bounded_and_the_record_says_so() -> None:
    requests = ServedRequests(most=10)
    for one in _ended(30):
        requests.on_routed(one)
        requests.on_ended(_end(one.request))
    case = Case(record=_record())
    requests.blame(case, "w0", 1, -1)
    assert case.record.served == 10 and case.record.served_at_least
    assert "at least 10 requests got tokens" in summary(case.record)
    listed = served_requests.MOST_SERVED
    many = ServedRequests()
    for one in _ended(listed + 5):
        many.on_routed(one)
        many.on_ended(_end(one.request))
    case = Case(record=_record())
    many.blame(case, "w0", 1, -1)
    assert case.record.served == listed + 5 and not case.record.served_at_least
    assert len(case.record.served_requests) == listed
    assert "  and 5 more" in list(lines(case.record))


def _ended(number: int) -> Iterator[v.RouteDecided]:
    for index in range(number):
        yield decided(f"q{index}", 1, "w0", 1)


def _end(request: str) -> v.RequestEnded:
    return v.RequestEnded(
        request=request, outcome=RequestOutcome.COMPLETED, status=200, tokens=9, finish="stop",
        attempts=1, verdict=Guarantee.EXACT,
    )  # fmt: skip


def _record() -> Incident:
    return Incident(
        id="1.0", part=FailedPart.WORKER, name="w0", incarnation=1,
        failure=FailureClass.CORRUPTION, reason="", began_ms=0, noticed_ms=0,
    )  # fmt: skip
