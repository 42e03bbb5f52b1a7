"""Load and streams of a server without our plugin: what is counted, how events are cut."""

from __future__ import annotations

import json
import random

import pytest

from relume.engine_shim.agent.agent_config import parse
from relume.engine_shim.plain.observed_load import PlainAccount
from relume.engine_shim.plain.stream_frames import MAX_EVENT_BYTES, EventTooLong, PlainStream
from relume.events import vocabulary as v
from relume.events.settings.config_error import ConfigError
from relume.events.wire import frames


def chat(text: str | None, finish: str = "") -> bytes:
    ended = f'"{finish}"' if finish else "null"
    shown = "null" if text is None else f'"{text}"'
    return (
        f'data: {{"choices":[{{"delta":{{"content":{shown}}},"finish_reason":{ended}}}]}}\n\n'
    ).encode()


STREAM = (
    chat("") + chat("so") + b": a comment\n\n" + chat("me") + chat(None) + chat("thing", "stop")
    + b"data: [DONE]\n\n"
)  # fmt: skip


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"])
@pytest.mark.parametrize("seed", range(8))
def test_events_leave_whole_and_verbatim_however_they_arrive(seed: int, newline: bytes) -> None:
    data = STREAM.replace(b"\n", newline)
    rng = random.Random(seed)
    stream, reader = PlainStream(), frames.FrameReader()
    payloads, tokens, at = [], 0, 0
    while at < len(data):
        end = at + rng.randint(1, 60)
        framed, shown = stream.feed(data[at:end])
        tokens += shown
        for frame in reader.feed(framed):
            assert isinstance(frame, frames.Tokens)
            assert (frame.start, frame.ids) == (-1, ())
            assert frame.payload.endswith(newline * 2)
            payloads.append(frame.payload)
        at = end
    assert b"".join(payloads) == data
    assert (tokens, stream.finish, stream.complete) == (3, "stop", True)


def test_a_stream_that_breaks_off_is_not_complete() -> None:
    stream = PlainStream()
    stream.feed(chat("so"))
    assert not stream.complete
    stream.feed(b"data: [DONE]\n\ndata: {")
    assert not stream.complete


def event(kind: str, **content: object) -> bytes:
    return f"event: {kind}\ndata: {json.dumps({'type': kind, **content})}\n\n".encode()


def test_events_of_messages_are_counted_and_end() -> None:
    stream = PlainStream()
    begun = event("message_start", message={"content": [], "stop_reason": None})
    opened = event("content_block_start", content_block={"type": "text", "text": ""})
    assert [stream.feed(begun)[1], stream.feed(opened)[1]] == [0, 0]
    for delta in ({"text": "so"}, {"thinking": "so"}, {"partial_json": "{"}):
        assert stream.feed(event("content_block_delta", delta=delta))[1] == 1
    assert not stream.complete
    stream.feed(event("message_stop"))
    assert stream.complete
    stream.feed(event("message_delta", delta={"stop_reason": "end_turn"}))
    assert stream.finish == "end_turn"


def test_events_of_responses_are_counted_and_end() -> None:
    stream = PlainStream()
    created = event("response.created", response={"output": [], "status": "in_progress"})
    assert stream.feed(created)[1] == 0
    assert stream.feed(event("response.output_text.delta", delta="so"))[1] == 1
    assert stream.feed(event("response.output_text.done", text="so"))[1] == 0, "it was shown"
    assert not stream.complete
    done = event("response.completed", response={"output": [{"text": "so"}], "status": "completed"})
    assert stream.feed(done)[1] == 0
    assert stream.complete


def test_an_endless_event_is_refused() -> None:
    with pytest.raises(EventTooLong):
        PlainStream().feed(b"data: " + b"x" * (MAX_EVENT_BYTES + 1))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_load_is_reported_by_dispatch_by_token_and_by_end() -> None:
    """Nothing is left when all have ended, and a paced record shows batch, context and the
    time between two tokens of a stream."""
    clock, told = Clock(), []
    account = PlainAccount(7, told.append, clock)
    one = account.begin("a", 1, 100, b"d")
    two = account.begin("b", 2, 50, b"")
    assert (account.waiting, account.running) == (2, 0)
    account.stream(one, 1)
    account.stream(two, 1)
    for _ in range(3):
        clock.now += 0.0625
        account.stream(one, 1)
        account.stream(two, 1)
    (paced,) = [s for s in told if s.duration_us]
    assert (paced.incarnation, paced.step, paced.batch) == (7, 1, 2)
    assert paced.sum_context == 150 + 5, "five tokens had come by then"
    assert paced.duration_us == 50_000, "125 ms for two and a half tokens a stream"
    account.end(one, "stop")
    account.end(one, "abort")
    account.end(two, "abort")
    assert (account.waiting, account.running) == (0, 0)
    changes = [c for s in told for c in s.changes]
    assert changes == [
        v.RequestQueued("a", 1, 100, b"d"),
        v.RequestQueued("b", 2, 50, b""),
        v.FirstToken("a", 1),
        v.FirstToken("b", 2),
        v.EngineFinished("a", 1, "stop", 4),
        v.EngineFinished("b", 2, "abort", 4),
    ]


def test_a_statement_has_each_request_as_far_as_it_is() -> None:
    """Dispatches are decisions of another log, and left out."""
    told: list[v.EngineStep] = []
    account = PlainAccount(7, told.append, Clock())
    account.begin("a", 3, 100, b"d")
    two = account.begin("b", 2, 50, b"d")
    account.stream(account.begin("c", 1, 5, b"d"), 1)
    account.end(two, "stop")
    told.clear()
    account.state_again()
    changes = [c for s in told for c in s.changes]
    assert changes == [
        v.RequestQueued("a", 3, 100), v.RequestQueued("c", 1, 5), v.FirstToken("c", 1)
    ]  # fmt: skip
    told.clear()
    PlainAccount(7, told.append, Clock()).state_again()
    assert not told


BASE = ["--worker", "p0", "--run-dir", "/tmp/r", "--model", "m"]


@pytest.mark.parametrize(
    ("more", "remedy"),
    [
        (["--host-kind", "plain"], "is required with --host-kind plain"),
        (["--backend", "http://h:1"], "and only there"),
        (["--host-kind", "plain", "--backend", "h:1"], "not an http://"),
        (
            ["--host-kind", "plain", "--backend", "http://h:1", "--checkpoint-mb", "8"],
            "not supported",
        ),
    ],
)
def test_settings_that_do_not_fit_a_plain_server(more: list[str], remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        parse([*BASE, *more], {})
