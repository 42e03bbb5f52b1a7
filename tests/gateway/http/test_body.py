"""What the gateway reads from bodies: verdicts as a table, refusals, stripping."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.controlplane.gateway.errors import ClientError
from relume.controlplane.gateway.openai.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Api
from relume.controlplane.gateway.openai.body import limit_output, parse

GREEDY = {"model": "m", "prompt": "hello", "temperature": 0}
TALK = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "temperature": 0}
TOOL = [{"type": "function", "function": {"name": "f", "parameters": {}}}]


APIS = (COMPLETIONS, CHAT, MESSAGES, RESPONSES)


def verdict(**extra):
    return parse(json.dumps({**GREEDY, **extra}).encode(), COMPLETIONS)


def chat(**extra):
    return parse(json.dumps({**TALK, **extra}).encode(), CHAT)


def messages(**extra):
    return parse(json.dumps({**TALK, "max_tokens": 64, **extra}).encode(), MESSAGES)


EXACT = [
    {},
    {"temperature": 0.0},
    {"stream": True, "stream_options": {"include_usage": True}},
    {"max_tokens": 5, "min_tokens": 2},
    {"stop": ["x", "y"], "stop_token_ids": [1, 2], "include_stop_str_in_output": True},
    {"ignore_eos": True, "user": "u", "n": 1, "best_of": 1},
    {"seed": 7},
    {"top_p": 0.5, "top_k": 3, "min_p": 0.1},
    {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.0},
    {"logprobs": None, "logit_bias": {}, "echo": False, "suffix": None, "bad_words": []},
    {"response_format": {"type": "text"}},
    {"response_format": None, "unknown_thing": None},
    {"return_token_ids": True, "skip_special_tokens": False},
    {"prompt": [1, 2, 3]},
    {"prompt": ["one"]},
    {"prompt": [[1, 2, 3]]},
]


@pytest.mark.parametrize("extra", EXACT, ids=str)
def test_greedy_text_is_exact(extra):
    got = verdict(**extra)
    assert (got.verdict, got.reason) == ("exact", "")


@pytest.mark.parametrize(
    ("extra", "expected", "reason"),
    [
        ({"prompt_logprobs": 1}, "replay", "prompt_logprobs"),
        ({"echo": True, "logprobs": 1}, "replay", "log probabilities of the prompt"),
        ({"guided_json": {}}, "replay", "guided_json"),
        ({"thinking_token_budget": 5}, "replay", "thinking_token_budget"),
        ({"vllm_xargs": {"a": 1}}, "replay", "vllm_xargs"),
        ({"brand_new_field": 3}, "replay", "unknown field 'brand_new_field'"),
        ({"prompt_embeds": "abc"}, "replay", "unknown field 'prompt_embeds'"),
        ({"temperature": 0.7, "seed": 1, "prompt_logprobs": 1}, "replay", "prompt_logprobs"),
        ({"temperature": 0.7}, "sampled", "unseeded sampling"),
        ({"temperature": None}, "sampled", "temperature not set"),
        ({"temperature": 0.7, "logprobs": 2}, "sampled", "unseeded sampling"),
        ({"temperature": 0.7, "n": 2}, "sampled", "unseeded sampling"),
        ({"temperature": 0.7, "suffix": "x"}, "restart", "unseeded sampling with suffix"),
        ({"n": 2, "prompt_logprobs": 1}, "restart", "n with prompt_logprobs"),
        ({"best_of": 2}, "restart", "best_of=2"),
        ({"use_beam_search": True}, "restart", "use_beam_search=True"),
        ({"prompt": ["a", "b"], "suffix": "x"}, "restart", "several prompts with suffix"),
    ],
    ids=str,
)
def test_verdict_says_how_and_why_not_better(extra, expected, reason):
    got = verdict(**extra)
    assert (got.verdict, got.reason) == (expected, reason)


@pytest.mark.parametrize(
    ("extra", "needs", "fallback"),
    [
        ({}, (), ""),
        ({"seed": 7}, (), ""),
        ({"logit_bias": {"5": 1}, "echo": True}, (), ""),
        ({"temperature": 0.7, "seed": 1}, ("seeded",), "replay"),
        ({"presence_penalty": 0.5}, ("penalties",), "replay"),
        ({"repetition_penalty": 1.1}, ("penalties",), "replay"),
        ({"bad_words": ["no"]}, ("penalties",), "replay"),
        ({"logprobs": 0}, ("logprobs",), "replay"),
        ({"response_format": {"type": "json_object"}}, ("structured",), "replay"),
        (
            {"structured_outputs": {"regex": "a"}, "logprobs": 1, "temperature": 1, "seed": 2},
            ("structured", "logprobs", "seeded"),
            "replay",
        ),
        ({"n": 2}, ("choices",), "restart"),
        ({"prompt": ["a", "b"]}, ("choices",), "restart"),
        ({"prompt": [[1], [2]]}, ("choices",), "restart"),
        ({"tools": TOOL}, ("parsers",), "restart"),
        ({"tools": TOOL, "tool_choice": "required"}, ("parsers", "structured"), "restart"),
    ],
    ids=str,
)
def test_an_exact_guarantee_names_what_it_depends_on(extra, needs, fallback):
    got = verdict(**extra)
    assert (got.verdict, got.reason, got.needs, got.fallback) == ("exact", "", needs, fallback)


def test_unseeded_sampling_with_state_rests_on_it_too():
    got = verdict(temperature=0.7, presence_penalty=1)
    assert (got.verdict, got.needs, got.fallback) == ("sampled", ("penalties",), "restart")


@pytest.mark.parametrize(
    ("extra", "expected", "reason"),
    [
        ({}, "exact", ""),
        ({"logprobs": False, "top_logprobs": 0}, "exact", ""),
        ({"tools": TOOL, "tool_choice": "none"}, "exact", ""),
        ({"tools": []}, "exact", ""),
        ({"chat_template_kwargs": {"a": 1}, "reasoning_effort": "low"}, "exact", ""),
        ({"logprobs": True}, "exact", ""),
        ({"tools": TOOL}, "exact", ""),
        (
            {"tools": TOOL, "thinking_token_budget": 9},
            "restart",
            "tools with thinking_token_budget",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "replay",
            "multimodal input",
        ),
        (
            {"messages": [{"role": "user", "content": 'say "image_url" please'}]},
            "exact",
            "",
        ),
    ],
    ids=str,
)
def test_chat_verdicts(extra, expected, reason):
    got = chat(**extra)
    assert (got.verdict, got.reason) == (expected, reason)


USE = {"name": "f", "input_schema": {"type": "object"}}
ADDED = [{"role": "system", "content": [{"type": "tool_addition", "tool": {"name": "f"}}]}]
IMAGE = [{"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": "x"}}]}]


@pytest.mark.parametrize(
    ("extra", "expected", "reason", "needs"),
    [
        ({}, "exact", "", ()),
        ({"system": "s", "stop_sequences": ["x"], "top_k": 4, "stream": True}, "exact", "", ()),
        ({"thinking": {"type": "disabled"}, "metadata": {"user_id": "u"}}, "exact", "", ()),
        ({"output_config": {"effort": "low"}}, "exact", "", ()),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": {}}}},
            "exact",
            "",
            ("structured",),
        ),
        ({"tools": [USE]}, "exact", "", ("parsers",)),
        ({"tools": [USE], "tool_choice": {"type": "auto"}}, "exact", "", ("parsers",)),
        ({"tools": [USE], "tool_choice": {"type": "none"}}, "exact", "", ()),
        (
            {"tools": [USE], "tool_choice": {"type": "any"}},
            "exact",
            "",
            ("parsers", "structured"),
        ),
        ({"messages": ADDED}, "exact", "", ("parsers",)),
        ({"messages": IMAGE}, "replay", "multimodal input", ()),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, "replay", "thinking", ()),
        ({"brand_new": 1}, "replay", "unknown field 'brand_new'", ()),
        ({"temperature": 0.7, "seed": 3}, "sampled", "unseeded sampling", ()),
        ({"temperature": None}, "sampled", "temperature not set", ()),
    ],
    ids=str,
)
def test_verdicts_of_messages(extra, expected, reason, needs):
    """vLLM reads no seed there: a request with one is sampled like any other."""
    got = messages(**extra)
    assert (got.verdict, got.reason, got.needs) == (expected, reason, needs)


CALLED = {"type": "function", "name": "f", "parameters": {}}
FORMAT = {"format": {"type": "json_schema", "name": "n", "schema": {}}}
PICTURE = [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]


def response(**extra):
    return parse(
        json.dumps({"model": "m", "input": "hi", "temperature": 0, **extra}).encode(), RESPONSES
    )


@pytest.mark.parametrize(
    ("extra", "expected", "reason", "needs"),
    [
        ({}, "exact", "", ()),
        ({"input": [{"role": "user", "content": "hi"}], "instructions": "i"}, "exact", "", ()),
        ({"store": True, "metadata": {"a": "b"}, "truncation": "auto"}, "exact", "", ()),
        ({"reasoning": {"effort": "low"}, "text": {"verbosity": "low"}}, "exact", "", ()),
        ({"text": {"format": {"type": "text"}}}, "exact", "", ()),
        ({"text": FORMAT}, "exact", "", ("structured",)),
        ({"tools": [CALLED]}, "exact", "", ("parsers",)),
        ({"tools": [CALLED], "tool_choice": "required"}, "exact", "", ("parsers", "structured")),
        ({"temperature": 0.7, "seed": 3}, "exact", "", ("seeded",)),
        ({"presence_penalty": 0.5}, "exact", "", ("penalties",)),
        ({"include": ["reasoning.encrypted_content"]}, "exact", "", ()),
        ({"include": ["message.output_text.logprobs"]}, "replay", "include", ()),
        ({"input": PICTURE}, "replay", "multimodal input", ()),
        ({"brand_new": 1}, "replay", "unknown field 'brand_new'", ()),
        ({"temperature": 0.7}, "sampled", "unseeded sampling", ()),
    ],
    ids=str,
)
def test_verdicts_of_responses(extra, expected, reason, needs):
    got = response(**extra)
    assert (got.verdict, got.reason, got.needs) == (expected, reason, needs)


@pytest.mark.parametrize("kind", ["web_search_preview", "code_interpreter", "mcp"])
def test_tools_that_run_beside_the_worker_are_seen(kind):
    assert response(tools=[CALLED, {"type": kind}]).runs_tools
    assert not response(tools=[CALLED, {"type": "custom", "name": "c"}]).runs_tools


def test_what_a_response_asks_for_is_estimated():
    got = response(instructions="x" * 400, input="y" * 400, max_output_tokens=9)
    assert got.estimated and 200 <= got.prompt_tokens <= 230 and not got.countable
    assert got.max_tokens == 9
    limited_ = limit_output(response(), 100, RESPONSES)
    assert json.loads(limited_.body)["max_output_tokens"] == limited_.max_tokens == 100


def test_what_a_message_asks_for_is_estimated():
    got = messages(system="x" * 400, messages=[{"role": "user", "content": "y" * 400}])
    assert got.estimated and 200 <= got.prompt_tokens <= 230 and not got.countable
    assert (got.max_tokens, got.model) == (64, "m")


def test_a_limit_leaves_messages_their_budget_of_thinking():
    thinking = {"type": "enabled", "budget_tokens": 2048}
    body, most, applied = limited(100, MESSAGES, max_tokens=4000, thinking=thinking)
    assert body["max_tokens"] == most == applied == 2049


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'"x"',
        b"null",
        b'{"prompt":"a",}',
        b'{"prompt":"a","temperature":}',
        b"\xff\xfe",
        b'{"prompt":"a","x":' + b"[" * 100_000,
        b'{"prompt":"a","temperature":1e999}',
        b'{"prompt":"a","seed":NaN}',
    ],
)
def test_malformed_json_is_the_clients_error(body):
    with pytest.raises(ClientError) as caught:
        parse(body, COMPLETIONS)
    assert caught.value.status == 400


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("temperature", "0"),
        ("temperature", True),
        ("top_p", 0),
        ("top_p", 1.5),
        ("top_k", -2),
        ("min_p", -1),
        ("n", 0),
        ("n", -1),
        ("n", 1.5),
        ("n", True),
        ("max_tokens", -1),
        ("max_tokens", 0),
        ("max_tokens", "5"),
        ("max_tokens", 1 << 40),
        ("min_tokens", -3),
        ("presence_penalty", 3),
        ("repetition_penalty", 0),
        ("seed", 1 << 70),
        ("stream", "yes"),
        ("stream", 1),
        ("model", ""),
        ("model", 5),
        ("prompt", 5),
        ("prompt", None),
        ("prompt", []),
        ("prompt", {}),
        ("vllm_xargs", {"kv_transfer_params": "x"}),
        ("vllm_xargs", {"relume_resume": "x"}),
    ],
    ids=str,
)
def test_absurd_values_name_their_field(field, value):
    with pytest.raises(ClientError) as caught:
        verdict(**{field: value})
    assert caught.value.status == 400
    assert caught.value.param == field
    assert field in caught.value.message


def test_missing_prompt_or_messages():
    for api in APIS:
        with pytest.raises(ClientError, match="is required"):
            parse(b'{"model":"m"}', api)
    with pytest.raises(ClientError, match="must be an array"):
        parse(b'{"messages":"hi"}', CHAT)


def test_body_is_passed_on_unchanged_unless_something_is_stripped():
    body = b' {"prompt" : "h\\u00e9", "temperature":0 , "x": [1, {"a":"\\n"}]} '
    assert parse(body, COMPLETIONS).body is body
    hostile = (
        b'{"prompt":"h\\u00e9","kv_transfer_params":{"a":1},"ec_transfer_params":2,"temperature":0}'
    )
    stripped = parse(hostile, COMPLETIONS)
    assert json.loads(stripped.body) == {"prompt": "hé", "temperature": 0}
    assert stripped.verdict == "exact"


def test_escaped_and_repeated_names_do_not_smuggle_kv_transfer_params():
    hostile = b'{"prompt":"a","kv_transfer_p\\u0061rams":{"x":1},"kv_transfer_params":1}'
    assert json.loads(parse(hostile, COMPLETIONS).body) == {"prompt": "a"}


def test_prompt_tokens_are_counted_for_ids_and_estimated_for_text():
    assert (verdict(prompt=[5, 6, 7]).prompt_tokens, verdict(prompt=[5]).estimated) == (3, False)
    text = verdict(prompt="x" * 400)
    assert text.estimated and 90 <= text.prompt_tokens <= 110


def test_max_tokens_default_and_precedence():
    assert verdict().max_tokens == 16
    assert verdict(max_tokens=None).max_tokens == 0
    assert chat().max_tokens == 0
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert verdict(max_tokens=0, echo=True).max_tokens == 0


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=5,
)
names = st.sampled_from(
    "model prompt messages stream temperature n seed tools tool_choice response_format logprobs "
    "stop max_tokens logit_bias vllm_xargs kv_transfer_params echo x".split()
)


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(names, values), st.sampled_from(APIS))
def test_any_object_is_parsed_or_refused_as_the_clients_error(body, api):
    try:
        got = parse(json.dumps(body).encode(), api)
    except ClientError as error:
        assert 400 <= error.status < 500
    else:
        assert got.verdict in ("exact", "replay", "sampled", "restart")
        assert (got.reason == "") == (got.verdict == "exact")
        assert b"kv_transfer_params" not in got.body or "kv_transfer_params" not in json.loads(
            got.body
        )


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=100), st.sampled_from(APIS))
def test_any_bytes_are_parsed_or_refused(body, api):
    try:
        parse(body, api)
    except ClientError as error:
        assert 400 <= error.status < 500


def limited(
    limit: int, api: Api = COMPLETIONS, **extra: object
) -> tuple[dict[str, object], int, int]:
    """The body with a limit of output tokens, its `max_tokens`, and the limit that was applied."""
    plain = GREEDY if api is COMPLETIONS else TALK
    found = limit_output(parse(json.dumps({**plain, **extra}).encode(), api), limit, api)
    body = json.loads(found.body)
    assert parse(found.body, api).max_tokens == found.max_tokens
    assert {k: v for k, v in body.items() if "tokens" not in k and k not in extra} == plain
    return body, found.max_tokens, found.output_limit


@pytest.mark.parametrize("api", [COMPLETIONS, CHAT, MESSAGES])
def test_a_limit_lowers_what_a_request_may_generate(api: Api) -> None:
    body, most, applied = limited(100, api, max_tokens=500)
    assert body["max_tokens"] == most == applied == 100
    body, most, applied = limited(100, api, max_tokens=99)
    assert (body["max_tokens"], most, applied) == (99, 99, 0)


def test_a_limit_applies_where_none_was_given_and_to_the_name_that_was() -> None:
    body, *_ = limited(100, CHAT)
    assert body["max_tokens"] == 100
    body, *_ = limited(100, CHAT, max_completion_tokens=700)
    assert body["max_completion_tokens"] == 100 and "max_tokens" not in body
    body, most, applied = limited(100)
    assert ("max_tokens" in body, most, applied) == (False, 16, 0), "vLLM's own default is lower"


def test_no_limit_is_below_what_a_request_must_generate() -> None:
    body, most, applied = limited(100, max_tokens=500, min_tokens=300)
    assert body["max_tokens"] == most == applied == 300
