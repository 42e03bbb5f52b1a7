"""I25: each difference between what a client was told and the log is named."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from relume.chaos.validators.ground_truth import ClientCall, GroundTruth
from relume.chaos.validators.promises.requests.i25_told_truth import check
from relume.chaos.validators.records import ClientRecord
from relume.events import vocabulary as v
from tests.policies.story import Story, arrived, decided, ended

LOST = "the worker was lost"


def story(**end: Any) -> Story:
    told = Story()
    told.worker()
    told.replica()
    told.tell("r.r0", arrived(), decided(), replace(ended(), **end))
    return told


def found(told: Story, record: ClientRecord, call: ClientCall | None = None, **more: Any) -> str:
    truth = GroundTruth(calls={"q1": call}, **more) if call is not None else None
    return "; ".join(map(str, check(told.groups, [record], truth)))


def failed(tokens: int = 5, status: int = 200) -> ClientRecord:
    return ClientRecord(request="q1", outcome="failed", status=status, token_count=tokens)


FAILURE = {"outcome": "failed", "status": 502, "tokens": 5, "finish": "-", "detail": LOST}


def test_the_truth_is_not_named() -> None:
    assert found(story(**FAILURE), failed(), ClientCall(status=502, message=LOST)) == ""
    reason = {**FAILURE, "detail": f"{LOST}: w0 died"}
    assert found(story(**reason), failed(), ClientCall(status=502, message=LOST)) == ""
    assert found(story(), ClientRecord(request="q1", status=200)) == ""


def test_another_status_of_a_stream_that_failed_in_its_middle_is_named() -> None:
    told = found(story(**FAILURE), failed(), ClientCall(status=500, message=LOST))
    assert "was told 500, the log says 502" in told


def test_other_words_are_named() -> None:
    told = found(story(**FAILURE), failed(), ClientCall(status=502, message="no worker"))
    assert "'no worker', the log says 'the worker was lost'" in told


def test_an_engines_own_refusal_has_its_own_words() -> None:
    refusal = {"outcome": "rejected", "status": 413, "tokens": 0, "detail": "worker answered 413"}
    record = ClientRecord(request="q1", outcome="rejected", status=413)
    assert found(story(**refusal), record, ClientCall(status=413, message="too large")) == ""


def test_an_engines_own_answer_on_a_relayed_route_has_no_words_in_the_log() -> None:
    refusal = {"outcome": "rejected", "status": 400, "tokens": 0, "finish": "-"}
    record = ClientRecord(request="q1", outcome="rejected", status=400)
    call = ClientCall(kind="relayed", status=400)
    assert found(story(**refusal), record, call) == ""
    assert f"was told '', the log says {LOST!r}" in found(
        story(**refusal, detail=LOST), record, call
    )
    call = ClientCall(kind="relayed", status=400, message=LOST)
    assert f"was told {LOST!r}, the log says ''" in found(story(**refusal), record, call)


@pytest.mark.parametrize("tokens", [4, 6])
def test_other_tokens_of_a_failed_stream_are_named(tokens: int) -> None:
    call = ClientCall(status=502, message=LOST)
    assert f"counted {tokens} tokens when it failed" in found(
        story(**FAILURE), failed(tokens), call
    )


def test_tokens_without_ids_are_not_counted() -> None:
    """`tests/live/test_plain.py`: the client of a plain server had 9 tokens, the log 0."""
    unnamed = {**FAILURE, "tokens": 0}
    assert found(story(**unnamed, ttft_us=9000), failed(9)) == ""
    assert "counted 9 tokens when it failed" in found(story(**unnamed), failed(9))


def test_a_client_that_returned_may_have_a_part_of_a_frame() -> None:
    call = ClientCall(kind="resumable", status=502, message=LOST)
    assert found(story(**FAILURE), failed(7), call) == ""
    assert "counted 9 tokens" in found(story(**FAILURE), failed(9), call)


def test_more_tokens_than_the_log_has_of_a_client_that_left_are_named() -> None:
    left = {"outcome": "cancelled", "status": 499, "tokens": 5, "finish": "-"}
    record = ClientRecord(request="q1", outcome="cancelled", status=200, token_count=6)
    assert "counted 6 tokens when it left" in found(story(**left), record, ClientCall())
    record.token_count = 4
    assert found(story(**left), record, ClientCall()) == ""


@pytest.mark.parametrize(
    ("served_by", "at_end", "is_named"),
    [("r.r1", 3, False), ("r.r0", 3, True), ("r.r2", 3, True), ("", 3, True), ("r.r1", 4, True)],
)
def test_a_return_that_the_log_has_late_knows_no_later_tokens(
    served_by: str, at_end: int, is_named: bool
) -> None:
    """Composed 167161: the client returned to r0, left, and got the rest at r1, whose claim was in the
    log before that of r0."""
    told = Story()
    told.worker()
    for name in ("r0", "r1", "r2"):
        told.replica(name, f"b{name}")
    returned = v.ClientReturned(request="q1", claim="c1", attempt=1, tokens=3, events=0)
    left = {"outcome": "cancelled", "status": 499, "tokens": at_end, "finish": "-"}
    told.tell("r.r2", arrived(), decided())
    told.tell("r.r1", returned)
    told.tell("r.r0", replace(returned, claim="c0"))
    told.tell("r.r0", replace(ended(), **left))
    record = ClientRecord(request="q1", outcome="gone", status=200, token_count=30)
    call = ClientCall(kind="resumable", status=410, served_by=served_by)
    text = found(told, record, call)
    assert ("counted 30 tokens when it left" in text) == is_named
    assert is_named or not text


def test_another_status_of_a_whole_answer_is_named() -> None:
    record = ClientRecord(request="q1", status=203)
    assert "was answered 203, the log says 200" in found(story(), record)


def test_a_410_of_a_complete_stream_is_named() -> None:
    record = ClientRecord(request="q1", outcome="gone", status=200, token_count=64)
    assert "was told 410" in found(story(), record, ClientCall(status=410))


def test_the_last_words_of_a_lost_replica_may_be_missing() -> None:
    told = story(**FAILURE)
    told.own("r.r0")
    told.replica()
    assert found(told, failed(), ClientCall(status=500, message=LOST)) == ""


def test_other_counts_of_a_replica_are_named() -> None:
    call = ClientCall(status=502, message=LOST)
    counted = {"completed": 0, "cancelled": 0, "failed": 1, "rejected": 0, "tokens": 5}
    assert found(story(**FAILURE), failed(), call, counted={"r.r0": counted}) == ""
    wrong = {**counted, "completed": 1}
    told = found(story(**FAILURE), failed(), call, counted={"r.r0": wrong})
    assert "counted 1 for completed, the log 0" in told


def test_an_end_that_a_replica_repeats_counts_where_it_was_first() -> None:
    """Composed 308: r0 owned the stream again before the end of r1, which had given the client all of
    it, was in the log."""
    told = story()
    told.replica("r1", "b2")
    end = ended()
    told.tell("r.r1", end)
    record, counted = ClientRecord(request="q1", status=200), {"r.r1": {"completed": 0}}
    assert found(told, record, ClientCall(), counted=counted) == ""
    told.tell("r.r1", replace(end, tokens=end.tokens - 1))
    assert "the log 1" in found(told, record, ClientCall(), counted=counted)


def test_two_replicas_may_fail_a_request_alike() -> None:
    """Composed 50187: its client had been at both, and both counted a failure."""
    told = story(**FAILURE)
    told.replica("r1", "b2")
    told.tell("r.r1", replace(ended(), **FAILURE))
    counted = {"r.r1": {"failed": 1}}
    assert found(told, failed(), ClientCall(), counted=counted) == ""
