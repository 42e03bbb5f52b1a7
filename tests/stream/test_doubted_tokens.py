"""Streams with tokens of a worker that computes wrong results: compared, or ended with an error."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.stream import event_ids
from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream import stream_states as s
from relume.controlplane.stream.arrival import Arrival, Assignment
from relume.controlplane.stream.error_codes import CORRUPTED, NOT_COMPARED, OF_MESSAGES
from relume.controlplane.stream.machine import StreamMachine
from relume.controlplane.stream.stream_data import Stream
from relume.events.vocabulary.enums import RouteCause, TransportKind
from relume.events.wire.frames import CONTENT_TYPE, encode_failure, encode_tokens

HEAD = e.Head(200, {b"content-type": CONTENT_TYPE})
CLAIM = "t" * 43


class OneRequest:
    """A request that is fed; `effects` of the last event."""

    def __init__(
        self, resumable: bool = False, adopted: bool = False, verdict: str = "exact"
    ) -> None:
        arrival = Arrival(
            request="r", model="m", route="/v1/completions", stream=True, prompt_tokens=1,
            max_tokens=9, verdict=verdict, resumable=event_ids.digest(CLAIM) if resumable else "",
        )  # fmt: skip
        self.machine = StreamMachine(
            Stream(
                arrival=arrival, path="/p", response_id="q", body=b"" if adopted else b"{}",
                limits=GatewayConfig(), now=0.0, resume_token=CLAIM if resumable else "",
                created="17" if resumable else "",
            )
        )  # fmt: skip
        self.effects: list[do.Effect] = []
        self.attempt = 0

    def feed(self, *events: Any) -> None:
        for event in events:
            self.effects = self.machine.handle(event, 0.0)

    def send_to(self, mode: str, doubted: bool = False, again: bool = False) -> None:
        to = self.assignment(mode, doubted)
        self.feed(e.Assigned(to), e.Connected(("h:1",) if again else ()))

    def assignment(self, mode: str, doubted: bool = False) -> Assignment:
        self.attempt += 1
        return Assignment(
            request="r", attempt=self.attempt, worker=f"w{self.attempt}", incarnation=1, host="h",
            port=1, mode=mode, dispatch=b"d", doubted=doubted,
        )  # fmt: skip

    def begin(self, tokens: int = 2) -> None:
        """Its first attempt brought some tokens."""
        self.feed(e.Accepted(self.machine.stream.arrival), e.Admitted(30.0))
        self.send_to("new")
        self.feed(HEAD)
        for at in range(tokens):
            self.feed(e.Data(encode_tokens(at, [5 + at], b"data: a\n\n")))

    def only(self, kind: type) -> Any:
        (found,) = [effect for effect in self.effects if type(effect) is kind]
        return found


def test_a_replay_that_differs_ends_with_an_error_that_says_why() -> None:
    request = OneRequest()
    request.begin()
    request.feed(e.EngineGivenUp(TransportKind.CORRUPT, "wrong answer"))
    assert request.only(do.RecordFailure).kind == TransportKind.CORRUPT
    assert request.only(do.Assign) == do.Assign(RouteCause.CORRUPT, 2)
    request.send_to("replay", doubted=True)
    head = request.only(do.Send).head
    assert b"x-relume-resume: replay 2\r\n" in head and b"x-relume-uncached: 1\r\n" in head
    request.feed(HEAD, e.Data(encode_failure("mismatch", "token 1 is 9 in the replay")))
    failed = request.only(do.Fail)
    assert (failed.status, failed.message) == (502, CORRUPTED)
    assert OF_MESSAGES[CORRUPTED] == OF_MESSAGES[NOT_COMPARED] == "corrupt_answer"
    assert "token 1" in request.only(do.RecordEnd).detail


def test_a_replay_that_agrees_goes_on_from_the_next_token() -> None:
    request = OneRequest()
    request.begin()
    request.feed(e.EngineGivenUp(TransportKind.CORRUPT, "wrong answer"))
    request.send_to("replay", doubted=True)
    request.feed(HEAD, e.Data(encode_tokens(2, [7], b"data: c\n\n")))
    assert request.only(do.ToClient).data == b"data: c\n\n"
    assert list(request.machine.stream.answer.ids) == [5, 6, 7]


def test_a_stream_that_left_the_worker_before_moves_once_more_and_nobody_is_blamed() -> None:
    request = OneRequest()
    request.begin()
    request.feed(e.ConnectionLost(TransportKind.RESET, "", False))
    request.send_to("continue")
    request.feed(e.TokensDoubted("w1:1 served it before"))
    failure = request.only(do.RecordFailure)
    assert (failure.kind, failure.attempt) == (TransportKind.MOVED, 2)
    assert failure.detail == "w1:1 served it before"
    assert request.only(do.Assign) == do.Assign(RouteCause.CORRUPT, 2)
    assert request.only(do.Close)
    assert request.machine.stream.budget.failed_on == {("w1", 1)}


def test_the_engine_of_an_absent_client_is_left_and_the_next_attempt_waits_for_it() -> None:
    request = OneRequest(resumable=True)
    request.begin()
    request.feed(e.ClientGone())
    request.feed(e.EngineGivenUp(TransportKind.CORRUPT, "wrong answer"))
    assert request.only(do.Release).to.worker == "w1"
    assert request.only(do.RecordFailure).kind == TransportKind.CORRUPT
    assert request.machine.state == s.Detached(None)
    request.feed(e.ClientReturned((1, 0)))
    assert request.only(do.Assign) == do.Assign(RouteCause.RETURNED, 1)
    request.send_to("replay", doubted=True)
    assert b"x-relume-resume: replay 1\r\n" in request.only(do.Send).head


@pytest.mark.parametrize("have", [(0, 0), (3, 0)])
def test_tokens_that_nobody_knows_any_more_cannot_be_compared(have: tuple[int, int]) -> None:
    """Another gateway had the stream, and is gone with its engine."""
    request = OneRequest(resumable=True, adopted=True)
    request.feed(e.Adopted(have), e.Owned(True), e.EnvelopeKnown(True))
    request.send_to("new", doubted=True, again=True)
    if have == (0, 0):
        assert request.only(do.Send), "its client has nothing"
    else:
        assert request.only(do.Fail).message == NOT_COMPARED


@pytest.mark.parametrize("verdict", ["restart", "exact"])
def test_an_answer_that_cannot_be_continued_is_not_called_valid(verdict: str) -> None:
    """The machine ends it before the scheduler is asked."""
    request = OneRequest(verdict=verdict)
    request.begin()
    if verdict == "exact":
        request.machine.stream.answer.unresumable = "several choices cannot be continued"
    request.feed(e.EngineGivenUp(TransportKind.CORRUPT, "wrong answer"))
    failed = request.only(do.Fail)
    assert (failed.status, failed.message) == (502, NOT_COMPARED)
    assert "the worker failed" in request.only(do.RecordEnd).detail


def test_nor_one_whose_tokens_came_without_ids() -> None:
    """Composed seed 823: no token of it is counted."""
    request = OneRequest()
    request.begin(0)
    request.feed(e.Data(encode_tokens(-1, [], b"data: a\n\n")))
    assert request.machine.stream.begun and not request.machine.stream.delivered
    request.feed(e.EngineGivenUp(TransportKind.CORRUPT, "wrong answer"))
    assert request.only(do.Fail).message == NOT_COMPARED


def test_without_a_token_of_the_worker_it_ends_as_after_any_failure() -> None:
    request = OneRequest()
    request.begin()
    request.feed(e.ConnectionLost(TransportKind.RESET, "", False))
    request.send_to("continue")
    request.machine.stream.answer.unresumable = "several choices cannot be continued"
    request.feed(HEAD, e.EngineGivenUp(TransportKind.CORRUPT, "wrong answer"))
    assert request.only(do.Fail).message.startswith("the worker failed")


@pytest.mark.parametrize("verdict", ["sampled", "exact"])
def test_a_resumed_client_is_not_told_that_wrong_tokens_are_valid(verdict: str) -> None:
    """Another gateway had the stream; the worker it runs on is quarantined."""
    request = OneRequest(resumable=True, adopted=True, verdict=verdict)
    left = request.assignment("new")
    request.feed(e.Adopted((3, 0)), e.Owned(True, left), e.Connected(()))
    request.feed(e.EngineGivenUp(TransportKind.CORRUPT, "wrong answer"))
    assert request.only(do.Fail).message == NOT_COMPARED


@pytest.mark.parametrize("by", [e.EngineGivenUp(TransportKind.CORRUPT), e.TokensDoubted("w0:1")])
def test_nor_one_that_was_absent_when_its_worker_was_found_corrupt(by: Any) -> None:
    request = OneRequest(resumable=True, adopted=True, verdict="sampled")
    request.feed(e.Adopted((3, 0)), e.Owned(True, request.assignment("new")), e.ClientGone())
    request.feed(by)
    assert request.only(do.Release) and request.machine.state == s.Detached(None)
    request.feed(e.ClientReturned((3, 0)))
    assert request.only(do.Fail).message == NOT_COMPARED


def backing_off(delivered: int = 2, resumable: bool = False, doubted: bool = False) -> OneRequest:
    """Its worker failed, and no other one is left but that."""
    request = OneRequest(resumable)
    request.begin(delivered)
    again = request.machine.attempt
    assert again is not None
    request.feed(e.ConnectionLost(TransportKind.RESET, "", False))
    again = msgspec.structs.replace(again, attempt=2, mode="continue", doubted=doubted)
    request.feed(e.Assigned(again))
    assert request.only(do.SetTimer).planned.attempt == 2
    return request


@pytest.mark.parametrize("by", [e.EngineGivenUp(TransportKind.CORRUPT), e.TokensDoubted("w0:1")])
def test_a_plan_of_before_the_verdict_is_not_carried_out(by: Any) -> None:
    request = backing_off()
    request.feed(by)
    failure = request.only(do.RecordFailure)
    assert (failure.kind, failure.attempt) == (TransportKind.DETACHED, 2)
    assert request.only(do.StopWaiting) and request.only(do.Assign) == do.Assign("corrupt", 2)
    request.send_to("replay", doubted=True)
    assert b"x-relume-resume: replay 2\r\n" in request.only(do.Send).head


def test_an_adopted_stream_in_doubt_is_released_where_it_runs() -> None:
    request = OneRequest(resumable=True, adopted=True)
    left = request.assignment("new")
    request.feed(e.Adopted((3, 0)), e.Owned(True, left, doubted=True))
    assert request.only(do.Release).to == left
    failed = request.only(do.Fail)
    assert failed.message == NOT_COMPARED and ("x-should-retry", "false") in failed.headers
