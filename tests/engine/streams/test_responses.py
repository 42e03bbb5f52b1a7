"""A stream of the Responses API is taken up elsewhere as if nothing had happened, on real vLLM."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relume.events.wire import frames
from tests.engine import client
from tests.engine.fleet import Engine, Zygote
from tests.engine.parsing import tokenizer_with
from tests.engine.streams.test_messages import events_of, pair_of

pytestmark = pytest.mark.full

RESPONSES = "/v1/responses"
TOOL = {
    "type": "function",
    "name": "look_up",
    "parameters": {
        "type": "object",
        "properties": {"word": {"type": "string", "minLength": 12}},
        "required": ["word"],
        "additionalProperties": False,
    },
}
SEEDED = {"temperature": 0.8, "seed": 7}


def body_of(**options: Any) -> dict[str, Any]:
    base = {"model": "tiny", "max_output_tokens": 60, "temperature": 0, "stream": True}
    return {**base, "instructions": "Answer at length.", "input": "What is a lease?", **options}


def number_after(shown: list[frames.Tokens]) -> str:
    """The number that the gateway would send of a client that has these frames."""
    events = [data for frame in shown if frame.payload for _, data in events_of(frame.payload)]
    return str(events[-1]["sequence_number"] + 1)


def created_of(payload: bytes) -> bytes:
    return str(events_of(payload)[0][1]["response"]["created_at"]).encode()


def check(
    pair: tuple[Engine, Engine], body: dict[str, Any], name: str, numbered: bool = True
) -> client.Framed:
    """Cut the answer everywhere that matters. What was shown and what follows is the answer."""
    headers = client.headers_for(request=name)
    answer = client.post(pair[0].port, RESPONSES, body, headers=headers)
    whole = client.sort_frames(answer.body)
    assert isinstance(whole.last, frames.End), whole.last
    cached, total = answer.headers.get("x-relume-cached", "0"), len(whole.ids)
    for cut in sorted({1, total - 1, total, *range(7, total, 17)}):
        shown = [frame for frame in whole.tokens if frame.start < cut]
        number = {"next-event": number_after(shown)} if numbered else {}
        rest = client.ask(
            pair[1].port, RESPONSES, body, attempt=2, request=name, response_id=name,
            resume=("continue", whole.ids[:cut]), cached=cached,
            created=created_of(whole.payload), **number,
        )  # fmt: skip
        assert rest.ids == whole.ids[cut:], f"cut at {cut}"
        assert rest.payload == whole.after(cut), f"cut at {cut}"
        assert rest.last == whole.last, f"cut at {cut}"
    events = [data for _, data in events_of(whole.payload)]
    assert [data["sequence_number"] for data in events] == list(range(len(events)))
    return whole


@pytest.mark.parametrize("numbered", (True, False), ids=("numbered", "counted"))
@pytest.mark.parametrize("sampling", ({}, SEEDED), ids=("greedy", "seeded"))
def test_text_is_byte_identical(
    primary: Engine, standby: Engine, sampling: dict[str, Any], numbered: bool
) -> None:
    name = f"resp-text-{len(sampling)}-{numbered}"
    whole = check((primary, standby), body_of(**sampling), name, numbered)
    assert len(set(whole.ids)) > 30, "a degenerate output would prove nothing"
    events = events_of(whole.payload)
    names = [name for name, _ in events]
    assert names[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert names[-1] == "response.completed"
    response = events[-1][1]["response"]
    assert (response["id"], response["status"]) == (f"resp_{name}", "incomplete")
    assert response["usage"]["output_tokens"] == len(whole.ids) == 60
    items = {data["item_id"] for _, data in events if "item_id" in data}
    assert items == {response["output"][0]["id"]}


def test_events_go_on_by_the_number_of_the_client(primary: Engine, standby: Engine) -> None:
    """Another engine may have shown the same tokens in fewer events."""
    body, name = body_of(), "resp-grouped"
    whole = client.ask(primary.port, RESPONSES, body, request=name)
    rest = client.ask(
        standby.port, RESPONSES, body, attempt=2, request=name,
        resume=("continue", whole.ids[:30]), **{"next-event": "11"},
    )  # fmt: skip
    numbers = [data["sequence_number"] for _, data in events_of(rest.payload)]
    assert numbers == list(range(11, 11 + len(numbers))) and len(numbers) > 30


def test_a_whole_response_is_identical(primary: Engine, standby: Engine) -> None:
    body, name = body_of(stream=False), "resp-whole"
    answer = client.post(primary.port, RESPONSES, body, headers=client.headers_for(request=name))
    whole, cached = client.sort_frames(answer.body), answer.headers.get("x-relume-cached", "0")
    assert whole.whole is not None and whole.whole.status == 200
    expected = json.loads(whole.whole.payload)
    assert expected["id"] == f"resp_{name}"
    for cut in (1, 30, 60):
        rest = client.ask(
            standby.port, RESPONSES, body, attempt=2, request=name, cached=cached,
            resume=("continue", whole.ids[:cut]), created=str(expected["created_at"]).encode(),
        )  # fmt: skip
        assert rest.whole is not None
        assert json.loads(rest.whole.payload) == expected


def test_log_probabilities_come_again_with_the_item_so_they_are_generated_again(
    primary: Engine, standby: Engine
) -> None:
    body = body_of(include=["message.output_text.logprobs"], top_logprobs=1)
    headers = client.headers_for(request="resp-logprobs")
    answer = client.post(primary.port, RESPONSES, body, headers=headers)
    whole, cached = client.sort_frames(answer.body), answer.headers.get("x-relume-cached", "0")
    rest = client.ask(
        standby.port, RESPONSES, body, attempt=2, request="resp-logprobs", cached=cached,
        resume=("replay", whole.ids[:20]), created=created_of(whole.payload),
        **{"next-event": number_after(whole.tokens[:20])},
    )  # fmt: skip
    ours, theirs = (
        [(d["type"], d.get("delta"), d["sequence_number"]) for _, d in events_of(payload)]
        for payload in (rest.payload, whole.after(20))
    )
    assert ours == theirs
    content = [
        events_of(p)[-1][1]["response"]["output"][0]["content"][0]
        for p in (rest.payload, whole.payload)
    ]
    assert len(content[0]["logprobs"]) == 60 and content[0]["text"] == content[1]["text"]
    for ours, theirs in zip(content[0]["logprobs"], content[1]["logprobs"], strict=True):
        assert abs(ours["logprob"] - theirs["logprob"]) < 1e-3


def test_a_stream_that_cannot_go_on_exactly_is_refused(standby: Engine) -> None:
    """The handler raises in the middle of its stream; the gateway must see the status."""
    body = body_of(logit_bias={"99999999": 1})
    answer = client.post(standby.port, RESPONSES, body, headers=client.headers_for())
    assert answer.status == 400, answer.body
    assert json.loads(answer.body)["error"]["message"]
    standby.wait_idle()


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_with(tiny_model, tmp_path_factory.mktemp("tokenizer") / "marked")


@pytest.fixture(scope="module")
def callers(zygote: Zygote, tokenizer: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two engines that parse tool calls."""
    hermes = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    yield from pair_of(zygote, "--tokenizer", str(tokenizer), *hermes)


@pytest.fixture(scope="module")
def thinkers(zygote: Zygote, tokenizer: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two engines that parse reasoning."""
    yield from pair_of(zygote, "--tokenizer", str(tokenizer), "--reasoning-parser", "qwen3")


@pytest.mark.parametrize("options", ({"tool_choice": "required"}, {}), ids=("required", "auto"))
def test_calls_of_tools_are_byte_identical(
    callers: tuple[Engine, Engine], options: dict[str, Any]
) -> None:
    name = f"resp-tool-{len(options)}"
    whole = check(callers, body_of(max_output_tokens=90, tools=[TOOL], **options), name)
    items = events_of(whole.payload)[-1][1]["response"]["output"]
    if options:
        assert {item["name"] for item in items if item["type"] == "function_call"} == {"look_up"}
        assert len({item["id"] for item in items}) == len(items) > 0


def test_reasoning_is_byte_identical(thinkers: tuple[Engine, Engine]) -> None:
    whole = check(thinkers, body_of(), "resp-think")
    names = {name for name, _ in events_of(whole.payload)}
    assert "response.reasoning_text.delta" in names
