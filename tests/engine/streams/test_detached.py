"""The buffer of streams whose clients may come back, without an engine."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from relume.engine_shim.agent.report_server import is_step
from relume.engine_shim.engine.streams.buffer_report import REPORT_S, BufferReport
from relume.engine_shim.engine.streams.buffered_streams import StreamBuffers, StreamGone
from relume.engine_shim.engine.streams.stream_buffer import StreamBuffer
from relume.engine_shim.generation import Generation
from relume.events.log.codec import decode, encode
from relume.events.vocabulary import StreamsReported
from relume.events.wire import frames
from relume.events.wire.envelope import Envelope
from relume.events.wire.errors import HeaderError
from relume.events.wire.headers import Grace
from relume.events.wire.resumption import DeliveredChoice, Resume
from relume.events.wire.worker_calls import OriginAnswered

START = {"type": "http.response.start", "status": 200, "headers": []}


class Wire:
    """An ASGI connection that notes what was sent, and can be lost or slow."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.ended = asyncio.Event()
        self.gone = asyncio.Event()
        self.open = asyncio.Event()
        self.open.set()

    async def send(self, message: dict[str, Any]) -> None:
        await self.open.wait()
        if message["type"] == "http.response.body":
            self.sent.append(message["body"])
            if not message["more_body"]:
                self.ended.set()

    async def receive(self) -> dict[str, Any]:
        await self.gone.wait()
        return {"type": "http.disconnect"}

    @property
    def frames(self) -> list[frames.Frame]:
        data = b"".join(self.sent)
        if data.startswith(b":v "):
            head, _, rest = data.partition(b"\n")
            data = rest[int(head[3:]) :]
        return frames.FrameReader().feed(data)


def _kept(
    buffers: StreamBuffers,
    wire: Wire,
    request: str = "q",
    resume: Resume | None = None,
    **bounds: int,
) -> StreamBuffer:
    limits = {"grace_s": 60, "stream_bytes": 1 << 20, "total_bytes": 1 << 20, "streams": 8}
    generation = Generation(request, 1, resume=resume)
    kept = buffers.keep(generation, Grace(**{**limits, **bounds}), "claim", b"{}\nbody")
    kept.begin(wire.send)
    return kept


async def _write(kept: StreamBuffer, first: int, count: int, size: int = 10) -> None:
    for number in range(first, first + count):
        data = frames.encode_tokens(number, [1000 + number], b"x" * size)
        await kept.send({"type": "http.response.body", "body": data, "more_body": True})


async def _finish(kept: StreamBuffer) -> None:
    await kept.send(
        {"type": "http.response.body", "body": frames.encode_end("stop"), "more_body": False}
    )


async def _lose(kept: StreamBuffer, wire: Wire) -> asyncio.Task[Any]:
    """The connection is lost, as the handler's own `receive` finds out."""
    handler = asyncio.create_task(kept.receiving(wire.receive)())
    wire.gone.set()
    async with asyncio.timeout(5):
        while kept.attached:
            await asyncio.sleep(0)
    return handler


def _ids(wire: Wire) -> list[int]:
    return [i for f in wire.frames if isinstance(f, frames.Tokens) for i in f.ids]


async def test_a_lost_connection_is_gone_on_with_from_any_token() -> None:
    buffers, first, second = StreamBuffers(), Wire(), Wire()
    kept = _kept(buffers, first)
    await kept.send(START)
    await _write(kept, 0, 10)
    handler = await _lose(kept, first)
    await _write(kept, 10, 10)
    buffers.find("q", 1, "claim").attach(second.send, 7)
    await _write(kept, 20, 5)
    await _finish(kept)
    await second.ended.wait()
    assert _ids(second) == [1000 + n for n in range(25)]
    shown = [f.start for f in second.frames if isinstance(f, frames.Tokens) and f.payload]
    assert shown == list(range(7, 25)) and second.frames[-1] == frames.End("stop")
    assert not handler.done(), "the handler must not hear of it"
    handler.cancel()
    buffers.forget(kept, "test")
    assert buffers.bytes == 0


async def test_a_stream_belongs_to_the_log_of_the_gateway_that_attached_last() -> None:
    buffers, bounds = StreamBuffers(), Grace(60, 1 << 20, 1 << 20, 8)
    for attempt in (1, 2):
        envelope = Envelope("/v1/completions", "q", "17", b"body", "one AAA").pack()
        buffers.keep(Generation("q", attempt), bounds, "claim", envelope).begin(Wire().send)
    assert buffers.origin("q") == OriginAnswered("one AAA", "one", 2)
    assert buffers.origin("other") is None
    held = buffers.find("q", 2, "claim")
    held.attach(Wire().send, 0, "two")
    assert buffers.origin("q") == OriginAnswered("one AAA", "two", 2)
    held.attach(Wire().send, 0)
    assert buffers.origin("q") == OriginAnswered("one AAA", "two", 2), "its replica is of no log"
    buffers.forget(held, "test")
    assert buffers.origin("q") == OriginAnswered("one AAA", "one", 1)
    earlier = Envelope("/v1/completions", "q", "17", b"body").pack()
    buffers.keep(Generation("old", 1), bounds, "claim", earlier).begin(Wire().send)
    assert buffers.origin("old") is None, "the build of its gateway is an earlier one"


def _continued() -> Resume:
    """Its client has three tokens of an earlier attempt."""
    return Resume.of("continue", [1000, 1001, 1002])


async def test_an_attempt_that_continues_a_stream_is_kept_before_it_begins() -> None:
    """Its client has a part of the stream, and may return to it at a replica that has nothing of
    it."""
    buffers, first, second = StreamBuffers(), Wire(), Wire()
    kept = _kept(buffers, first, resume=_continued())
    handler = await _lose(kept, first)
    kept.attach(second.send, 1)
    await kept.send(START)
    await _write(kept, 3, 2)
    await _finish(kept)
    await second.ended.wait()
    assert _ids(second) == [1000 + n for n in range(5)]
    assert not handler.done()
    handler.cancel()


async def test_it_may_begin_while_no_connection_is_there() -> None:
    buffers, first, second = StreamBuffers(), Wire(), Wire()
    kept = _kept(buffers, first, resume=_continued())
    handler = await _lose(kept, first)
    await kept.send(START)
    await _write(kept, 3, 2)
    kept.attach(second.send, 1)
    await _finish(kept)
    await second.ended.wait()
    assert _ids(second) == [1000 + n for n in range(5)]
    handler.cancel()


async def test_if_the_engine_refuses_it_then_nothing_is_kept() -> None:
    buffers, first, second = StreamBuffers(), Wire(), Wire()
    kept = _kept(buffers, first, resume=_continued())
    handler = await _lose(kept, first)
    kept.attach(second.send, 1)
    await kept.send({**START, "status": 400})
    await second.ended.wait()
    assert second.frames[-1].kind == "taken"
    with pytest.raises(StreamGone):
        buffers.find("q", 1, "claim")
    assert (await handler)["type"] == "http.disconnect"


async def test_the_newest_connection_wins() -> None:
    buffers, first, second, third = StreamBuffers(), Wire(), Wire(), Wire()
    kept = _kept(buffers, first)
    await kept.send(START)
    await _write(kept, 0, 3)
    kept.attach(second.send, 0)
    await first.ended.wait()
    assert first.frames[-1].kind == "taken"
    kept.attach(third.send, 2)
    await second.ended.wait()
    await _finish(kept)
    await third.ended.wait()
    assert _ids(third) == [1000, 1001, 1002]


async def test_a_stalled_connection_does_not_keep_the_stream_from_the_next() -> None:
    buffers, first, second = StreamBuffers(), Wire(), Wire()
    kept = _kept(buffers, first)
    await kept.send(START)
    first.open.clear()
    writing = asyncio.create_task(_write(kept, 0, 600, 1000))
    for _ in range(20):
        await asyncio.sleep(0)
    assert not writing.done(), "a slow connection holds the handler up"
    kept.attach(second.send, 0)
    await writing
    await _finish(kept)
    await second.ended.wait()
    assert _ids(second) == [1000 + n for n in range(600)]


async def test_beyond_the_bound_ids_are_kept_and_payloads_are_not() -> None:
    buffers, first, second = StreamBuffers(), Wire(), Wire()
    kept = _kept(buffers, first, stream_bytes=1000)
    await kept.send(START)
    await _lose(kept, first)
    await _write(kept, 0, 200)
    assert kept.bytes < 1100
    kept.attach(second.send, 5)
    await _finish(kept)
    await second.ended.wait()
    assert _ids(second) == [1000 + n for n in range(200)]
    assert len(kept.ids) > 100


async def test_tokens_of_earlier_attempts_are_known() -> None:
    buffers, first, second = StreamBuffers(), Wire(), Wire()
    resume = Resume("continue", (DeliveredChoice((7, 8, 9)),))
    bounds = Grace(60, 1 << 20, 1 << 20, 8)
    kept = buffers.keep(Generation("q", 2, b"", resume), bounds, "claim", b"{}\n")
    kept.begin(first.send)
    await kept.send(START)
    await _write(kept, 3, 2)
    kept.attach(second.send, 3)
    await _finish(kept)
    await second.ended.wait()
    assert _ids(second) == [7, 8, 9, 1003, 1004]


async def test_the_one_detached_longest_makes_room() -> None:
    buffers = StreamBuffers()
    all_kept = []
    for name in ("a", "b", "c"):
        wire = Wire()
        kept = _kept(buffers, wire, name, streams=2, total_bytes=1 << 19)
        await kept.send(START)
        await _write(kept, 0, 1)
        await _lose(kept, wire)
        all_kept.append(kept)
    with pytest.raises(StreamGone, match="too many detached streams"):
        buffers.find("a", 1, "claim")
    for name in ("b", "c"):
        assert buffers.find(name, 1, "claim")
    await _write(all_kept[2], 1, 30, size=1 << 16)
    with pytest.raises(StreamGone, match="no room"):
        buffers.find("b", 1, "claim")


async def _finished(buffers: StreamBuffers, name: str, **bounds: int) -> StreamBuffer:
    """A stream of 10 tokens that was written out to its end."""
    wire = Wire()
    kept = _kept(buffers, wire, name, **bounds)
    await kept.send(START)
    await _write(kept, 0, 10)
    await _finish(kept)
    await wire.ended.wait()
    while kept.attached:
        await asyncio.sleep(0)
    return kept


async def test_a_finished_stream_is_kept_until_it_is_released() -> None:
    buffers, again = StreamBuffers(), Wire()
    for name in ("q", "other"):
        await _finished(buffers, name)
    buffers.release([("q", 1, "another claim"), ("q", 2, "claim"), ("nobody", 1, "claim")])
    buffers.find("q", 1, "claim").attach(again.send, 7)
    await again.ended.wait()
    assert _ids(again) == [1000 + n for n in range(10)]
    shown = [f.start for f in again.frames if isinstance(f, frames.Tokens) and f.payload]
    assert shown == [7, 8, 9] and again.frames[-1] == frames.End("stop")
    buffers.release([("q", 1, "claim"), ("other", 1, "claim")])
    assert buffers.bytes == 0 and buffers.figures()["streams"] == 0
    with pytest.raises(StreamGone, match="released"):
        buffers.find("q", 1, "claim")


async def test_a_finished_stream_without_a_release_expires() -> None:
    buffers = StreamBuffers()
    await _finished(buffers, "q", grace_s=0)
    async with asyncio.timeout(20):
        while buffers.figures()["streams"]:
            await asyncio.sleep(0)
    assert buffers.bytes == 0


async def test_finished_streams_make_room_for_those_that_run() -> None:
    buffers, wire = StreamBuffers(), Wire()
    kept = _kept(buffers, wire, "runs", streams=2)
    await kept.send(START)
    await _lose(kept, wire)
    for name in ("a", "b", "c"):
        await _finished(buffers, name, streams=2)
    assert buffers.find("runs", 1, "claim") and buffers.find("c", 1, "claim")
    for name in ("a", "b"):
        with pytest.raises(StreamGone, match="too many"):
            buffers.find(name, 1, "claim")


async def test_another_claim_gets_nothing() -> None:
    buffers, wire = StreamBuffers(), Wire()
    _kept(buffers, wire)
    with pytest.raises(StreamGone) as refused:
        buffers.find("q", 1, "other")
    assert refused.value.status == 403
    with pytest.raises(StreamGone) as missing:
        buffers.find("q", 2, "claim")
    assert missing.value.status == 404


async def test_a_stream_whose_client_returns_outlives_its_grace() -> None:
    buffers, first, second, third = StreamBuffers(), Wire(), Wire(), Wire()
    kept = _kept(buffers, first, grace_s=0)
    await kept.send(START)
    await _write(kept, 0, 3)
    _, sink = kept.attach(second.send, 0)
    kept.lost(sink)
    kept.attach(third.send, 0)
    for _ in range(3):  # turns in which the grace is over
        await asyncio.sleep(0)
    await _finish(kept)
    await third.ended.wait()
    assert _ids(third) == [1000, 1001, 1002] and third.frames[-1] == frames.End("stop")


@pytest.mark.parametrize("is_finished", [True, False])
async def test_a_question_about_its_origin_begins_its_grace_anew(is_finished: bool) -> None:
    """A replica of a new log puts it for a client that is to return once more."""
    buffers, wire = StreamBuffers(), Wire()
    envelope = Envelope("/v1/completions", "q", "17", b"body", "one AAA").pack()
    kept = buffers.keep(Generation("q", 1), Grace(60, 1 << 20, 1 << 20, 8), "claim", envelope)
    kept.begin(wire.send)
    await kept.send(START)
    await _write(kept, 0, 3)
    assert buffers.origin("q") is not None
    if is_finished:
        await _finish(kept)
        await wire.ended.wait()
    else:
        await _lose(kept, wire)
    kept.expire_in(0)
    assert buffers.origin("q") is not None
    for _ in range(3):  # turns in which that grace is over
        await asyncio.sleep(0)
    assert buffers.find("q", 1, "claim") is kept
    kept.expire_in(0)
    for _ in range(3):
        await asyncio.sleep(0)
    assert buffers.origin("q") is None


async def test_the_end_of_the_grace_is_the_handlers_disconnect() -> None:
    buffers, wire = StreamBuffers(), Wire()
    kept = _kept(buffers, wire, grace_s=0)
    await kept.send(START)
    await _write(kept, 0, 2)
    handler = await _lose(kept, wire)
    assert (await handler)["type"] == "http.disconnect"
    assert buffers.bytes == 0
    await _write(kept, 2, 1)
    assert buffers.bytes == 0


async def test_before_the_first_byte_a_lost_connection_cancels() -> None:
    buffers, wire = StreamBuffers(), Wire()
    kept = _kept(buffers, wire)
    wire.gone.set()
    assert (await kept.receiving(wire.receive)())["type"] == "http.disconnect"
    await kept.settled()
    assert buffers.bytes == 0


def test_bounds_that_do_not_read() -> None:
    assert Grace.parse("30 1 2 3") == Grace(30, 1, 2, 3)
    for header in ("", "30", "30 1 2 x", "1 2 3 4 5"):
        with pytest.raises(HeaderError):
            Grace.parse(header)


async def test_figures_tell_who_is_away_and_which_bound_ended_them() -> None:
    buffers = StreamBuffers()
    wires = {name: Wire() for name in "abc"}
    kept = {name: _kept(buffers, wire, name, streams=2) for name, wire in wires.items()}
    for name in "abc":
        await kept[name].send(START)
        await _write(kept[name], 0, 2)
    assert buffers.figures()["detached"] == 0 and buffers.figures()["streams"] == 3
    for name in "abc":
        await _lose(kept[name], wires[name])
    figures = buffers.figures()
    assert figures["detached"] == 2 and figures["refused_streams"] == 1
    assert figures["detached_bytes"] == figures["bytes"] == kept["b"].bytes + kept["c"].bytes
    kept["b"].attach(Wire().send, 0)
    kept["b"].drop_sent()
    figures = buffers.figures()
    assert (figures["detached"], figures["taken_up"], figures["cut_short"]) == (1, 1, 0)
    buffers.forget(kept["c"], "its grace is over")
    assert buffers.figures()["expired"] == 1 and buffers.figures()["detached"] == 0
    buffers.forget(kept["b"], "its grace is over")
    assert buffers.figures()["expired"] == 1, "its client was there"


def test_figures_are_reported_when_they_changed_and_not_too_often() -> None:
    figures = {"streams": 0}
    told: list[Any] = []
    report = BufferReport(3, lambda: dict(figures), lambda record: told.append(decode(record)))
    report.look(0.0)
    assert not told
    figures["streams"] = 2
    report.look(1.0)
    figures["streams"] = 3
    report.look(1.0 + REPORT_S / 2)
    assert told == [StreamsReported(3, (("streams", 2),))]
    report.look(1.0 + REPORT_S)
    report.look(99.0)
    assert told[1:] == [StreamsReported(3, (("streams", 3),))]
    assert all(is_step(encode(event)) for event in told), "the agent passes it on"
