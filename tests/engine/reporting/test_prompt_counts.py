"""The gateway's tokenizer counts prompts as the engine does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from relume.controlplane.gateway.openai.tokenizing import Tokenizer
from relume.events.vocabulary import RequestQueued
from relume.events.wire.tokenizer_messages import CountRequest
from tests.engine import client
from tests.engine.fleet import Zygote, engine_of

pytestmark = pytest.mark.full

TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- for tool in tools %}
        {{- tool | tojson }}
        {{- '\\n' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.content is string %}
        {{- message.content }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- call.function.name }}
        {%- for name, value in call.function.arguments | items %}
            {{- name + ' is ' ~ value }}
        {%- endfor %}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
WORDS = "The log holds every decision: grüß Gott, 你好, \U0001f525 and <|im_start|> too. "
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "of a <city>",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        "strict": True,
    },
}
CALL = {
    "id": "c1",
    "type": "function",
    "function": {"name": "weather", "arguments": '{"city": "Ulm", "days": 3}'},
}
USER = {"role": "user", "content": WORDS * 3}
TURNS = [
    {"role": "system", "content": "Be brief."},
    USER,
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "rain"}]},
    {"role": "user", "content": [{"type": "text", "text": "so"}, {"type": "text", "text": "?"}]},
]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": WORDS},
    {"prompt": WORDS, "add_special_tokens": False},
    {"prompt": [WORDS, "x", WORDS * 5]},
    {"prompt": [5, 6, 7, 300, 301]},
    {"prompt": [[5, 6, 7], [300]]},
]
CHATS: list[dict[str, Any]] = [
    {"messages": [USER]},
    {"messages": TURNS},
    {"messages": TURNS, "tools": [TOOL]},
    {"messages": TURNS, "tools": [TOOL], "tool_choice": "none"},
    {"messages": TURNS[:2], "add_generation_prompt": False},
    {"messages": TURNS[:2], "chat_template_kwargs": {"enable_thinking": False}},
    {"messages": TURNS[:2], "reasoning_effort": "none"},
]


@pytest.fixture(scope="module")
def folder(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model's tokenizer with a template that does what templates do."""
    made = tmp_path_factory.mktemp("counted")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny_model / name, made)
    (made / "chat_template.jinja").write_text(TEMPLATE)
    return made


def test_counts_are_the_engine_s(zygote: Zygote, folder: Path) -> None:
    tokenizer = Tokenizer(str(folder))
    template = ("--chat-template", str(folder / "chat_template.jinja"))
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    with engine_of(zygote.fork(*template, *tools)) as engine:
        asked = [("/v1/completions", body) for body in COMPLETIONS]
        asked += [("/v1/chat/completions", body) for body in CHATS]
        for number, (path, more) in enumerate(asked):
            body = {"model": "tiny", "max_tokens": 1, "temperature": 0, **more}
            answer = client.ask(engine.port, path, body, request=f"count-{number}")
            assert answer.whole is not None and answer.whole.status == 200, answer
            engine.wait_idle()
            queued = [
                change.prompt_tokens
                for change in engine.agent.changes()
                if type(change) is RequestQueued
                and change.request.partition("#")[0] == f"count-{number}"
            ]
            ask = CountRequest(
                number=1,
                model="tiny",
                chat="chat" in path,
                block_tokens=32,
                body=json.dumps(body).encode(),
            )
            assert tokenizer.tell(ask).tokens == sum(queued) > 0, more
