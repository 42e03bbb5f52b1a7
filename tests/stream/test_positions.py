"""Frames say where they stand: one that stands elsewhere is never passed on."""

from __future__ import annotations

import pytest

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.stream import stream_effects as do
from relume.controlplane.stream import stream_events as e
from relume.controlplane.stream.arrival import Arrival, Assignment
from relume.controlplane.stream.machine import StreamMachine
from relume.controlplane.stream.stream_data import Stream
from relume.events.wire.frames import CONTENT_TYPE, encode_tokens


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
