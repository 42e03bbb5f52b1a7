"""Attempts for absent clients that their engine hands over."""

from __future__ import annotations

from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream import stream_states as s
from relume.events.vocabulary.enums import RouteCause, TransportKind
from tests.stream.test_doubted_tokens import HEAD, OneRequest


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
