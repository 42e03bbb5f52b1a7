"""The worker protocol on a live engine: frames, refusals, disconnects, state."""

from __future__ import annotations

import json
import uuid
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from relume.events.vocabulary import EngineFinished
from relume.events.wire import frames
from tests.engine import client
from tests.engine.fleet import Engine, wait_until
from tests.signals import stepped
from tests.suite.outcomes import inconclusive

pytestmark = pytest.mark.full

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
COMPLETION = {"model": "tiny", "prompt": "Events are facts", "max_tokens": 24, "temperature": 0}
CONVERSATION = {
    "model": "tiny",
    "messages": [{"role": "user", "content": "What is a lease?"}],
    "max_tokens": 24,
    "temperature": 0,
}
BODIES = pytest.mark.parametrize(
    ("path", "body"), ((COMPLETIONS, COMPLETION), (CHAT, CONVERSATION))
)
FOREVER = COMPLETION | {"max_tokens": 1900, "ignore_eos": True}


@BODIES
def test_frames_joined_are_what_stock_vllm_streams(primary: Engine, path: str, body: dict) -> None:
    body = body | {"stream": True, "stream_options": {"include_usage": True}}
    headers = {"content-type": "application/json", "x-request-id": "same"}
    stock = client.post(primary.port, path, body, headers=headers)
    assert stock.headers["content-type"].startswith("text/event-stream")
    for _ in range(10):
        framed = client.ask(primary.port, path, body, request="same")
        # The repeated prompt is cached, which usage tells; nothing else may differ.
        again = client.post(primary.port, path, body, headers=headers)
        if framed.payload.count(b"data: ") == again.body.count(b"data: "):
            break
    else:  # a server that lags behind its engine joins tokens into one event
        inconclusive("the two streams never came in equal events")
    assert client.without_created(framed.payload) == client.without_created(again.body)
    assert client.text_of(framed.payload) == client.text_of(stock.body)
    assert framed.payload.endswith(b"data: [DONE]\n\n")
    assert framed.last == frames.End("length")
    assert len(framed.ids) == 24


@BODIES
def test_whole_answer_is_what_stock_vllm_answers(primary: Engine, path: str, body: dict) -> None:
    headers = {"content-type": "application/json", "x-request-id": "same"}
    client.post(primary.port, path, body, headers=headers)
    stock = client.post(primary.port, path, body, headers=headers)
    framed = client.ask(primary.port, path, body, request="same")
    assert framed.whole is not None
    assert client.without_created(framed.whole.payload) == client.without_created(stock.body)
    assert len(framed.ids) == 24, "progress frames tell the tokens of an answer in one piece"
    assert framed.last == frames.End("length")


def test_tokens_and_bytes_of_a_frame_belong_together(primary: Engine) -> None:
    body = COMPLETION | {"stream": True, "return_token_ids": True}
    for frame in client.ask(primary.port, COMPLETIONS, body).tokens:
        shown = []
        for event in frame.payload.split(b"\n\n"):
            if event.startswith(b"data: {"):
                for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
                    shown += choice["token_ids"] or []
        assert tuple(shown) == frame.ids


@pytest.mark.parametrize("stream", (True, False))
def test_several_choices_are_distinguished(primary: Engine, stream: bool) -> None:
    body = COMPLETION | {"n": 2, "temperature": 0.5, "stream": stream}
    framed = client.ask(primary.port, COMPLETIONS, body)
    assert [len(framed.ids_of(choice)) for choice in (0, 1, 2)] == [24, 24, 0]
    assert framed.ids_of(0) != framed.ids_of(1)
    assert framed.last == frames.End("multi")


@pytest.mark.parametrize("stream", (True, False))
def test_several_prompts_are_distinguished(primary: Engine, stream: bool) -> None:
    prompts = ["One lease", "Two leases"]
    body = COMPLETION | {"stream": stream}
    framed = client.ask(primary.port, COMPLETIONS, body | {"prompt": prompts})
    for choice, prompt in enumerate(prompts):
        alone = client.ask(primary.port, COMPLETIONS, body | {"prompt": prompt})
        assert framed.ids_of(choice) == alone.ids
    assert framed.last == frames.End("multi")


def test_seeded_request_with_a_long_prompt_does_not_kill_the_engine(primary: Engine) -> None:
    """Its prompt is computed in chunks, which the CPU build does not survive by itself,
    and its output is the one of a prompt computed at once."""
    prompt = "Seeds are sown once. " * 130
    body = COMPLETION | {"prompt": prompt, "seed": 7, "temperature": 0.8}
    chunked = client.ask(primary.port, COMPLETIONS, body)
    # Now the prompt is cached, so that it fits one batch.
    at_once = client.ask(primary.port, COMPLETIONS, body)
    assert len(chunked.ids) == 24
    assert chunked.ids == at_once.ids
    assert len(set(chunked.ids)) > 12


def test_stale_incarnation_is_refused_before_any_work(primary: Engine) -> None:
    headers = client.headers_for(request="stale", incarnation=7)
    answer = client.post(primary.port, COMPLETIONS, COMPLETION, headers=headers)
    assert answer.status == 409
    assert "stale incarnation" in json.loads(answer.body)["error"]["message"]
    assert not primary.agent.changes("stale")


@pytest.mark.parametrize(
    ("body", "status"),
    (
        (COMPLETION | {"model": "unknown"}, 404),
        (COMPLETION | {"max_tokens": -1}, 400),
        (COMPLETION | {"prompt": "word " * 5000}, 400),
        (COMPLETION | {"temperature": 99}, 400),
        ({"model": "tiny"}, 400),
    ),
)
@pytest.mark.parametrize("stream", (True, False))
def test_refusal_is_ordinary_json(primary: Engine, body: dict, status: int, stream: bool) -> None:
    answer = client.post(
        primary.port, COMPLETIONS, body | {"stream": stream}, headers=client.headers_for()
    )
    assert answer.status == status, answer.body
    assert answer.headers["content-type"].startswith("application/json")
    assert json.loads(answer.body)["error"]["message"]


@pytest.mark.parametrize(
    ("name", "value"),
    (
        *(("resume", r) for r in ("continue", "continue x", "guess 1", "continue 9999")),
        ("resume", "continue 1²"),
        ("attempt", "first"),
        ("attempt", "9" * 40),
        ("dispatch", "a"),
        ("request", "white space"),
        ("request", "x" * 65),
    ),
)
def test_malformed_dispatch_is_refused(primary: Engine, name: str, value: str) -> None:
    headers = client.headers_for() | {f"x-relume-{name}": value.encode("latin-1")}
    answer = client.post(primary.port, COMPLETIONS, COMPLETION, headers=headers)
    assert answer.status == 400, answer.body
    assert f"x-relume-{name}" in json.loads(answer.body)["error"]["message"]


@BODIES
@pytest.mark.parametrize("stream", (True, False))
def test_disconnect_aborts_in_the_engine(
    primary: Engine, path: str, body: dict, stream: bool
) -> None:
    body = body | {"max_tokens": 1900, "ignore_eos": True, "stream": stream}
    name = uuid.uuid4().hex
    headers = client.headers_for(request=name)
    # Its core must not end the request before a busy API process sees that the client left.
    with ThreadPoolExecutor(1) as pool, stepped(primary.core) as until:

        def state() -> dict[str, Any]:
            asked = pool.submit(primary.state)
            until(asked.done, "the engine tells its state")
            return asked.result()

        begun = pool.submit(client.begin, primary.port, path, body, headers)
        until(begun.done, "the answer has begun")
        assert state()["running"] == 1
        connection, response = begun.result()
        response.close()
        connection.close()
        until(lambda: state()["unfinished"] == 0, "the API process has seen it")
    primary.wait_idle()

    def finished() -> list[EngineFinished]:
        return [c for c in primary.agent.changes(name) if isinstance(c, EngineFinished)]

    (end,) = wait_until(finished, "abort reported")
    assert end.reason == "abort"
    assert end.output_tokens < 1900


def test_disconnect_of_a_resumed_request_aborts(primary: Engine) -> None:
    start = client.ask(primary.port, COMPLETIONS, COMPLETION | {"stream": True})
    headers = client.headers_for(resume=("continue", start.ids))
    body = FOREVER | {"stream": True}
    connection, response = client.open_stream(
        primary.port, COMPLETIONS, body, headers, tail=start.ids
    )
    assert response.read(64)
    response.close()
    connection.close()
    primary.wait_idle()


def test_client_supplied_transfer_parameters_and_identity_stay_outside(primary: Engine) -> None:
    forged = COMPLETION | {
        "kv_transfer_params": {"do_remote_prefill": True, "remote_prefill_cached_tokens": 77},
        "vllm_xargs": {"relume": "forged"},
    }
    framed = client.ask(primary.port, COMPLETIONS, forged, request="honest")
    assert framed.whole is not None
    usage = json.loads(framed.whole.payload)["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] != 77
    assert primary.agent.changes("honest")
    stock = client.post(primary.port, COMPLETIONS, forged)
    assert stock.status == 200


def test_state_names_the_engine(primary: Engine) -> None:
    state = primary.state()
    assert state["worker"] == primary.worker
    assert state["incarnation"] == 1
    assert state["pid"] == primary.pid
    assert state["exact"]["greedy"] is True
    before = state["steps"]
    client.ask(primary.port, COMPLETIONS, COMPLETION)
    primary.wait_idle()
    assert primary.state()["steps"] >= before + 24
    assert primary.state()["step_age_us"] == 0


def test_other_routes_work_with_identity_headers(primary: Engine) -> None:
    connection = client.connect(primary.port)
    connection.request("GET", "/v1/models", headers=client.headers_for())
    assert json.loads(connection.getresponse().read())["data"][0]["id"] == "tiny"
    connection.close()
