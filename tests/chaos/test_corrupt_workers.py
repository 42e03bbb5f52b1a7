"""I14 about corrupt workers, and what I2 leaves to it."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest

from relume.chaos.validators.corrupt_engines import NEVER, CorruptSince, verdicts
from relume.chaos.validators.ground_truth import ClientCall, GroundTruth, QueuedReport
from relume.chaos.validators.promises.requests import i2_identical_stream
from relume.chaos.validators.promises.workers import i14_no_bad_block
from relume.chaos.validators.records import THE_RUN, ClientRecord, Log, Violation
from relume.events import vocabulary as v
from relume.events.log.codec import encode
from tests.policies.story import (
    Story,
    arrived,
    decided,
    died,
    ended,
    engine_step,
    queued,
    ready,
    started,
)

FLIPPED = [CorruptSince("w0", 1 << 60)]
"""It becomes corrupt after everything that the log says of its start."""

RIGHT, WRONG = [1, 2, 3], [1, 9, 9]


class WrongWorker(Story):
    """w0 serves request q of client c wrongly; replica r0 has it."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("w0", "w1"):
            self.worker(name)
        self.replica()
        self.leader()
        self.tell("r.r0", arrived("q"), decided("q"))

    def quarantined(self) -> int:
        self.tell(
            "fleet",
            v.HealthDecided(
                worker="w0", incarnation=1, state="quarantined", failure="corruption",
                evidence="wrong", since=1,
            ),
        )  # fmt: skip
        return self.revision

    def left(self, delivered: int = 2, attempt: int = 1) -> None:
        self.tell(
            "r.r0",
            v.TransportObserved(
                request="q", attempt=attempt, worker="w0", incarnation=1, kind="corrupt",
                delivered=delivered,
            ),
        )  # fmt: skip

    def sent_on(self, mode: str, verdict: int, delivered: int = 2, attempt: int = 2) -> None:
        route = decided("q", attempt, "w1", delivered=delivered, basis=v.Basis(verdict, 0))
        self.tell("r.r0", v.RouteDecided(**{**_fields(route), "mode": mode}))

    def found(self, tokens: list[int], outcome: str = "completed") -> list[str]:
        return [one.detail for one in self.violations(tokens, outcome)]

    def violations(self, tokens: list[int], outcome: str = "completed") -> list[Violation]:
        clients = clients_with(tokens, outcome)
        return i14_no_bad_block.check(self.groups, clients, corrupt=FLIPPED)


def _fields(event: Any) -> dict[str, Any]:
    return {name: getattr(event, name) for name in event.__struct_fields__}


def clients_with(tokens: list[int], outcome: str) -> list[ClientRecord]:
    return [
        ClientRecord(request="before", tokens=RIGHT, content_id="a", undisturbed=True),
        ClientRecord(request="q", tokens=tokens, content_id="a", outcome=outcome),
    ]


def test_an_attempt_that_continues_after_tokens_of_a_corrupt_worker_is_found() -> None:
    log = WrongWorker()
    verdict = log.quarantined()
    log.left()
    log.sent_on("continue", verdict)
    assert log.found(WRONG, "failed") == ["attempt 2 continues after tokens of a corrupt worker"]


def test_one_that_compares_or_that_had_no_token_of_it_is_right() -> None:
    log = WrongWorker()
    verdict = log.quarantined()
    log.left()
    log.sent_on("replay", verdict)
    assert log.found(WRONG, "failed") == []
    log = WrongWorker()
    verdict = log.quarantined()
    log.left(delivered=0)
    log.sent_on("continue", verdict)
    assert log.found(RIGHT) == []
    log = WrongWorker()
    log.left()
    log.sent_on("continue", 0)  # its replica did not know yet
    log.quarantined()
    assert log.found(WRONG, "failed") == []


def test_an_answer_that_was_begun_anew_has_no_token_of_it() -> None:
    """Composed 6001: the engine's token had not reached the client, which returned with nothing."""
    log = WrongWorker()
    verdict = log.quarantined()
    log.left()
    log.sent_on("new", verdict, delivered=0)
    log.sent_on("continue", verdict, attempt=3)
    assert log.found(RIGHT) == []
    log = WrongWorker()
    log.left()
    log.tell("r.r0", decided("q", 2, "w0"))  # its replica did not know yet
    verdict = log.quarantined()
    log.left(attempt=2)
    log.sent_on("continue", verdict, attempt=3)
    assert log.found(WRONG, "failed") == ["attempt 3 continues after tokens of a corrupt worker"]


def test_an_answer_that_completes_there_after_the_verdict_is_found() -> None:
    log = WrongWorker()
    verdict = log.quarantined()
    log.tell("r.r0", arrived("p"), decided("p", 1, "w1", basis=v.Basis(verdict, 0)))
    log.tell("r.r0", ended("q"))
    assert "completed on w0 after the verdict on it" in log.found(RIGHT)
    assert "completed with wrong tokens of w0 after the verdict on it" in log.found(WRONG)


def test_whose_wrong_tokens_they_are_is_unknown_where_another_one_is_wrong_without_a_verdict() -> (
    None
):
    """Composed 120864: the answer was generated again by a worker whose damage no canary touches."""
    log = WrongWorker()
    verdict = log.quarantined()
    log.left()
    log.sent_on("replay", verdict)
    log.tell("r.r0", ended("q"))
    assert "completed with wrong tokens of w0 after the verdict on it" in log.found(WRONG)
    both = [*FLIPPED, CorruptSince("w1", 0)]
    assert i14_no_bad_block.check(log.groups, clients_with(WRONG, "completed"), corrupt=both) == []


def test_a_wrong_answer_before_the_verdict_must_be_in_the_incident() -> None:
    log = WrongWorker()
    log.tell("r.r0", ended("q"))
    log.quarantined()
    assert log.found(WRONG) == [], "it is listed"
    log = WrongWorker()
    log.tell("r.r0", ended("q"))
    for number in range(3):
        log.tell("fleet", v.Tick(number, number * 1000))
    log.tell(
        "fleet",
        v.HealthDecided(
            worker="w0", incarnation=1, state="quarantined", failure="corruption", evidence="wrong",
            since=1, good_tick=2,
        ),
    )  # fmt: skip
    assert log.found(WRONG) == ["has wrong tokens of w0, and its incident does not list it"]


def checked(log: WrongWorker, request: str, by: str, answer: bytes = b"right") -> None:
    """Another engine answers again what w0 answered wrongly."""
    name = f"{request}.{by}"
    log.tell(
        "r.r0",
        v.CrossCheckDecided(
            decision=name, basis=v.Basis(0, 0), request=request, worker="w0", incarnation=1, by=by,
            by_incarnation=1, cause="share", tokens=3, answer=b"wrong",
        ),
        v.CrossChecked(
            decision=name, request=request, worker="w0", incarnation=1, by=by, by_incarnation=1,
            took_us=9, answer=answer, differs=-1 if answer == b"wrong" else 1,
        ),
    )  # fmt: skip


def canary(log: WrongWorker, worker: str, number: int, token: int, incarnation: int = 1) -> None:
    report = v.CanaryReported(
        worker=worker, incarnation=incarnation, canary=number, prompts=1, tokens=(token,)
    )
    log.tell(f"w.{worker}", report)


def unproven(log: WrongWorker) -> str:
    """What makes the run inconclusive; nothing else may be found."""
    log.tell("r.r0", ended("q"))
    found = log.violations(WRONG)
    assert {one.about for one in found} <= {THE_RUN}
    assert log.violations(RIGHT) == []
    return "\n".join(one.detail for one in found)


def test_answers_of_an_engine_that_two_others_contradict_need_a_verdict() -> None:
    """I2 leaves them to I14, so one of the two must say it."""
    log = WrongWorker()
    for request in ("a", "b"):
        for by in ("w1", "w2"):
            checked(log, request, by)
    assert unproven(log) == (
        "1 wrong answers have tokens of w0:1, which was not quarantined, "
        "though two other engines agree against its answers to 2 requests"
    )


def test_answers_of_an_engine_that_is_wrong_about_canaries_need_a_verdict() -> None:
    log = WrongWorker()
    for token in (1, 2):
        for worker in ("w0", "w1", "w2"):
            for number in (0, 1):
                canary(log, worker, number, token if worker == "w0" else 1)
    assert "though 2 of its answers to canaries differ" in unproven(log)


def test_nothing_follows_from_wrong_answers_that_the_log_cannot_know() -> None:
    """Composed 5023, 6030, 6031, 6147: of two engines either may be wrong; one died before it was
    checked."""
    assert unproven(WrongWorker()) == ""
    log = WrongWorker()
    for request in ("a", "b", "c"):
        checked(log, request, "w1")
    checked(log, "a", "w2", answer=b"another")
    checked(log, "b", "w2", answer=b"wrong")
    checked(log, "c", "w2")
    assert unproven(log) == "", "only one request has two others that agree"
    log = WrongWorker()
    for token in (1, 2):
        for number in (0, 1):
            canary(log, "w0", number, token)
            canary(log, "w1", number, 1)
    assert unproven(log) == "", "of two workers either may be wrong"
    log = WrongWorker()
    for worker in ("w0", "w1", "w2"):
        canary(log, worker, 0, 1)
        canary(log, worker, 0, 2, incarnation=2)
    canary(log, "w0", 0, 2)
    assert unproven(log) == "", "one answer, and those of the next engine, are not enough"


def test_i2_leaves_answers_of_a_corrupt_worker_to_i14() -> None:
    log = WrongWorker()
    log.tell("r.r0", ended("q"))
    clients = clients_with(WRONG, "completed")
    assert i2_identical_stream.check(log.groups, clients, FLIPPED) == []
    assert i2_identical_stream.check(log.groups, clients) != []
    assert i2_identical_stream.check(log.groups, clients, [CorruptSince("w1", 1 << 60)]) != []


class Unwritten(WrongWorker):
    """w0 serves q2 of client c2 wrongly too. r0 began anew before it wrote of that; its engine's report
    is in the log, and the leader ended the request. The verdict came at 5000 ms."""

    CORRUPT: ClassVar = [CorruptSince("w0", 1000)]
    CLIENTS: ClassVar = [
        ClientRecord(request="before", tokens=RIGHT, content_id="a", undisturbed=True),
        ClientRecord(request="c2", tokens=WRONG, content_id="a"),
    ]

    def __init__(self, reported: bool = True) -> None:
        super().__init__()
        sent = decided("q2")
        self.sent = encode(v.RouteDecided(**{**_fields(sent), "decision": "r0.b1.2"}))
        self.tell("r.r0", v.RouteDecided(**{**_fields(decided("q")), "decision": "r0.b1.1"}))
        if reported:
            self.tell("w.w0", engine_step(queued("q2", dispatch=self.sent)))
        self.replica(boot="b2")
        self.tell("fleet", ended("q2", "failed"))
        self.at_ms = 5000
        self.quarantined()

    def truth(self, last_ms: int = 2000, worker: str = "w0", until_ms: int = 2000) -> GroundTruth:
        return GroundTruth(
            calls={"c2": ClientCall(last_ns=last_ms * 1_000_000)},
            attempts={"c2": [("q2/1", worker, 0)]},
            queued={"q2/1": QueuedReport(worker, 1, 1, self.sent)},
            ended={"q2/1": until_ms * 1_000_000},
        )

    def differences(self, truth: GroundTruth | None) -> list[str]:
        found = i2_identical_stream.check(self.groups, self.CLIENTS, self.CORRUPT, truth)
        return [one.about for one in found if one.about != THE_RUN]


def test_i2_leaves_an_answer_of_a_corrupt_worker_to_i14_though_no_gateway_wrote_of_it() -> None:
    """Composed 171092: etcd was away, and the gateway was killed before it was back."""
    log = Unwritten()
    assert log.differences(log.truth()) == []
    assert log.differences(None) == ["c2"], "of a live run nothing more is known"


@pytest.mark.parametrize(
    "otherwise",
    [{"last_ms": 6000}, {"worker": "w1"}, {"until_ms": 900}],
    ids=["after the verdict", "of a sound worker", "before the fault"],
)
def test_other_wrong_answers_that_no_gateway_wrote_of_are_found(otherwise: Any) -> None:
    log = Unwritten()
    assert log.differences(log.truth(**otherwise)) == ["c2"]


def test_a_written_attempt_of_a_living_gateway_is_judged_by_the_log() -> None:
    log = Unwritten()
    log.sent = encode(v.RouteDecided(**{**_fields(decided("q2")), "decision": "r0.b2.9"}))
    assert log.differences(log.truth()) == ["c2"]


def test_the_incident_lists_what_the_engine_alone_reported() -> None:
    def unlisted(log: Unwritten) -> list[str]:
        truth = log.truth()
        found = i14_no_bad_block.check(log.groups, log.CLIENTS, corrupt=log.CORRUPT, truth=truth)
        return [one.detail for one in found if "q2" in one.detail]

    assert unlisted(Unwritten()) == []
    text = "has wrong tokens of w0, and its incident does not list q2"
    assert unlisted(Unwritten(reported=False)) == [text]


def test_an_engine_is_corrupt_though_its_late_agent_wrote_afterwards_that_it_was_ready() -> None:
    """Composed seed 9404: an operator had restarted the engine, and the fault struck the next one."""
    story = Story()
    story.worker("w0")
    story.at_ms = 700
    story.tell("w.w0", died(), started("w0", 2))
    story.at_ms = 1500
    story.tell("w.w0", ready("w0", 2))
    story.at_ms = 3000
    story.tell("w.w0", died("w0", 2), started("w0", 3), ready("w0", 3))
    assert verdicts(story.groups, [CorruptSince("w0", 1400)]) == {("w0", 2): NEVER}


def test_the_next_engine_is_not_the_corrupt_one_though_the_log_was_away_when_it_started() -> None:
    """Composed seed 46: what the control plane spooled meanwhile landed later, with earlier times, so
    that the worker's clock seemed to have jumped ahead."""
    story = Story()
    story.worker("w0")
    story.replica()
    story.at_ms = 24_000
    story.tell("w.w0", died(), started("w0", 2))
    story.at_ms = 1000
    story.tell("r.r0", arrived())
    engines = verdicts(Log(story.groups), [CorruptSince("w0", 1400)])
    assert ("w0", 1) in engines
