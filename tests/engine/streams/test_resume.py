"""A request taken up elsewhere goes on as if nothing had happened (I2), on real vLLM."""

from __future__ import annotations

import json
from typing import Any

import pytest

from relume.events.wire import frames
from tests.engine import client
from tests.engine.fleet import Engine

pytestmark = pytest.mark.full

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
PROMPT = "The lease of a worker tells the fleet that"
TOKENS = 40


def body_for(path: str, **options: Any) -> dict[str, Any]:
    base = {"model": "tiny", "max_tokens": TOKENS, "temperature": 0, **options}
    if path == CHAT:
        return base | {"messages": [{"role": "user", "content": PROMPT}]}
    return base | {"prompt": PROMPT}


@pytest.fixture(scope="module")
def plain(primary: Engine) -> dict[str, client.Framed]:
    """The undisturbed run of each route, from which variants are derived."""
    runs = {
        path: client.ask(primary.port, path, body_for(path, stream=True))
        for path in (COMPLETIONS, CHAT)
    }
    for run in runs.values():
        assert len(run.ids) == TOKENS
        assert len(set(run.ids)) >= 30, "a degenerate output would prove nothing"
    return runs


def stop_string_across_tokens(run: client.Framed, at: int) -> str:
    """Text that begins in token `at` and ends in the next, and stands nowhere before."""
    pieces = [client.text_of(frame.payload) for frame in run.tokens]
    for index in range(at, len(pieces) - 2):
        left, right = pieces[index], pieces[index + 1]
        if not (left and right):
            continue
        stop = left[-2:] + right[:2]
        if stop in "".join(pieces[:index]) or not stop.isascii():
            continue
        return stop
    raise AssertionError("no stop string to be found")


VARIANTS = (
    "plain", "stop_string", "stop_kept", "stop_token", "stop_early", "min_tokens",
    "min_before_stop_token", "usage", "ids",
)  # fmt: skip


def variant_options(variant: str, run: client.Framed) -> dict[str, Any]:
    match variant:
        case "stop_string":
            return {"stop": [stop_string_across_tokens(run, 20)]}
        case "stop_kept":
            stop = stop_string_across_tokens(run, 20)
            return {"stop": [stop], "include_stop_str_in_output": True}
        case "stop_token":
            return {"stop_token_ids": [run.ids[25]], "min_tokens": 0}
        case "stop_early":
            return {"stop": [stop_string_across_tokens(run, 0)]}
        case "min_tokens":
            stop = stop_string_across_tokens(run, 8)
            return {"stop": [stop, stop_string_across_tokens(run, 24)], "min_tokens": 16}
        case "min_before_stop_token":
            # Half of the vocabulary ends the request, and is masked for 20 tokens.
            return {"stop_token_ids": list(range(4, 1500)), "min_tokens": 20}
        case "usage":
            return {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
        case "ids":
            return {"return_token_ids": True}
    return {}


def cuts(run: client.Framed) -> list[int]:
    """Token counts a gateway may hold when a worker dies."""
    total = len(run.ids)
    return sorted({0, 1, total // 2, max(0, total - 2), max(0, total - 1), total})


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("path", (COMPLETIONS, CHAT))
def test_continued_stream_is_byte_identical(
    primary: Engine, standby: Engine, plain: dict[str, client.Framed], path: str, variant: str
) -> None:
    body = body_for(path, stream=True, **variant_options(variant, plain[path]))
    name = f"s-{variant}-{'chat' if path == CHAT else 'text'}"
    whole = client.ask(primary.port, path, body, request=name)
    assert isinstance(whole.last, frames.End)
    if "stop" in variant:
        assert whole.last.reason == "stop"
        assert len(whole.ids) < TOKENS
    created = client.created_of(whole.payload)
    for cut in cuts(whole):
        rest = client.ask(
            standby.port, path, body, attempt=2, created=created,
            request=name if cut < len(whole.ids) else f"{name}-all",
            resume=("continue", whole.ids[:cut]), response_id=name,
        )  # fmt: skip
        assert rest.ids == whole.ids[cut:], f"cut at {cut}"
        assert rest.payload == whole.after(cut), f"cut at {cut}"
        assert rest.last == whole.last, f"cut at {cut}"
    assert not standby.agent.changes(f"{name}-all"), "nothing to compute, nothing computed"


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v != "usage"])
@pytest.mark.parametrize("path", (COMPLETIONS, CHAT))
def test_continued_answer_in_one_piece_is_identical(
    primary: Engine, standby: Engine, plain: dict[str, client.Framed], path: str, variant: str
) -> None:
    body = body_for(path, **variant_options(variant, plain[path]))
    name = f"w-{variant}-{'chat' if path == CHAT else 'text'}"
    whole = client.ask(primary.port, path, body, request=name)
    assert whole.whole is not None and whole.whole.status == 200
    assert not whole.payload, "progress frames show nothing"
    created = client.created_of(whole.whole.payload)
    for cut in cuts(whole):
        rest = client.ask(
            standby.port, path, body, request=name, attempt=2, created=created,
            resume=("continue", whole.ids[:cut]),
        )  # fmt: skip
        assert rest.ids == whole.ids[cut:], f"cut at {cut}"
        assert rest.whole is not None
        assert json.loads(rest.whole.payload) == json.loads(whole.whole.payload), f"cut at {cut}"
        assert rest.last == whole.last


def test_usage_counts_the_original_prompt_and_cache(primary: Engine, standby: Engine) -> None:
    body = body_for(COMPLETIONS)
    whole = client.ask(primary.port, COMPLETIONS, body)
    rest = client.ask(
        standby.port, COMPLETIONS, body, resume=("continue", whole.ids[:20]), cached="3"
    )
    usage, expected = (json.loads(r.whole.payload)["usage"] for r in (rest, whole))
    assert usage["prompt_tokens_details"]["cached_tokens"] == 3
    del usage["prompt_tokens_details"], expected["prompt_tokens_details"]
    assert usage == expected


def test_the_head_of_an_answer_says_what_was_cached_for_who_takes_it_up(
    primary: Engine, standby: Engine
) -> None:
    body = body_for(COMPLETIONS) | {"prompt": PROMPT * 12}
    client.ask(primary.port, COMPLETIONS, body)
    answer = client.post(primary.port, COMPLETIONS, body, headers=client.headers_for())
    whole = client.sort_frames(answer.body)
    expected = json.loads(whole.whole.payload)["usage"]
    cached = answer.headers["x-relume-cached"]
    assert int(cached) == expected["prompt_tokens_details"]["cached_tokens"] > 0
    rest = client.ask(
        standby.port, COMPLETIONS, body, resume=("continue", whole.ids[:20]), cached=cached
    )
    assert json.loads(rest.whole.payload)["usage"] == expected


@pytest.mark.parametrize(
    "options",
    (
        {"prompt_logprobs": 2, "stream": False},
        {"logprobs": 2, "logprob_token_ids": [5, 6]},
        {"logprobs": 2, "stream": False},
    ),
)
def test_what_cannot_be_continued_exactly_is_refused(
    standby: Engine, options: dict[str, Any]
) -> None:
    body = body_for(COMPLETIONS, **{"stream": True, **options})
    headers = client.headers_for(resume=("continue", [300, 301]))
    answer = client.post(standby.port, COMPLETIONS, body, headers=headers, tail=[300, 301])
    assert answer.status == 422, answer.body
    assert "cannot resume" in json.loads(answer.body)["error"]["message"]
    standby.wait_idle()


@pytest.mark.parametrize("stream", (True, False))
@pytest.mark.parametrize(
    "options", ({}, {"logprobs": 2}, {"presence_penalty": 0.5, "seed": 3, "temperature": 0.7})
)
def test_replay_regenerates_and_shows_only_the_rest(
    primary: Engine, standby: Engine, options: dict[str, Any], stream: bool
) -> None:
    body = body_for(COMPLETIONS, stream=stream, **options)
    whole = client.ask(primary.port, COMPLETIONS, body, request="replayed")
    shown = whole.whole.payload if whole.whole else whole.payload
    for cut in cuts(whole):
        rest = client.ask(
            standby.port, COMPLETIONS, body, request="replayed",
            resume=("replay", whole.ids[:cut]), created=client.created_of(shown),
        )  # fmt: skip
        assert rest.ids == whole.ids[cut:]
        if stream:  # notes for a whole answer are as many as outputs, which may hold several tokens
            assert rest.payload == whole.after(cut), f"cut at {cut}"
        if whole.whole is not None:
            assert rest.whole is not None
            ours, theirs = (json.loads(r.payload) for r in (rest.whole, whole.whole))
            for answer in (ours, theirs):
                answer["usage"].pop("prompt_tokens_details")
            assert ours == theirs


@pytest.mark.parametrize("stream", (True, False))
def test_replay_that_differs_is_said_so(primary: Engine, standby: Engine, stream: bool) -> None:
    body = body_for(COMPLETIONS, stream=stream)
    whole = client.ask(primary.port, COMPLETIONS, body)
    tail = [*whole.ids[:9], whole.ids[9] + 1]
    rest = client.ask(standby.port, COMPLETIONS, body, resume=("replay", tail))
    assert isinstance(rest.last, frames.Failure)
    assert rest.last.kind == "mismatch"
    assert not rest.payload and rest.whole is None
    standby.wait_idle()


def test_replay_longer_than_the_output_is_a_mismatch(primary: Engine, standby: Engine) -> None:
    body = body_for(COMPLETIONS, stream=True)
    whole = client.ask(primary.port, COMPLETIONS, body)
    rest = client.ask(standby.port, COMPLETIONS, body, resume=("replay", [*whole.ids, 5]))
    assert isinstance(rest.last, frames.Failure) and rest.last.kind == "mismatch"


def test_many_streams_continue_together_as_they_were_alone(
    primary: Engine, standby: Engine
) -> None:
    """Eight requests run together, are cut at different tokens, and go on together."""
    bodies = [
        body_for(COMPLETIONS, stream=True) | {"prompt": f"Worker {i} was lost when"}
        for i in range(8)
    ]
    alone = [client.ask(primary.port, COMPLETIONS, body, request="m") for body in bodies]
    opened = []
    for i, (body, whole) in enumerate(zip(bodies, alone, strict=True)):
        tail = whole.ids[: 1 + 4 * i]
        headers = client.headers_for(
            request=f"together{i}",
            response_id="m",
            resume=("continue", tail),
            created=client.created_of(whole.payload),
        )
        opened.append(client.open_stream(standby.port, COMPLETIONS, body, headers, tail))
    for i, ((connection, response), whole) in enumerate(zip(opened, alone, strict=True)):
        rest = client.sort_frames(response.read())
        connection.close()
        assert rest.ids == whole.ids[1 + 4 * i :]
        assert rest.payload == whole.after(1 + 4 * i)
