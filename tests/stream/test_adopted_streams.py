"""Streams of other replicas, before the log says whose they are."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream import stream_states as s
from relume.controlplane.stream.handlers.endings import NO_ENVELOPE
from relume.events.vocabulary.enums import RouteCause, TransportKind
from relume.events.wire.frames import CONTENT_TYPE, encode_envelope, encode_failure, encode_tokens
from tests.stream.test_doubted_tokens import HEAD, OneRequest

ENVELOPE = encode_envelope(b'{"path":"/p","id":"q","created":"17"}\n{}')


def test_a_claim_that_is_not_in_the_log_yet_ends_nothing_when_its_client_stays_away() -> None:
    """Its gateway stood still for longer than the grace: another replica may have ended it, and a
    second end would say that its client has less."""
    request = OneRequest(resumable=True, adopted=True)
    request.feed(e.Adopted((3, 0)), e.ClientGone())
    assert isinstance(request.machine.state, s.Adopting)
    request.feed(e.GraceOver())
    assert do.LetGo() in request.effects
    assert not any(type(effect) in (do.RecordEnd, do.RecordTimer) for effect in request.effects)
    assert request.machine.state == s.Ended("let_go")
    request.feed(e.Owned(False))
    assert request.effects == []


@pytest.mark.parametrize(
    ("late", "status", "code"), [(False, 410, "stream_gone"), (True, 503, "log_behind")]
)
def test_a_stream_is_over_only_if_the_log_says_so(late: bool, status: int, code: str) -> None:
    """Composed 50217: etcd was full for 22 s, and the log had the stream live."""
    request = OneRequest(resumable=True, adopted=True)
    request.feed(e.Adopted((3, 0)), e.Owned(False, late=late))
    refused = request.only(do.Fail)
    assert (refused.status, refused.code, refused.retry_after_s > 0) == (status, code, late)


def test_a_stream_runs_on_for_a_client_that_left_before_the_log_said_whose_it_is() -> None:
    """Its engine keeps it for the client's return: no connection would read it."""
    request = OneRequest(resumable=True, adopted=True)
    left = request.assignment("new")
    request.feed(e.Adopted((3, 0)), e.ClientGone(), e.Owned(True, left))
    assert request.effects == []
    assert request.machine.state == s.Detached(left)


def test_tokens_that_a_worker_repeated_continue_a_stream_of_which_it_lacks_the_rest() -> None:
    """What was sampled without a seed could not be generated again."""
    request = OneRequest(resumable=True, adopted=True, verdict="sampled")
    left = request.assignment("new")
    request.feed(e.Adopted((2, 0)), e.Owned(True, left), e.Connected(()))
    request.feed(e.Head(200, {b"content-type": CONTENT_TYPE, b"x-relume-from": b"3"}))
    request.feed(e.Data(ENVELOPE + encode_tokens(0, [5, 6])))
    assert request.only(do.RecordFailure).kind == TransportKind.DETACHED
    assert request.only(do.Assign) == do.Assign(RouteCause.DETACHED, 2)
    request.send_to("continue")
    assert b"x-relume-resume: continue 2\r\n" in request.only(do.Send).head


def test_a_worker_that_lacks_the_rest_may_get_the_stream_again_at_once() -> None:
    """Composed 130696: it paused for a worker that had failed nothing, and its client went elsewhere
    meanwhile, where nobody had the request."""
    request = OneRequest(resumable=True, adopted=True)
    left = request.assignment("new")
    request.feed(e.Adopted((2, 0)), e.Owned(True, left), e.Connected(()))
    request.feed(e.Head(200, {b"content-type": CONTENT_TYPE, b"x-relume-from": b"3"}))
    request.feed(e.Data(ENVELOPE + encode_tokens(0, [5, 6])))
    again = replace(request.assignment("continue"), worker=left.worker)
    request.feed(e.Assigned(again))
    assert request.only(do.Open).to == again
    assert not any(type(effect) is do.SetTimer for effect in request.effects)


def sampled_without_its_engine() -> OneRequest:
    """Adopted, sampled without a seed; the attempt of which the log has is not at its worker."""
    request = OneRequest(resumable=True, adopted=True, verdict="sampled")
    request.feed(e.Adopted((2, 0)), e.Owned(True, request.assignment("new")), e.Connected(()))
    request.feed(e.Head(404, {}))
    assert request.only(do.RecordFailure).kind == TransportKind.DETACHED
    assert request.only(do.FindLaterAttempt)
    return request


def test_a_stream_that_its_former_owner_moved_unwritten_continues_where_an_engine_reports_it() -> (
    None
):
    """Composed 90561: a worker drained, and the replica died before it wrote where it had sent the
    stream."""
    request = sampled_without_its_engine()
    later = request.assignment("attach")
    request.feed(e.Owned(True, later))
    assert request.only(do.Open).to == later
    request.feed(e.Connected(()))
    request.feed(e.Head(404, {}))
    request.feed(e.Owned(True))
    failed = request.only(do.Fail)
    assert (failed.status, failed.code) == (502, "stream_lost")


@pytest.mark.parametrize("verdict", ["exact", "replay"])
def test_a_stream_whose_request_no_holder_has_continues_where_an_engine_reports_it(
    verdict: str,
) -> None:
    """Composed 161817: a gateway was killed before it wrote where it had sent the stream. It could have
    been generated again, but no holder had the request, and the engine had all of its tokens."""
    request = OneRequest(resumable=True, adopted=True, verdict=verdict)
    request.feed(e.Adopted((2, 0)), e.Owned(True), e.EnvelopeKnown(False))
    assert request.only(do.FindLaterAttempt)
    later = request.assignment("attach")
    request.feed(e.Owned(True, later))
    assert request.only(do.Open).to == later
    request.feed(e.Connected(()), e.Head(404, {}), e.EnvelopeKnown(False), e.Owned(True))
    failed = request.only(do.Fail)
    assert (failed.status, failed.code, failed.message) == (502, "stream_lost", NO_ENVELOPE)


def test_its_client_may_leave_while_engines_are_waited_for() -> None:
    request = sampled_without_its_engine()
    request.feed(e.ClientGone(), e.Owned(True))
    assert request.machine.state == s.Detached(None), "it waits for its client"
    request.feed(e.ClientReturned((2, 0)))
    assert request.only(do.FindLaterAttempt)
    request.feed(e.ClientGone(), e.GraceOver())
    assert request.only(do.RecordEnd).status == 499, "it is ours: the log gets its end"


def test_a_client_that_returns_twice_loses_no_token_that_was_known_before() -> None:
    """The worker had repeated one of three when the client returned again."""
    request = OneRequest(resumable=True, verdict="sampled")
    request.begin(3)
    request.feed(e.ClientGone(), e.ClientReturned((3, 0)), e.Connected(()), HEAD)
    request.feed(e.Data(encode_tokens(0, [5])), e.ClientGone(), e.ClientReturned((3, 0)))
    request.feed(e.ConnectFailed(TransportKind.REFUSED, "it died"))
    assert request.only(do.Assign) == do.Assign(RouteCause.REFUSED, 3)
    request.send_to("continue")
    assert b"x-relume-resume: continue 3\r\n" in request.only(do.Send).head


def test_the_connection_of_a_stream_that_another_one_takes_is_cut() -> None:
    """A client that still reads it would wait without an end."""
    request = OneRequest(resumable=True)
    request.begin()
    left = request.machine.attempt
    request.feed(e.Data(encode_failure("taken", "by another connection")))
    assert request.only(do.Cut)
    assert request.machine.state == s.Detached(left)


def test_the_end_of_a_stream_that_cannot_be_generated_again_has_its_clients_tokens() -> None:
    """I25 of composed 31052: the log said 0, of a client that came with six."""
    request = OneRequest(resumable=True, adopted=True)
    request.feed(e.Adopted((6, 0)), e.Owned(True), e.EnvelopeKnown(True))
    assert request.only(do.Assign) == do.Assign(RouteCause.RETURNED, 0)
    request.feed(e.NoWorker(0.0))
    assert (request.only(do.Fail).status, request.only(do.RecordEnd).tokens) == (503, 6)
