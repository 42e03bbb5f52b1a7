"""Streams of other APIs than OpenAI's completions: event by event as without the kill."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp
import anthropic
import openai
from msgspec import Struct, field

from relume.events.failpoints.points import Failpoint
from tests.live.cases import TOOL
from tests.live.conftest import HANG_S
from tests.live.core.core_fleet import CORE, CoreFleet

pytestmark = CORE
CUT = 24
MOST = 70
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
TALK = [{"role": "user", "content": "What is a lease, and who may hold one?"}]

CALLED = {
    "tools": [{"name": "look_up", "input_schema": TOOL["function"]["parameters"]}],
    "tool_choice": {"type": "any"},
}
OF_MESSAGES: dict[str, dict[str, Any]] = {
    "text": {"system": "Answer at length."},
    "called": CALLED,
    "whole": {"stream": False},
}
OF_RESPONSES: dict[str, dict[str, Any]] = {
    "text": {"instructions": "Answer at length."},
    "seeded": {"temperature": 0.8, "seed": 7},
    "penalties": {"presence_penalty": 0.8, "frequency_penalty": 0.5},
    "called": {"tools": [{"type": "function", **TOOL["function"]}], "tool_choice": "required"},
    "stored": {"store": True, "input": TALK},
    "whole": {"stream": False},
}


Parse = Callable[[CoreFleet, str, dict[str, Any]], Awaitable[Any]]
"""Sends a request through the package of its API."""


class Reading(Struct, kw_only=True):
    """What the client of one request got."""

    name: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    events: list[tuple[str, Any]] = field(default_factory=list)

    def compared(self) -> Any:
        """The events without what names the request: its id, ids made of it, by their order, and the
        time at which it began, which is one. Of its prompt, the first worker had cached what earlier
        requests left there, and wrote the rest of the whole blocks."""
        text = json.dumps(self.events).replace(self.name, "NAME")
        created = set(re.findall(r'"created_at": (\d+)', text))
        assert len(created) <= 1
        text = re.sub(r'"created_at": \d+', '"created_at": 0', text)
        for number, made in enumerate(dict.fromkeys(ids_in(self.events))):
            text = text.replace(made, f"ID{number}")
        text = re.sub(r'"cached_tokens": (\d+), "cache_write_tokens": (\d+)', total, text)
        return json.loads(text)


def total(found: re.Match[str]) -> str:
    """The two counts as their sum."""
    return f'"blocks": {int(found[1]) + int(found[2])}'


def ids_in(value: Any) -> list[str]:
    """Random ids in events, in their order."""
    if isinstance(value, dict):
        own = [i for name in ("id", "item_id", "call_id") if isinstance(i := value.get(name), str)]
        return own + [i for inner in value.values() for i in ids_in(inner)]
    if isinstance(value, list | tuple):
        return [i for inner in value for i in ids_in(inner)]
    return []


async def read(session: aiohttp.ClientSession, url: str, got: Reading, body: Any) -> None:
    """Send `body`, and read all events, or the whole answer as one."""
    headers = {"x-request-id": got.name}
    async with asyncio.timeout(HANG_S), session.post(url, json=body, headers=headers) as answer:
        got.status, got.headers = answer.status, {k.lower(): v for k, v in answer.headers.items()}
        content = (await answer.read()).decode()
    if not got.headers["content-type"].startswith("text/event-stream"):
        got.events = [("whole", json.loads(content))]
        return
    for event in content.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        got.events.append((name.removeprefix("event: "), json.loads(data.removeprefix("data: "))))


async def read_all(
    fleet: CoreFleet, route: str, bodies: dict[str, Any], tag: str
) -> dict[str, Reading]:
    """All requests at once."""
    found = {name: Reading(name=fleet.named(f"{tag}-{name}")) for name in bodies}
    async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as tasks:
        for name, body in bodies.items():
            tasks.create_task(read(session, fleet.url + route, found[name], body))
    return found


async def through_anthropic(fleet: CoreFleet, name: str, body: dict[str, Any]) -> Any:
    """The message as the `anthropic` package puts it together."""
    client = anthropic.AsyncAnthropic(
        base_url=fleet.url, api_key="-", max_retries=0, default_headers={"x-request-id": name}
    )
    fields = {key: value for key, value in body.items() if key not in ("stream", "temperature")}
    extra = {"temperature": body["temperature"]}
    async with client, client.messages.stream(**fields, extra_body=extra) as stream:
        return await stream.get_final_message()


async def through_openai(fleet: CoreFleet, name: str, body: dict[str, Any]) -> Any:
    """The last event as the `openai` package reads it, which has the whole response."""
    client = openai.AsyncOpenAI(
        base_url=f"{fleet.url}/v1",
        api_key="-",
        max_retries=0,
        default_headers={"x-request-id": name},
    )
    async with client, await client.responses.create(**body) as events:
        return [event async for event in events][-1]


async def killed(fleet: CoreFleet, point: Any, names: list[str]) -> None:
    """Kill the engine of w0 when it has all of the requests and one of them is at the cut."""
    await fleet.until_routed(names)
    hit = await point.reached()
    await fleet.open_all()
    os.kill(hit.pid, signal.SIGKILL)


async def struck(
    fleet: CoreFleet, route: str, bodies: dict[str, Any], parse: Parse
) -> tuple[dict[str, Reading], Any, Any]:
    """All requests on an engine that is killed, and what a client package makes of the first, without
    and with the kill. The events must be those of an undisturbed run."""
    calm = await read_all(fleet, route, bodies, f"calm{route[4:]}")
    first = next(iter(bodies.values()))
    expected = await parse(fleet, fleet.named(f"calm{route[4:]}-client"), first)
    tag = f"struck{route[4:]}"
    names = [fleet.named(f"{tag}-{name}") for name in (*bodies, "client")]
    async with fleet.at(Failpoint.ENGINE_DECODE, "w0", tokens=CUT) as point:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(killed(fleet, point, names))
            reading = tasks.create_task(read_all(fleet, route, bodies, tag))
            parsing = tasks.create_task(parse(fleet, names[-1], first))
    hit = reading.result()
    routes = await fleet.routes(names)
    assert [n for n, made in routes.items() if len(made) != 2] == [], "ended before the kill"
    for name, ours in calm.items():
        theirs = hit[name]
        assert theirs.status == ours.status == 200
        assert theirs.headers["x-relume-verdict"] == "exact"
        assert theirs.compared() == ours.compared(), name
    return hit, expected, parsing.result()


async def test_messages_continue_event_by_event(fleet: CoreFleet) -> None:
    base = {"model": "tiny", "max_tokens": MOST, "temperature": 0, "stream": True, "messages": TALK}
    bodies = {name: {**base, **extra} for name, extra in OF_MESSAGES.items()}
    hit, expected, message = await struck(fleet, MESSAGES, bodies, through_anthropic)
    kinds = [event for event, _ in hit["text"].events]
    assert kinds.count("content_block_delta") > MOST // 2 and kinds[-1] == "message_stop"
    assert hit["text"].events[0][1]["message"]["id"] == f"chatcmpl-{hit['text'].name}"
    blocks = [d["content_block"] for _, d in hit["called"].events if "content_block" in d]
    assert "look_up" in [block.get("name") for block in blocks]
    assert message.content == expected.content and len(message.content[0].text) > 60
    assert (message.usage, message.stop_reason) == (expected.usage, "max_tokens")


async def test_responses_continue_event_by_event(fleet: CoreFleet) -> None:
    base = {"model": "tiny", "max_output_tokens": MOST, "temperature": 0, "stream": True}
    base |= {"input": TALK[0]["content"]}
    bodies = {name: {**base, **extra} for name, extra in OF_RESPONSES.items()}
    hit, expected, last = await struck(fleet, RESPONSES, bodies, through_openai)
    for name, got in hit.items():
        events = [data for _, data in got.events]
        if name == "whole":
            assert events[0]["id"] == f"resp_{got.name}"
            continue
        assert [data["sequence_number"] for data in events] == list(range(len(events)))
        shown = {data["item_id"] for data in events if "item_id" in data}
        assert shown == {item["id"] for item in events[-1]["response"]["output"]}
        assert events[-1]["response"]["id"] == f"resp_{got.name}"
    text = [data for kind, data in hit["text"].events if kind == "response.output_text.delta"]
    assert len(text) > MOST // 2
    calls = hit["called"].events[-1][1]["response"]["output"]
    assert "look_up" in [item.get("name") for item in calls]
    assert last.type == expected.type == "response.completed"
    assert last.response.usage.total_tokens == expected.response.usage.total_tokens
    assert last.response.usage.output_tokens == MOST
    assert last.response.output_text == expected.response.output_text
    assert len(last.response.output_text) > 60
