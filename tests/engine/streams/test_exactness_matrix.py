"""Every kind of request, cut everywhere and taken up on another engine, on real vLLM.

Each row runs whole on one engine; then for each cut (nothing delivered, the first token,
amid a block, at a block's edge, before the last token) the other engine continues, and the
joined answer is compared with the whole one: content, reasoning, tool calls, token ids, log
probabilities, finish and stop reasons, usage. At the end the same comparison is shown to
find a wrong token and a generator in a wrong state.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from relume.events.wire import frames
from tests.engine import client, matrix
from tests.engine.fleet import Engine, Zygote, engine_of
from tests.engine.matrix import CHAT, COMPLETIONS

pytestmark = pytest.mark.full

PROMPT = "The lease of a worker tells the fleet that"
TOKENS = 48
SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "minLength": 20}, "n": {"type": "integer"}},
    "required": ["name", "n"],
    "additionalProperties": False,
}
SEEDED = {"temperature": 0.9, "seed": 11}
PENALTIES = {"presence_penalty": 0.9, "frequency_penalty": 0.6}
REGEX = {"structured_outputs": {"regex": r"[a-z]{3,9}( [a-z]{2,9}){30}\."}}
GRAMMAR = {"structured_outputs": {"grammar": 'root ::= ("let " [a-z]+ " = " [0-9]+ "; ")+'}}
JSON = {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": SCHEMA}}}

BOTH: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": SEEDED,
    "seeded-filtered": SEEDED | {"top_p": 0.9, "top_k": 40, "min_p": 0.01},
    "penalties": PENALTIES,
    "repetition": {"repetition_penalty": 1.4},
    "seeded-penalties": SEEDED | PENALTIES | {"repetition_penalty": 1.1, "top_p": 0.95},
    "bias": {"logit_bias": {"400": 2.0, "500": -3.0}},
    "min-tokens": {"stop_token_ids": list(range(4, 1500)), "min_tokens": 30},
    "bad-words": {"bad_words": [" the", " a", " of", " worker"]},
    "allowed": {"allowed_token_ids": list(range(1000, 2000))},
    "regex": REGEX,
    "regex-seeded": REGEX | SEEDED,
    "grammar": GRAMMAR | SEEDED,
    "json": JSON,
    "json-seeded": JSON | SEEDED,
    "json-penalties": JSON | PENALTIES,
    "repeats-end-it": {"repetition_detection": {"max_pattern_size": 4, "min_count": 8}},
}
ONE_ROUTE: dict[str, tuple[str, dict[str, Any]]] = {
    "logprobs-text": (COMPLETIONS, {"logprobs": 3}),
    "logprobs-none-text": (COMPLETIONS, {"logprobs": 0}),
    "logprobs-seeded-text": (COMPLETIONS, {"logprobs": 2} | SEEDED),
    "logprobs-json-text": (COMPLETIONS, {"logprobs": 2} | JSON),
    "logprobs-chat": (CHAT, {"logprobs": True, "top_logprobs": 3}),
    "logprobs-penalties-chat": (CHAT, {"logprobs": True, "top_logprobs": 1} | PENALTIES),
    "echo-text": (COMPLETIONS, {"echo": True}),
    "stop-text": (COMPLETIONS, {"stop": ["zzz", "e "]} | SEEDED | {"min_tokens": 25}),
}
ROWS = {
    **{f"{name}-text": (COMPLETIONS, options) for name, options in BOTH.items()},
    **{f"{name}-chat": (CHAT, options) for name, options in BOTH.items()},
    **ONE_ROUTE,
}
SEVERAL = {
    "choices-text": (COMPLETIONS, {"n": 2} | SEEDED),
    "choices-chat": (CHAT, {"n": 3} | SEEDED | PENALTIES),
    "choices-logprobs": (COMPLETIONS, {"n": 2, "logprobs": 2} | SEEDED),
    "choices-json": (CHAT, {"n": 2} | JSON | SEEDED),
    "prompts": (COMPLETIONS, {"prompt": [PROMPT, "Two leases"]}),
    "prompts-choices": (COMPLETIONS, {"prompt": [PROMPT, "Two leases"], "n": 2} | SEEDED),
}


def body_of(path: str, options: dict[str, Any], stream: bool) -> dict[str, Any]:
    body = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0}
    if stream:
        body |= {"stream": True, "stream_options": {"include_usage": True}}
    if path == CHAT:
        return body | {"messages": [{"role": "user", "content": PROMPT}]} | options
    return body | {"prompt": PROMPT} | options


def check(primary: Engine, standby: Engine, path: str, body: dict[str, Any], name: str) -> Any:
    """The row at each cut; returns what the client saw of the whole run."""
    whole = matrix.run(primary, path, body, name)
    assert isinstance(whole.last, frames.End), whole.last
    expected = matrix.seen(whole)
    created = client.created_of(whole.whole.payload if whole.whole else whole.payload)
    cuts = matrix.cuts(whole, expected.usage["prompt_tokens"])
    if any(hello.role == "api" for hello in primary.agent.hellos):
        cuts = cuts[1:-1:2] or cuts  # three processes a host: half of the cuts, for time
    for cut in cuts:
        joined = matrix.continued(standby, path, body, name, whole.tokens[:cut], created)
        found = matrix.differences(expected, matrix.seen(joined))
        assert not found, f"cut at {cut} of {len(whole.tokens)}:\n" + "\n".join(found)
    return expected


@pytest.mark.parametrize("stream", (True, False), ids=("stream", "whole"))
@pytest.mark.parametrize("row", ROWS)
def test_resumed_anywhere_it_continues_identically(
    primary: Engine, standby: Engine, row: str, stream: bool
) -> None:
    path, options = ROWS[row]
    expected = check(primary, standby, path, body_of(path, options, stream), f"{row}-{stream}")
    (choice,) = expected.choices.values()
    assert len(choice.ids) > 20, choice
    if "structured_outputs" not in options and "response_format" not in options:
        assert len(set(choice.ids)) > len(choice.ids) // 2, "too uniform to prove anything"


@pytest.mark.parametrize("stream", (True, False), ids=("stream", "whole"))
@pytest.mark.parametrize("row", SEVERAL)
def test_each_of_several_choices_continues_identically(
    primary: Engine, standby: Engine, row: str, stream: bool
) -> None:
    path, options = SEVERAL[row]
    expected = check(primary, standby, path, body_of(path, options, stream), f"{row}-{stream}")
    ids = [tuple(choice.ids) for choice in expected.choices.values()]
    assert len(set(ids)) == len(ids) >= 2
    assert min(map(len, ids)) > 20


def test_engine_reports_all_of_it_exact(primary: Engine) -> None:
    exact = primary.state()["exact"]
    assert set(exact.values()) == {True}, exact


# --- the comparison finds what is wrong --------------------------------------------


@pytest.mark.parametrize("row", ("greedy-text", "seeded-text", "penalties-chat", "json-chat"))
def test_wrong_token_is_found(primary: Engine, standby: Engine, row: str) -> None:
    path, options = ROWS[row]
    body = body_of(path, options, True)
    whole = matrix.run(primary, path, body, f"wrong-{row}")
    *before, last = whole.tokens[:20]
    wrong = frames.Tokens(last.start, (last.ids[0] ^ 1,), last.payload)
    joined = matrix.continued(
        standby, path, body, f"wrong-{row}", [*before, wrong], client.created_of(whole.payload)
    )
    joined.tokens[19] = last
    assert matrix.differences(matrix.seen(whole), matrix.seen(joined))


@pytest.fixture(scope="module")
def misdrawn(zygote: Zygote) -> Iterator[Engine]:
    """An engine that advances generators by one draw too many."""
    scheduler = "tests.engine.broken_scheduler.misdrawing_scheduler"
    with engine_of(zygote.fork("--scheduler-cls", scheduler)) as engine:
        yield engine


def test_wrong_generator_state_is_found(primary: Engine, misdrawn: Engine) -> None:
    path, options = ROWS["seeded-text"]
    body = body_of(path, options, True)
    whole = matrix.run(primary, path, body, "misdrawn")
    created = client.created_of(whole.payload)
    joined = matrix.continued(misdrawn, path, body, "misdrawn", whole.tokens[:20], created)
    found = matrix.differences(matrix.seen(whole), matrix.seen(joined))
    assert any("ids" in text for text in found)


def test_self_test_finds_a_wrong_generator_state(misdrawn: Engine) -> None:
    exact = misdrawn.state()["exact"]
    assert {name for name, verdict in exact.items() if verdict is not True} == {"seeded", "choices"}
