"""A stream of Anthropic's Messages is taken up elsewhere as if nothing had happened, on real vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relume.events.wire import frames
from tests.engine import client
from tests.engine.fleet import Engine, Zygote, engine_of
from tests.engine.parsing import tokenizer_with

pytestmark = pytest.mark.full

MESSAGES = "/v1/messages"
TOOL = {
    "name": "look_up",
    "input_schema": {
        "type": "object",
        "properties": {"word": {"type": "string", "minLength": 12}},
        "required": ["word"],
        "additionalProperties": False,
    },
}


def body_of(**options: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": "What is a lease?"}]
    base = {"model": "tiny", "max_tokens": 60, "temperature": 0, "stream": True}
    return {**base, "system": "Answer at length.", "messages": turns, **options}


def events_of(payload: bytes) -> list[tuple[str, dict[str, Any]]]:
    """(name, data) of each event."""
    found = []
    for event in payload.decode().strip().split("\n\n"):
        name, data = event.split("\n")
        found.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))
    return found


def text_of(frame: frames.Tokens) -> str:
    events = events_of(frame.payload) if frame.payload else []
    return "".join(data.get("delta", {}).get("text", "") for _, data in events)


def check(pair: tuple[Engine, Engine], body: dict[str, Any], name: str) -> client.Framed:
    """Cut the answer everywhere that matters. What was shown and what follows is the answer."""
    answer = client.post(pair[0].port, MESSAGES, body, headers=client.headers_for(request=name))
    whole = client.sort_frames(answer.body)
    assert isinstance(whole.last, frames.End), whole.last
    cached, total = answer.headers.get("x-relume-cached", "0"), len(whole.ids)
    for cut in sorted({1, total - 1, total, *range(7, total, 17)}):
        rest = client.ask(
            pair[1].port, MESSAGES, body, attempt=2, request=name, response_id=name,
            resume=("continue", whole.ids[:cut]), cached=cached,
        )  # fmt: skip
        assert rest.ids == whole.ids[cut:], f"cut at {cut}"
        assert rest.payload == whole.after(cut), f"cut at {cut}"
        assert rest.last == whole.last, f"cut at {cut}"
    return whole


def test_text_is_byte_identical(primary: Engine, standby: Engine) -> None:
    whole = check((primary, standby), body_of(), "msg-text")
    assert len(set(whole.ids)) > 30, "a degenerate output would prove nothing"
    events = events_of(whole.payload)
    names = [name for name, _ in events]
    assert names[:2] == ["message_start", "content_block_start"]
    assert names[-3:] == ["content_block_stop", "message_delta", "message_stop"]
    assert events[0][1]["message"]["id"] == "chatcmpl-msg-text"
    assert events[-2][1]["usage"]["output_tokens"] == len(whole.ids) == 60


def test_a_stop_sequence_across_the_cut_is_found(primary: Engine, standby: Engine) -> None:
    calm = client.ask(primary.port, MESSAGES, body_of())
    pieces = [text_of(frame) for frame in calm.tokens]
    at = next(i for i in range(20, 50) if len(pieces[i]) > 1 and len(pieces[i + 1]) > 1)
    stop = pieces[at][-2:] + pieces[at + 1][:2]
    whole = check((primary, standby), body_of(stop_sequences=[stop]), "msg-stop")
    last = events_of(whole.payload)[-2][1]["delta"]
    assert last == {"stop_reason": "stop_sequence", "stop_sequence": stop}


def test_a_whole_message_is_identical(primary: Engine, standby: Engine) -> None:
    body, name = body_of(stream=False), "msg-whole"
    answer = client.post(primary.port, MESSAGES, body, headers=client.headers_for(request=name))
    whole, cached = client.sort_frames(answer.body), answer.headers.get("x-relume-cached", "0")
    assert whole.whole is not None and whole.whole.status == 200
    for cut in (1, 30, 60):
        rest = client.ask(
            standby.port, MESSAGES, body, attempt=2, request=name,
            resume=("continue", whole.ids[:cut]), cached=cached,
        )  # fmt: skip
        assert rest.whole is not None
        assert json.loads(rest.whole.payload) == json.loads(whole.whole.payload)


def test_a_stream_that_cannot_go_on_exactly_is_refused(standby: Engine) -> None:
    """vLLM puts the refusal into the stream as an event; the gateway must see its status."""
    body = body_of(max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024})
    headers = client.headers_for(resume=("continue", [300, 301]))
    answer = client.post(standby.port, MESSAGES, body, headers=headers, tail=[300, 301])
    assert answer.status == 422, answer.body
    assert "cannot resume" in json.loads(answer.body)["error"]["message"]
    standby.wait_idle()


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_with(tiny_model, tmp_path_factory.mktemp("tokenizer") / "marked")


def pair_of(zygote: Zygote, *arguments: str) -> Iterator[tuple[Engine, Engine]]:
    with engine_of(zygote.fork(*arguments)) as first, engine_of(zygote.fork(*arguments)) as second:
        yield first, second


@pytest.fixture(scope="module")
def callers(zygote: Zygote, tokenizer: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two engines that parse tool calls."""
    hermes = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    yield from pair_of(zygote, "--tokenizer", str(tokenizer), *hermes)


@pytest.fixture(scope="module")
def thinkers(zygote: Zygote, tokenizer: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two engines that parse reasoning."""
    yield from pair_of(zygote, "--tokenizer", str(tokenizer), "--reasoning-parser", "qwen3")


def test_calls_of_tools_are_byte_identical(callers: tuple[Engine, Engine]) -> None:
    chosen = {"tools": [TOOL], "tool_choice": {"type": "any"}}
    whole = check(callers, body_of(max_tokens=90, **chosen), "msg-tool")
    blocks = [d["content_block"] for n, d in events_of(whole.payload) if n == "content_block_start"]
    assert "look_up" in [block.get("name") for block in blocks]
    assert all(block["id"] for block in blocks if block["type"] == "tool_use")


def test_thinking_is_byte_identical(thinkers: tuple[Engine, Engine]) -> None:
    """Its signature is random in vLLM; here every attempt gives the same."""
    whole = check(thinkers, body_of(), "msg-think")
    kinds = [d["delta"].get("type") for n, d in events_of(whole.payload) if n.endswith("_delta")]
    assert {"thinking_delta", "signature_delta"} <= set(kinds)
