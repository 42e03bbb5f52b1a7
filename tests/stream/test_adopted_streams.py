"""Streams of other replicas, before the log says whose they are."""

from __future__ import annotations

from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream import stream_states as s
from tests.stream.test_doubted_tokens import OneRequest


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
