"""Attempts for absent clients: handed over, refused by every worker, not sent yet, or expired."""

from __future__ import annotations

from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream import stream_states as s
from relume.events.vocabulary.enums import RouteCause, TransportKind
from tests.stream.test_doubted_tokens import HEAD, OneRequest, backing_off


def handing_over() -> OneRequest:
    """Its client is absent, its first engine has handed it over, and the second has it."""
    request = OneRequest(resumable=True)
    request.begin()
    request.feed(e.ClientGone(), e.HandoverNoticed())
    request.send_to("continue")
    assert isinstance(request.machine.state, s.HandingOver)
    return request


def test_a_handover_that_is_noticed_before_the_head_continues_elsewhere() -> None:
    """Composed 517: two drains within a second. The second notice came first, and nobody had the stream
    when its client returned."""
    request = handing_over()
    request.feed(e.HandoverNoticed())
    failure = request.only(do.RecordFailure)
    assert (failure.kind, failure.attempt) == (TransportKind.MOVED, 2)
    assert request.only(do.Release).to.worker == "w2"
    assert request.only(do.Close)
    assert request.only(do.Assign) == do.Assign(RouteCause.MOVED, 2)
    request.send_to("continue")
    request.feed(HEAD)
    assert request.machine.state == s.Detached(request.machine.placeable)
    assert request.machine.placeable.worker == "w3"


def test_one_that_is_noticed_after_it_does_so_too() -> None:
    request = handing_over()
    request.feed(HEAD, e.HandoverNoticed())
    assert request.only(do.RecordFailure).attempt == 2
    assert request.only(do.Assign) == do.Assign(RouteCause.MOVED, 2)


def leaving(*events: object) -> OneRequest:
    """Its engine died after two tokens, and its client leaves after these events."""
    request = OneRequest(resumable=True)
    request.begin()
    request.feed(e.EngineGivenUp(TransportKind.ENGINE_DEAD, "signal 9"))
    request.feed(e.Assigned(request.assignment("continue")), *events, e.ClientGone())
    return request


def test_an_attempt_that_its_client_leaves_before_it_begins_is_let_go_of_once_it_has_begun() -> (
    None
):
    """Composed 9307, 9419, 20247, 21503: nobody had the stream when its client returned to another
    replica, since the worker had sent nothing of this attempt yet, and stopped it."""
    request = leaving(e.Connected())
    assert not [effect for effect in request.effects if type(effect) is do.Close]
    request.feed(HEAD)
    assert request.only(do.Close)
    assert request.machine.state == s.Detached(request.machine.placeable)
    assert request.machine.placeable.worker == "w2"


def test_one_that_is_not_sent_yet_is_sent() -> None:
    request = leaving()
    assert not [effect for effect in request.effects if type(effect) is do.RecordFailure]
    request.feed(e.Connected())
    assert request.only(do.Send)
    request.feed(HEAD)
    assert request.machine.placeable.worker == "w2"


def test_one_that_has_begun_is_let_go_of_at_once() -> None:
    request = leaving(e.Connected(), HEAD)
    assert request.only(do.Close)
    assert request.machine.placeable.worker == "w2"


def test_a_stream_that_cannot_continue_without_its_client_waits_for_it() -> None:
    """It came from another gateway, and the tokens that its client has are not known here."""
    request = OneRequest(resumable=True, adopted=True)
    request.feed(e.Adopted((2, 0)), e.Owned(True, request.assignment("attach")))
    request.feed(e.ClientGone())
    assert request.only(do.Close)
    assert isinstance(request.machine.state, s.Detached)


def test_an_engine_that_dies_while_the_client_is_absent_is_left_at_once() -> None:
    """Its client may return to another replica, which does not have what it takes to continue."""
    request = OneRequest(resumable=True)
    request.begin()
    request.feed(e.ClientGone(), e.EngineGivenUp(TransportKind.ENGINE_DEAD, "signal 9"))
    failure = request.only(do.RecordFailure)
    assert (failure.kind, failure.attempt) == (TransportKind.ENGINE_DEAD, 1)
    assert request.only(do.Assign) == do.Assign(RouteCause.ENGINE_DEAD, 2)
    request.send_to("continue")
    request.feed(HEAD)
    assert request.machine.placeable.worker == "w2"


def test_a_stream_that_no_worker_continues_waits_for_its_client() -> None:
    """Another worker may take it by the time that the client returns."""
    request = handing_over()
    request.feed(e.Head(422, {}), e.ResponseEnded())
    assert request.only(do.Assign) == do.Assign(RouteCause.DECLINED, 2)
    request.feed(e.NoWorker(5.0))
    assert request.only(do.ReportWaiting)
    assert request.machine.state == s.Detached(None)
    request.feed(e.ClientReturned((2, 0)))
    assert request.only(do.Assign) == do.Assign(RouteCause.RETURNED, 2)


def test_the_engine_of_a_client_that_stayed_away_stops_its_stream() -> None:
    request = OneRequest(resumable=True)
    request.begin()
    request.feed(e.ClientGone(), e.GraceOver())
    assert request.only(do.Release).to.worker == "w1"
    assert request.only(do.RecordEnd).status == 499


def test_the_log_has_the_end_of_an_attempt_that_was_not_sent_before_its_client_left() -> None:
    """What that client has must be compared, which waits for it."""
    request = backing_off(resumable=True, doubted=True)
    request.feed(e.ClientGone())
    failure = request.only(do.RecordFailure)
    assert (failure.kind, failure.attempt) == (TransportKind.DETACHED, 2)
    assert request.machine.state == s.Detached(None)
