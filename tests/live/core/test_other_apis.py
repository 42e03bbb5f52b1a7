"""Streams of other APIs than OpenAI's completions: event by event as without the kill."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from typing import Any

import aiohttp
import anthropic
from msgspec import Struct, field

from relume.events.failpoints.points import Failpoint
from tests.live.cases import TOOL
from tests.live.conftest import HANG_S
from tests.live.core.core_fleet import CORE, CoreFleet

pytestmark = CORE
CUT = 24
MOST = 70
MESSAGES = "/v1/messages"
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


class Reading(Struct, kw_only=True):
    """What the client of one request got."""

    name: str
    status: int = 0
    headers: dict[str, str] = field(default_factory=dict)
    events: list[tuple[str, Any]] = field(default_factory=list)

    def compared(self) -> Any:
        """The events without what names the request: its id, and ids made of it, by their order."""
        text = json.dumps(self.events).replace(self.name, "NAME")
        for number, made in enumerate(dict.fromkeys(ids_in(self.events))):
            text = text.replace(made, f"ID{number}")
        return json.loads(text)


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
    asked = {key: value for key, value in body.items() if key not in ("stream", "temperature")}
    extra = {"temperature": body["temperature"]}
    async with client, client.messages.stream(**asked, extra_body=extra) as stream:
        return await stream.get_final_message()


async def killed(fleet: CoreFleet, point: Any, names: list[str]) -> None:
    """Kill the engine of w0 when it has all of the requests and one of them is at the cut."""
    await fleet.until_routed(names)
    hit = await point.reached()
    await fleet.open_all()
    os.kill(hit.pid, signal.SIGKILL)


async def test_messages_continue_event_by_event(fleet: CoreFleet) -> None:
    base = {"model": "tiny", "max_tokens": MOST, "temperature": 0, "stream": True, "messages": TALK}
    bodies = {name: {**base, **extra} for name, extra in OF_MESSAGES.items()}
    calm = await read_all(fleet, MESSAGES, bodies, "calm")
    calm_message = await through_anthropic(fleet, fleet.named("calm-client"), bodies["text"])
    names = [fleet.named(f"struck-{name}") for name in (*bodies, "client")]
    async with fleet.at(Failpoint.ENGINE_DECODE, "w0", tokens=CUT) as point:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(killed(fleet, point, names))
            reading = tasks.create_task(read_all(fleet, MESSAGES, bodies, "struck"))
            parsing = tasks.create_task(through_anthropic(fleet, names[-1], bodies["text"]))
    struck = reading.result()
    routes = await fleet.routes(names)
    assert [n for n, made in routes.items() if len(made) != 2] == [], "ended before the kill"
    for name, ours in calm.items():
        theirs = struck[name]
        assert theirs.status == ours.status == 200
        assert theirs.headers["x-relume-verdict"] == "exact"
        assert theirs.compared() == ours.compared(), name
    kinds = [event for event, _ in struck["text"].events]
    assert kinds.count("content_block_delta") > MOST // 2 and kinds[-1] == "message_stop"
    assert struck["text"].events[0][1]["message"]["id"] == f"chatcmpl-{struck['text'].name}"
    blocks = [d["content_block"] for _, d in struck["called"].events if "content_block" in d]
    assert "look_up" in [block.get("name") for block in blocks]
    message = parsing.result()
    assert message.content == calm_message.content and len(message.content[0].text) > 60
    assert (message.usage, message.stop_reason) == (calm_message.usage, "max_tokens")
