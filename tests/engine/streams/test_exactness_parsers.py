"""Tool calls and reasoning, cut everywhere: the parts join without a seam, ids included.

The tiny model calls tools where a grammar makes it, and ends its reasoning where a seeded
draw does; what is between is its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relume.events.wire import frames
from tests.engine import client, matrix
from tests.engine.fleet import Engine, Zygote, engine_of
from tests.engine.matrix import CHAT
from tests.engine.parsing import token_of, tokenizer_with

pytestmark = pytest.mark.full

WORD = {"type": "string", "minLength": 12}
TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "parameters": {
            "type": "object",
            "properties": {"word": WORD},
            "required": ["word"],
            "additionalProperties": False,
        },
    },
}
CALL = r'<tool_call>\n\{"name": "look_up", "arguments": \{"word": "[a-z ]{20,40}"\}\}\n</tool_call>'


def calls(count: int) -> dict[str, Any]:
    """A few words, then so many calls."""
    regex = f"[a-z ]{{9,20}}({CALL}){{{count}}}"
    return {"tools": [TOOL], "structured_outputs": {"regex": regex}}


NAMED = {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "look_up"}}}
SCHEMA = {"type": "object", "properties": {"word": WORD}, "required": ["word"]}
JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}}
LOGPROBS = {"logprobs": True, "top_logprobs": 2}
SEEDED = {"temperature": 1.0, "seed": 5}

WITH_TOOLS: dict[str, dict[str, Any]] = {
    "not-called": {"tools": [TOOL]},
    "called": calls(2),
    "called-logprobs": calls(2) | LOGPROBS,
    "called-seeded": calls(2) | SEEDED,
    "called-choices": calls(2) | SEEDED | {"n": 2},
    "named": NAMED,
    "required": {"tools": [TOOL], "tool_choice": "required"},
}
WITH_REASONING: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": LOGPROBS,
    "hidden": {"include_reasoning": False},
    "json": JSON,
    "called": calls(1),
    "called-choices": calls(1) | {"n": 2},
}


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tokenizer_with(tiny_model, tmp_path_factory.mktemp("tokenizer") / "marked")


def pair_of(zygote: Zygote, *arguments: str) -> Iterator[tuple[Engine, Engine]]:
    hermes = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with engine_of(zygote.fork(*hermes, *arguments)) as first:
        with engine_of(zygote.fork(*hermes, *arguments)) as second:
            yield first, second


@pytest.fixture(scope="module")
def callers(zygote: Zygote, tokenizer: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two engines that parse tool calls."""
    yield from pair_of(zygote, "--tokenizer", str(tokenizer))


@pytest.fixture(scope="module")
def thinkers(zygote: Zygote, tokenizer: Path) -> Iterator[tuple[Engine, Engine]]:
    """Two engines that parse reasoning as well."""
    yield from pair_of(zygote, "--tokenizer", str(tokenizer), "--reasoning-parser", "qwen3")


def body_of(options: dict[str, Any], stream: bool) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": 140, "temperature": 0}
    body["messages"] = [{"role": "user", "content": "What is a lease?"}]
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    return body | options


def check(pair: tuple[Engine, Engine], body: dict[str, Any], name: str) -> matrix.Seen:
    whole = matrix.run(pair[0], CHAT, body, name)
    assert isinstance(whole.last, frames.End), whole.last
    expected = matrix.seen(whole)
    created = client.created_of(whole.whole.payload if whole.whole else whole.payload)
    places = matrix.cuts(whole, expected.usage["prompt_tokens"])
    for cut in sorted({*places, *range(9, len(whole.tokens), 41)}):
        joined = matrix.continued(pair[1], CHAT, body, name, whole.tokens[:cut], created)
        found = matrix.differences(expected, matrix.seen(joined))
        assert not found, f"cut at {cut} of {len(whole.tokens)}:\n" + "\n".join(found)
    return expected


@pytest.mark.parametrize("stream", (True, False), ids=("stream", "whole"))
@pytest.mark.parametrize("row", WITH_TOOLS)
def test_tool_calls_join_without_a_seam(
    callers: tuple[Engine, Engine], row: str, stream: bool
) -> None:
    expected = check(callers, body_of(WITH_TOOLS[row], stream), f"tools-{row}-{stream}")
    for choice in expected.choices.values():
        if row.startswith("called"):
            assert [call["name"] for call in choice.tools] == ["look_up"] * 2
            assert len({call["id"] for call in choice.tools}) == 2
            assert all(len(call["arguments"]) > 20 for call in choice.tools)
            assert choice.content and choice.finish == "tool_calls"
        elif row == "not-called":
            assert len(choice.content) > 100 and not choice.tools
    ids = [call["id"] for choice in expected.choices.values() for call in choice.tools]
    assert len(set(ids)) == len(ids)


@pytest.fixture(scope="module")
def thinking(thinkers: tuple[Engine, Engine], tokenizer: Path) -> dict[str, Any]:
    """Sampling options with which the model thinks for a while, and then stops."""
    end = token_of(tokenizer, "</think>")
    for seed in range(60):
        options = {"temperature": 1.0, "seed": seed, "logit_bias": {str(end): 3.5}}
        (choice,) = matrix.seen(
            matrix.run(thinkers[0], CHAT, body_of(options, False), f"think{seed}")
        ).choices.values()
        if end in choice.ids and 12 < choice.ids.index(end) < 45:
            return options
    raise AssertionError("the model never ends its reasoning in time")


@pytest.mark.parametrize("stream", (True, False), ids=("stream", "whole"))
@pytest.mark.parametrize("row", WITH_REASONING)
def test_reasoning_joins_without_a_seam(
    thinkers: tuple[Engine, Engine], thinking: dict[str, Any], row: str, stream: bool
) -> None:
    body = body_of(thinking | WITH_REASONING[row], stream)
    expected = check(thinkers, body, f"reasoning-{row}-{stream}")
    choice = expected.choices[0]
    assert bool(choice.reasoning) == (row != "hidden")
    assert len(choice.content) + sum(len(call["arguments"]) for call in choice.tools) > 20
    if row.startswith("called"):
        assert len(choice.tools) == 1
