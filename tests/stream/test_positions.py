"""Frames say where they stand: one that stands elsewhere is never passed on."""

from __future__ import annotations

import pytest

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream.arrival import Arrival, Assignment
from relume.controlplane.stream.machine import StreamMachine
from relume.controlplane.stream.stream_data import Stream
from relume.events.vocabulary.enums import TransportKind
from relume.events.wire.frames import CONTENT_TYPE, encode_tokens
from tests.stream.test_doubted_tokens import CLAIM, HEAD, OneRequest

NOTE = b"data: note\n\n"


def streaming() -> StreamMachine:
    """A client has token 0 of its answer."""
    arrival = Arrival(
        request="r", model="m", route="/v1/completions", stream=True, prompt_tokens=1,
        max_tokens=9, verdict="exact",
    )  # fmt: skip
    stream = Stream(
        arrival=arrival, path="/p", response_id="q", body=b"{}", limits=GatewayConfig(), now=0.0
    )
    machine = StreamMachine(stream)
    worker = Assignment(
        request="r", attempt=1, worker="w0", incarnation=1, host="h", port=1, mode="new",
        dispatch=b"d",
    )  # fmt: skip
    for event in (
        e.Accepted(arrival),
        e.Admitted(30.0),
        e.Assigned(worker),
        e.Connected(()),
        e.Head(200, {b"content-type": CONTENT_TYPE}),
        e.Data(encode_tokens(0, [5], b"data: a\n\n")),
    ):
        machine.handle(event, 0.0)
    return machine


@pytest.mark.parametrize("choice", [-1, 0])
def test_an_event_without_tokens_after_a_lost_frame_is_not_passed_on(choice: int) -> None:
    """The usage event of a stream whose last token frame did not arrive."""
    machine = streaming()
    at = 2 if choice < 0 else 1
    effects = machine.handle(e.Data(encode_tokens(at, [], b"data: usage\n\n", choice)), 1.0)
    assert not [effect for effect in effects if isinstance(effect, do.ToClient)]
    (failure,) = [effect for effect in effects if isinstance(effect, do.RecordFailure)]
    assert failure.kind == "engine_error" and "was due" in failure.detail


def test_an_event_without_tokens_in_its_place_is_passed_on() -> None:
    effects = streaming().handle(e.Data(encode_tokens(1, [], b"data: usage\n\n")), 1.0)
    assert [effect.data for effect in effects] == [b"data: usage\n\n"]


def test_tokens_that_come_twice_reach_the_client_once() -> None:
    effects = streaming().handle(e.Data(encode_tokens(0, [5], b"data: a\n\n")), 1.0)
    assert not [effect for effect in effects if isinstance(effect, do.ToClient)]
    (failure,) = [effect for effect in effects if isinstance(effect, do.RecordFailure)]
    assert failure.kind == "engine_error" and failure.detail.endswith("came where 1 was due")


def test_the_next_worker_repeats_no_event_from_before_a_token_without_text() -> None:
    request = OneRequest()
    request.begin(1)
    request.feed(e.Data(encode_tokens(1, [], NOTE)), e.Data(encode_tokens(1, [6])))
    request.feed(e.ConnectionLost(TransportKind.RESET, "", False))
    request.send_to("continue")
    request.feed(HEAD, e.Data(encode_tokens(2, [7], b"data: c\n\n")))
    assert request.effects[-1] == do.ToClient(b"data: c\n\n")


def test_the_id_of_an_event_counts_the_events_after_the_last_token() -> None:
    """Also of a token that shows no text."""
    request = OneRequest(resumable=True)
    request.begin(1)
    for start, ids, shown, place in (
        (1, [], NOTE, b"1:1"),
        (1, [6], b"", b""),
        (2, [], NOTE, b"2:1"),
    ):
        request.feed(e.Data(encode_tokens(start, ids, shown)))
        if place:
            line = b"id: r:%b:%b\n" % (CLAIM.encode(), place)
            assert request.only(do.ToClient).data == line + NOTE
