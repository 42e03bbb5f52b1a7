"""Prompts are counted by the model's tokenizer, beside the token path, or estimated in time."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Fast
from tokenizers import models, pre_tokenizers, processors, trainers

from relume.controlplane.gateway.openai.chat_prompt import Template, Unusable
from relume.controlplane.gateway.openai.token_counts import HUNG_S, Tokens
from relume.controlplane.gateway.openai.tokenizing import LONG_BYTES, Tokenizer, tokenizers_of
from relume.events.wire import prefix
from relume.events.wire.tokenizer_messages import CountReply, CountRequest
from tests.gateway.peers import Behaviour

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% endfor %}"
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer that puts a token in front, as many models' do."""
    path = tmp_path_factory.mktemp("tokenizer")
    made = Fast(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    special = ["<s>", "<|im_start|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    made.train_from_iterator(["the log holds every decision of the fleet"] * 9, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    made.save(str(path / "tokenizer.json"))
    config = {"chat_template": TEMPLATE, "bos_token": {"content": "<s>"}, "eos_token": None}
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def told(folder: Path, body: dict, chat: bool = False, block_tokens: int = 4) -> CountReply:
    ask = CountRequest(
        number=1, model="m", chat=chat, block_tokens=block_tokens, body=json.dumps(body).encode()
    )
    return Tokenizer(str(folder)).tell(ask)


def ids(folder: Path, text: str, special: bool = True) -> list[int]:
    fast = Fast.from_file(str(folder / "tokenizer.json"))
    return fast.encode(text, add_special_tokens=special).ids


# --- what a body comes to -------------------------------------------------------------------


def test_every_form_of_a_completions_prompt(folder: Path) -> None:
    text, other = "the log holds every decision", "of the fleet"
    whole = ids(folder, text)
    assert whole[0] == 0
    marks = prefix.of_tokens(whole, 4)
    assert marks
    assert told(folder, {"prompt": text}) == CountReply(1, len(whole), marks)
    assert told(folder, {"prompt": whole}) == CountReply(1, len(whole), marks)
    both = len(whole) + len(ids(folder, other))
    assert told(folder, {"prompt": [text, other]}) == CountReply(1, both, marks)
    assert told(folder, {"prompt": [whole, [1, 2, 3]]}) == CountReply(1, len(whole) + 3, marks)
    bare = told(folder, {"prompt": text, "add_special_tokens": False})
    assert bare.tokens == len(whole) - 1 and bare.prefix != marks
    salted = told(folder, {"prompt": text, "cache_salt": "tenant"})
    assert salted.prefix == prefix.of_tokens(whole, 4, "tenant") != marks
    assert told(folder, {"prompt": text}, block_tokens=0).prefix == b""


def test_a_chat_is_rendered_as_its_template_says(folder: Path) -> None:
    messages = [
        {"role": "system", "content": "the log"},
        {
            "role": "user",
            "content": [{"type": "text", "text": "of"}, {"type": "text", "text": "x"}],
        },
    ]
    text = "<|im_start|>system\nthe log<|im_start|>user\nof\nx<|im_start|>assistant\n"
    found = told(folder, {"messages": messages}, chat=True)
    expected = ids(folder, text, special=False)
    assert found == CountReply(1, len(expected), prefix.of_tokens(expected, 4))
    without = told(folder, {"messages": messages, "add_generation_prompt": False}, chat=True)
    assert without.tokens == len(ids(folder, text.rpartition("<|im_start|>")[0], special=False))
    tool = {"type": "function", "function": {"name": "f", "strict": None, "other": 1}}
    told_of = (
        '[{"type": "function", "function": {"name": "f", "description": null, "parameters": null}}]'
    )
    tools = told(folder, {"messages": messages, "tools": [tool]}, chat=True)
    begun, _, rest = text.rpartition("<|im_start|>")
    shown = f"{begun}{told_of}<|im_start|>{rest}"
    assert tools.tokens == len(ids(folder, shown, special=False))


@pytest.mark.parametrize(
    "body",
    [
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
        {"messages": [{"role": "developer", "content": "x"}]},
        {"messages": [{"role": "user", "content": "x"}], "chat_template": "{{ 1 }}"},
        {"messages": [{"role": "user", "content": "x"}], "continue_final_message": True},
        {"messages": [{"role": "user", "content": "x"}], "truncate_prompt_tokens": 4},
    ],
)
def test_what_is_not_rendered_here_is_estimated(folder: Path, body: dict) -> None:
    with pytest.raises(Unusable):
        told(folder, body, chat=True)


def test_templates_are_held_in_the_sandbox() -> None:
    template = Template("{{ messages.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(Unusable):
        template.render({"messages": []})
    with pytest.raises(Unusable, match="no such role"):
        Template("{{ raise_exception('no such role') }}", {}).render({"messages": []})


def test_templates_that_go_through_parts_are_given_parts() -> None:
    parts = (
        "{% for m in messages %}{% for p in m['content'] %}[{{ p.text }}]{% endfor %}{% endfor %}"
    )
    assert Template(parts, {}).render({"messages": [{"role": "user", "content": "a"}]}) == "[a]"
    macro = (
        "{% macro show(c) %}{% for p in c %}[{{ p.text }}]{% endfor %}{% endmacro %}"
        "{% for m in messages %}{{ show(m.content) }}{% endfor %}"
    )
    assert Template(macro, {}).render({"messages": [{"role": "user", "content": "a"}]}) == "[a]"


def test_a_call_s_arguments_are_given_as_a_mapping() -> None:
    template = Template("{{ messages[0].tool_calls[0].function.arguments.city }}", {})
    call = {"type": "function", "function": {"name": "f", "arguments": '{"city": "Ulm"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert template.render({"messages": [message]}) == "Ulm"
    call["function"]["arguments"] = "{broken"
    assert template.render({"messages": [message]}) == ""


def test_several_models_have_a_tokenizer_each() -> None:
    assert tokenizers_of("/a/b") == {"": "/a/b"}
    assert tokenizers_of("m=/a, n=org/name") == {"m": "/a", "n": "org/name"}
    for where in ("/nowhere/at-all", "nobody/has-this"):
        with pytest.raises(FileNotFoundError):
            Tokenizer(where)


# --- at the gateway -------------------------------------------------------------------------


def arrivals(r) -> list:
    return r.scheduler.came


async def until(condition, what: str) -> None:
    for _ in range(2000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"timed out: {what}")


def body_of(text: str, **more) -> bytes:
    return json.dumps({"model": "m", "prompt": text, "max_tokens": 4, **more}).encode()


async def test_requests_arrive_counted_and_their_bodies_stay(rig, folder: Path) -> None:
    text = "the log holds every decision"
    async with rig(engines=1, tokenizer=str(folder), tokenize_wait_s=10.0) as r:
        await r.gateway.tokens.ready()
        body = body_of(text)
        assert (await r.ask(COMPLETIONS, body)).status == 200
        (arrival,) = arrivals(r)
        whole = ids(folder, text)
        assert (arrival.prompt_tokens, arrival.estimated) == (len(whole), False)
        assert arrival.prefix == prefix.of_tokens(whole, r.scheduler.block_tokens("m"))
        assert r.engines[0].seen[0].body == body
        long = body_of(text * (LONG_BYTES // 20))
        assert (await r.ask(COMPLETIONS, long)).status == 200
        assert not arrivals(r)[1].estimated
        picture = {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}
        chat = json.dumps({"model": "m", "messages": [picture], "max_tokens": 4}).encode()
        assert (await r.ask(CHAT, chat)).status == 200
        assert arrivals(r)[2].estimated
        strange = json.dumps(
            {"model": "m", "messages": [{"content": "x"}], "max_tokens": 4}
        ).encode()
        assert (await r.ask(CHAT, strange)).status == 200  # the engine's to judge
        assert arrivals(r)[3].estimated
        counters = r.gateway.tokens.counters
        assert (counters.counted, counters.unusable) == (2, 1), "pictures are not even asked"


async def test_without_a_tokenizer_everything_is_estimated(rig) -> None:
    async with rig(engines=1) as r:
        await r.ask(COMPLETIONS, body_of("the log"))
        (arrival,) = arrivals(r)
        assert arrival.estimated and arrival.prefix == b""


async def test_a_hung_tokenizer_delays_requests_briefly(rig, folder: Path) -> None:
    async with rig(engines=1, tokenizer=str(folder), tokenize_wait_s=0.2) as r:
        tokens = r.gateway.tokens
        await tokens.ready()
        os.kill(tokens.pid, signal.SIGSTOP)
        try:
            answers = await asyncio.gather(*(r.ask(COMPLETIONS, body_of("x")) for _ in range(3)))
            assert {answer.status for answer in answers} == {200}
            assert tokens.counters.late == 3
            await r.ask(COMPLETIONS, body_of("x"))
            assert tokens.counters.away == 1, "nobody waits for one that says nothing"
            assert all(arrival.estimated for arrival in arrivals(r))
        finally:
            os.kill(tokens.pid, signal.SIGCONT)
        await until(lambda: not tokens._pending, "it has answered")
        await until_counted(r)


async def until_counted(r) -> None:
    """The machine may be slow: some request is counted in time."""
    for _ in range(100):
        await r.ask(COMPLETIONS, body_of("x"))
        if not arrivals(r)[-1].estimated:
            return
        await asyncio.sleep(0.05)
    raise AssertionError("nothing is counted any more")


@pytest.mark.full
async def test_a_tokenizer_that_dies_is_started_again(rig, folder: Path) -> None:
    async with rig(engines=1, tokenizer=str(folder), tokenize_wait_s=10.0) as r:
        tokens = r.gateway.tokens
        await tokens.ready()
        first = tokens.pid
        os.kill(first, signal.SIGSTOP)
        asked = asyncio.create_task(r.ask(COMPLETIONS, body_of("x")))
        await until(lambda: tokens._pending, "it is asked")
        os.kill(first, signal.SIGKILL)
        assert (await asked).status == 200
        assert arrivals(r)[0].estimated
        await tokens.ready()
        assert tokens.pid != first
        assert tokens.counters.restarts == 1
        await r.ask(COMPLETIONS, body_of("x"))
        assert not arrivals(r)[1].estimated


async def test_a_tokenizer_that_answers_is_never_taken_for_hung(folder: Path) -> None:
    """Several answers can come in one read. After them nothing is pending, so no silence counts,
    however long no question comes."""
    now = 0.0
    async with Tokens(str(folder), 10.0, lambda: now) as tokens:
        await tokens.ready()
        for _ in range(20):
            body = body_of("the log holds every decision")
            found = await asyncio.gather(*(tokens.count("m", False, 4, body) for _ in range(50)))
            assert all(one is not None for one in found)
            now += HUNG_S + 1
        assert (tokens.counters.counted, tokens.counters.restarts) == (1000, 0)


@pytest.mark.full
async def test_a_hung_tokenizer_is_ended_and_the_log_says_by_whom(folder: Path, capsys) -> None:
    now = 0.0
    async with Tokens(str(folder), 0.01, lambda: now) as tokens:
        await tokens.ready()
        os.kill(tokens.pid, signal.SIGSTOP)
        assert await tokens.count("m", False, 4, body_of("x")) is None
        now += HUNG_S + 1
        await until(lambda: tokens.counters.restarts, "it is ended")
    assert "the gateway killed it: no answer for 10 s" in capsys.readouterr().out


async def test_an_interrupt_of_the_terminal_is_the_gateway_s(rig, folder: Path) -> None:
    async with rig(engines=1, tokenizer=str(folder), tokenize_wait_s=10.0) as r:
        await r.gateway.tokens.ready()
        pid = r.gateway.tokens.pid
        os.kill(pid, signal.SIGINT)
        await r.ask(COMPLETIONS, body_of("x"))
        assert not arrivals(r)[0].estimated
        assert r.gateway.tokens.pid == pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)  # and nothing of it is left


async def test_a_tokenizer_that_is_none_leaves_estimates(rig, tmp_path: Path) -> None:
    async with rig(engines=1, tokenizer=str(tmp_path), tokenize_wait_s=10.0) as r:
        await until(lambda: r.gateway.tokens.counters.restarts, "it ended")
        assert (await r.ask(COMPLETIONS, body_of("x"))).status == 200
        assert arrivals(r)[0].estimated


async def test_a_client_that_leaves_while_it_is_counted_has_its_end(rig, folder: Path) -> None:
    async with rig(engines=1, tokenizer=str(folder), tokenize_wait_s=60.0) as r:
        tokens = r.gateway.tokens
        await tokens.ready()
        os.kill(tokens.pid, signal.SIGSTOP)
        client = r.client()
        async with client:
            client.send(COMPLETIONS, body_of("x", stream=True))
            await until(lambda: tokens._pending, "it is asked")
            assert not arrivals(r)
        await until(lambda: r.scheduler.endings(), "its end is written")
        assert len(arrivals(r)) == 1
        assert r.scheduler.endings()[0][0] == "cancelled"
        os.kill(tokens.pid, signal.SIGCONT)
        await until(lambda: not tokens._pending and not tokens._pending_bytes, "it has answered")


async def test_a_counted_request_survives_its_engine(rig, folder: Path) -> None:
    async with rig(engines=2, tokenizer=str(folder), tokenize_wait_s=10.0) as r:
        await r.gateway.tokens.ready()
        r.engines[0].script.append(Behaviour(cut_after=3))
        answer = await r.ask(COMPLETIONS, body_of("the log", stream=True))
        assert answer.status == 200
        assert len(arrivals(r)) == 1 and not arrivals(r)[0].estimated
