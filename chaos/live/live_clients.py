"""Clients of a live run: they send the schedule's requests, and know the expected answers.

Each request has a number of random prompt tokens and a number of output tokens, the same for the
same seed. Before the run, the clients record the answer of an undisturbed fleet, once for each
different request of all runs of a shared fixture. They do so under a cache salt, so the run finds
none of it in the prefix caches.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Callable, Iterable, Sequence
from random import Random
from typing import Any

import aiohttp
import msgspec
from msgspec import Struct

from relume.chaos.outcome import History
from relume.chaos.scenario.schedule import Request, Schedule
from relume.chaos.traffic import Stream, ask
from relume.chaos.validators.client_records import record_of
from relume.chaos.validators.records import ClientRecord
from relume.events.vocabulary.enums import RequestOutcome
from relume.events.wire.headers import TIER
from relume.policies.routing.routing_settings import TIERS

TOKENS = range(300, 2800)
"""Ids of ordinary tokens of the tiny model."""

ANSWER_S = 120.0
REFUSED_S = 30.0
"""Time for which a client retries an address without a listener."""

AGAIN = 8
"""Number of clients that continue while faults are pending."""

AT_ONCE = 48
"""Number of undisturbed requests at the same time."""


def body_of(request: Request, seed: int, model: str) -> dict[str, Any]:
    """The body of a completions request; equal bodies must get equal answers."""
    prompt: list[int] = []
    for group in request.prefix:
        rng = Random(f"prefix:{group}")
        prompt += [rng.choice(TOKENS) for _ in range(request.prefix_block)]
    rng = Random(f"{seed}:prompt:{request.name}")
    del prompt[request.prompt_tokens :]
    prompt += [rng.choice(TOKENS) for _ in range(request.prompt_tokens - len(prompt))]
    body: dict[str, Any] = {
        "model": model,
        "prompt": prompt,
        "max_tokens": request.output_tokens,
        "ignore_eos": True,
        "temperature": request.temperature,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
    }
    if request.temperature:
        body["top_p"] = request.top_p
        if request.seed is not None:
            body["seed"] = request.seed
    return body if request.n == 1 else {**body, "n": request.n}


def headers_of(request: Request) -> dict[str, str]:
    """Headers with the request's tier and tenant for the admission queue."""
    tier = {TIER: request.tier} if request.tier in TIERS else {}
    return {**tier, "x-tenant-id": request.tenant} if request.tenant else tier


class _Sent(Struct):
    """A request and its stream. `task`: the task that runs it."""

    stream: Stream
    content_id: str
    task: asyncio.Task[Any] | None = None
    gone: bool = False


class Clients:
    """All clients of a run. `tag` makes their x-request-ids unique in the log; `known`:
    undisturbed answers by a digest of the request, to which `learn` adds."""

    def __init__(
        self,
        schedule: Schedule,
        gateways: Sequence[str],
        tag: str,
        known: dict[str, ClientRecord],
        model: str = "tiny",
    ) -> None:
        self.histories: list[History] = []
        self.began_s = 0.0
        self._schedule = schedule
        self._gateways = gateways
        self._tag = tag
        self._known = known
        self._bodies = {r.name: body_of(r, schedule.seed, model) for r in schedule.requests}
        self._sent: dict[str, _Sent] = {}
        self._over = {r.name: asyncio.Event() for r in schedule.requests}

    @property
    def under_way(self) -> list[str]:
        """x-request-ids of the requests in progress."""
        return [name for name, sent in self._sent.items() if sent.task and not sent.task.done()]

    async def learn(self) -> None:
        """Send every different request without a known answer once, undisturbed, and record the
        answers."""
        different: dict[str, str] = {}
        for name, body in self._bodies.items():
            different.setdefault(_content_id(body), name)
        for content_id in [known for known in different if known in self._known]:
            # Another fleet answered it: this one's log has no such request.
            record = msgspec.structs.replace(self._known[content_id], status=0)
            name = f"calm-{different.pop(content_id)}"
            self.histories.append(History(request=name, record=record, sent_ns=time.monotonic_ns()))
        slots = asyncio.Semaphore(AT_ONCE)
        async with self._session() as session, asyncio.TaskGroup() as tasks:
            for index, (content_id, name) in enumerate(different.items()):
                tasks.create_task(self._learn(session, slots, index, content_id, name))

    async def _learn(
        self,
        session: aiohttp.ClientSession,
        slots: asyncio.Semaphore,
        index: int,
        content_id: str,
        name: str,
    ) -> None:
        body = {**self._bodies[name], "cache_salt": "undisturbed"}
        url = self._gateways[index % len(self._gateways)]
        async with slots:
            stream = Stream(request=f"{self._tag}-calm-{name}", prompt="")
            await ask(session, f"{url}/v1/completions", stream, body, None, ANSWER_S)
        record = record_of(stream, content_id, undisturbed=True)
        if record.outcome == RequestOutcome.COMPLETED:
            self._known[content_id] = record
        self.histories.append(self._history(f"calm-{name}", record, stream))

    async def run(self, more: Callable[[], bool] = lambda: False) -> None:
        """Send all requests of the schedule, each at its time. Then, so that faults do not strike
        an idle fleet, send requests of the schedule again, by as many clients, while `more()`.
        Returns when all have ended."""
        self.began_s = time.monotonic()
        self.histories = [_shifted(h, self.began_s) for h in self.histories]
        async with self._session() as session, asyncio.TaskGroup() as tasks:
            loops = 0
            for index, request in enumerate(self._schedule.requests):
                tasks.create_task(self._live(session, index, request))
                loops += request.after is None
            for index in range(min(loops, AGAIN)):
                tasks.create_task(self._again(session, index, more))

    async def _again(
        self, session: aiohttp.ClientSession, index: int, more: Callable[[], bool]
    ) -> None:
        for over in self._over.values():
            await over.wait()
        rng, number = Random(f"{self._schedule.seed}:again:{index}"), 0
        while more():
            request = rng.choice(self._schedule.requests)
            await self._send(session, index + number, request, f"{request.name}-{index}-{number}")
            number += 1

    async def _live(self, session: aiohttp.ClientSession, index: int, request: Request) -> None:
        if request.after is not None:
            await self._over[request.after].wait()
            await asyncio.sleep(request.think_ns / 1e9)
        elif request.at_ns:
            await asyncio.sleep(self.began_s + request.at_ns / 1e9 - time.monotonic())
        await self._send(session, index, request, request.name)
        self._over[request.name].set()

    async def _send(
        self, session: aiohttp.ClientSession, index: int, request: Request, name: str
    ) -> None:
        body = self._bodies[request.name]
        client_id = f"{self._tag}-{name}"
        sent = self._sent[client_id] = _Sent(
            Stream(request=client_id, prompt=""), _content_id(body)
        )
        sent.task = asyncio.create_task(self._ask(session, index, sent, body, headers_of(request)))
        try:
            await asyncio.wait({sent.task})
        finally:
            sent.task.cancel()
        if sent.task.cancelled():
            sent.stream.error = "left"
        record = record_of(sent.stream, sent.content_id)
        if sent.gone and not sent.stream.whole:
            record.outcome = "cancelled"
        self.histories.append(self._history(name, record, sent.stream))

    async def _ask(
        self,
        session: aiohttp.ClientSession,
        index: int,
        sent: _Sent,
        body: dict[str, Any],
        headers: dict[str, str],
    ) -> None:
        """Send like a load balancer: the replica that accepts the connection serves it."""
        deadline = time.monotonic() + REFUSED_S
        turn = index
        while True:
            url = self._gateways[turn % len(self._gateways)]
            await ask(session, f"{url}/v1/completions", sent.stream, body, None, ANSWER_S, headers)
            refused = sent.stream.error.startswith("ClientConnectorError")
            if not refused or time.monotonic() > deadline:
                return
            sent.stream.error = ""
            turn += 1
            await asyncio.sleep(0.05)

    def hang_up(self, client_id: str) -> bool:
        """Make this client leave in the middle; False if it has its answer already."""
        sent = self._sent.get(client_id)
        if sent is None or sent.task is None or sent.task.done():
            return False
        sent.gone = True
        return sent.task.cancel()

    def _session(self) -> aiohttp.ClientSession:
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        return aiohttp.ClientSession(connector=connector)

    def _history(self, name: str, record: ClientRecord, stream: Stream) -> History:
        def since(at_s: float) -> int:
            return round((at_s - self.began_s) * 1e9)

        return History(
            request=name,
            record=record,
            sent_ns=since(stream.started),
            first_ns=since(stream.first) if stream.tokens else None,
            last_ns=since(stream.last) if stream.tokens else None,
        )


def _content_id(body: dict[str, Any]) -> str:
    encoded = msgspec.json.encode(body, order="deterministic")
    return hashlib.sha256(encoded).hexdigest()[:24]


def _shifted(history: History, began_s: float) -> History:
    """`history` with times relative to the run's start: times before it are negative."""
    began = round(began_s * 1e9)
    return msgspec.structs.replace(
        history,
        sent_ns=history.sent_ns - began,
        first_ns=None if history.first_ns is None else history.first_ns - began,
        last_ns=None if history.last_ns is None else history.last_ns - began,
    )


def wrong_beginnings(histories: Iterable[History]) -> list[str]:
    """Undisturbed requests without a whole answer, which cannot serve as a reference."""
    return [
        f"{h.request}: {h.record.outcome} ({h.record.status})"
        for h in histories
        if h.record.undisturbed and h.record.outcome != RequestOutcome.COMPLETED
    ]
