"""Clients that lose their connection, or their gateway, and come back to their stream."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import ExitStack, suppress
from typing import Any

import aiohttp
import msgspec
import openai

from relume.chaos.traffic import prompts
from relume.controlplane.client import astream, stream
from relume.controlplane.local.local_fleet import FleetOptions
from relume.events import vocabulary as v
from tests.live.conftest import HANG_S, Scene, scene_of
from tests.live.resuming import Reader
from tests.signals import slowed

TEXT = prompts(1)[0]
LONG_GRACE = ("--resume-grace-s", "600")
"""Longer than any wait here: no engine drops a stream because its client stays away."""


def asking(max_tokens: int, **extra: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "prompt": TEXT,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_token_ids": True,
        **extra,
    }


def after(count: int):
    """Leave after so many events in all."""
    return lambda reader: len(reader.events) >= count


async def test_client_comes_back_to_the_same_and_to_another_replica(options: FleetOptions) -> None:
    options = msgspec.structs.replace(options, replicas=2, replica_args=LONG_GRACE)
    async with scene_of(options) as scene, aiohttp.ClientSession() as session:
        first, second = (f"{url}/v1/completions" for url in scene.fleet.gateways)
        calm = Reader(name="calm")
        await calm.read(session, first, asking(400))
        assert calm.done and calm.resumable and len(calm.ids) == len(calm.events)
        reader = Reader(name="torn")
        await reader.read(session, first, asking(400), after(40))
        await reader.read(session, first, None, after(80))
        await reader.read(session, second, None, after(120))
        await reader.read(session, first, None)
        assert_resumed(scene, calm, reader, 400)
        away = Reader(name="away")
        await away.read(session, first, asking(400), after(20))
        worker = (await scene.routes(["away"]))["away"][-1].worker
        await scene.fleet.admin(f"workers/{worker}/restart", "POST")
        await scene.died(worker)
        await away.read(session, first, None)
        assert_resumed(scene, calm, away, 400)
        await _kept(scene, session, 0)
        await scene.sound()


async def test_gateway_is_killed_and_its_clients_continue_at_another(options: FleetOptions) -> None:
    options = msgspec.structs.replace(options, replicas=2, replica_args=LONG_GRACE)
    async with scene_of(options) as scene, aiohttp.ClientSession() as session:
        first, second = (f"{url}/v1/completions" for url in scene.fleet.gateways)
        calm = Reader(name="calm")
        await calm.read(session, first, asking(600))
        lazy = Reader(name="lazy")  # all of it is written, its client does not read on
        unread = await lazy.read_a_part(first, asking(600), 20)
        assert (await _finished(scene, {lazy.request}))[lazy.request] == "length"
        await _kept(scene, session, 1)
        helped = Helped(scene)
        await helped.begin()
        torn = [Reader(name=f"torn-{i}") for i in range(4)]
        reading = [asyncio.create_task(r.read(session, first, asking(600))) for r in torn]
        deadline = time.monotonic() + HANG_S
        while any(len(r.events) < 20 for r in torn):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        assert "lazy" not in await scene.ended()
        scene.fleet.children["r0"].kill()
        await asyncio.gather(*reading)
        unread.close()
        cut = [lazy, *(r for r in torn if not r.done)]
        assert len(cut) > 1 and not helped.done
        await asyncio.gather(*(r.read(session, second) for r in cut))
        await helped.check()
        for reader in [lazy, *torn]:
            assert_resumed(scene, calm, reader, 600)
        returned = [e for e in await scene.events() if type(e) is v.ClientReturned]
        assert {e.request for e in returned} > {r.request for r in cut}
        scene.fleet.children["r0"].process.wait()
        scene.fleet.restart("r0")
        await scene.sound()
        assert (await scene.ended())["lazy"].outcome == "completed"


async def test_replica_is_stopped_and_another_continues_its_streams(options: FleetOptions) -> None:
    args = (*LONG_GRACE, "--drain-s", "0.5", "--drain-announce-s", "0")
    options = msgspec.structs.replace(options, replicas=2, replica_args=args)
    async with scene_of(options) as scene, aiohttp.ClientSession() as session:
        first, second = (f"{url}/v1/completions" for url in scene.fleet.gateways)
        body = asking(600, ignore_eos=True)
        calm = Reader(name="calm")
        await calm.read(session, first, body)
        torn = [Reader(name=f"torn-{i}") for i in range(3)]
        reading = [asyncio.create_task(r.read(session, first, body)) for r in torn]
        deadline = time.monotonic() + HANG_S
        while any(len(r.events) < 20 for r in torn):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        stopping = scene.fleet.children["r0"].process
        stopping.send_signal(signal.SIGTERM)
        await asyncio.gather(*reading)
        assert await asyncio.to_thread(stopping.wait, 60) == 0
        moved = [r for r in torn if not r.done]
        assert moved and not any(r.error for r in torn)
        await asyncio.gather(*(r.read(session, second) for r in moved))
        for reader in torn:
            assert_resumed(scene, calm, reader, 600)
        (stopped,) = [e for e in await scene.events() if type(e) is v.ReplicaStopped]
        assert (stopped.moved, stopped.cut) == (len(moved), 0)
        scene.fleet.restart("r0")
        await scene.sound()


async def test_gateway_and_workers_are_killed_together(options: FleetOptions) -> None:
    """What is left is the request as its holder has it: a greedy one is generated again, and
    goes on where its client was; one that samples without a seed cannot, and says so."""
    options = msgspec.structs.replace(
        options, replicas=2, checkpoint_mb=64, replica_args=("--wait-for-worker-s", "120")
    )
    async with scene_of(options) as scene, aiohttp.ClientSession() as session:
        first, second = (f"{url}/v1/completions" for url in scene.fleet.gateways)
        calm = Reader(name="calm")
        await calm.read(session, first, asking(1500, ignore_eos=True))
        torn = [Reader(name=f"torn-{i}") for i in range(3)]
        sampled = Reader(name="sampled")
        long = {"user": "x" * (1 << 20)}  # as a long prompt: its envelope is a chunk of its own
        body = asking(1500, ignore_eos=True)
        deadline = time.monotonic() + HANG_S
        reading = [asyncio.create_task(torn[0].read(session, first, {**body, **long}))]
        while not torn[0].events:  # it takes longer to begin
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        engines = [w["engine_pid"] for w in await scene.fleet.workers(1)]
        with ExitStack() as slow:  # none ends before all have begun
            for pid in engines:
                slow.enter_context(slowed(pid))
            reading += [asyncio.create_task(r.read(session, first, body)) for r in torn[1:]]
            drawn = asking(1900, temperature=1.0, ignore_eos=True)
            reading.append(asyncio.create_task(sampled.read(session, first, drawn)))
            while any(len(r.events) < 40 for r in [*torn, sampled]):
                assert time.monotonic() < deadline
                await asyncio.sleep(0.005)
            scene.fleet.children["r0"].kill()
            for pid in engines:
                os.kill(pid, signal.SIGKILL)
        await asyncio.gather(*reading)

        async def returned() -> None:
            await sampled.read(session, second)
            while sampled.status == 503:  # until the log has the death of its gateway
                assert "stream_moving" in sampled.answer and time.monotonic() < deadline
                await asyncio.sleep(0.2)
                await sampled.read(session, second)

        # Beside the others, which wait for engines to load: its grace may be over before.
        await asyncio.gather(returned(), *(r.read(session, second) for r in torn))
        for reader in torn:
            assert_resumed(scene, calm, reader, 1500)
        assert sampled.status == 502 and "without a seed" in sampled.answer, sampled.answer
        again = [e for e in await scene.events() if type(e) is v.RouteDecided and e.attempt > 1]
        assert {e.request for e in again} >= {r.request for r in torn}
        scene.fleet.children["r0"].process.wait()
        scene.fleet.restart("r0")
        await scene.sound(but=("I10",))  # all engines had to start anew


async def test_grace_expires(options: FleetOptions) -> None:
    """Nobody comes back: the engine stops computing, the gateway that lives ends its requests
    and the leader those of the killed one."""
    options = msgspec.structs.replace(
        options, replicas=2, workers=1, replica_args=("--resume-grace-s", "1")
    )
    async with scene_of(options) as scene, aiohttp.ClientSession() as session:
        first, second = (f"{url}/v1/completions" for url in scene.fleet.gateways)
        left = [Reader(name=f"left-{i}") for i in range(8)]
        cut = [Reader(name=f"cut-{i}") for i in range(8)]
        body = asking(1900, ignore_eos=True)
        reading = [asyncio.create_task(r.read(session, first, body)) for r in cut]
        reading += [asyncio.create_task(r.read(session, second, body, after(3))) for r in left]
        deadline = time.monotonic() + HANG_S
        while any(len(r.events) < 3 for r in cut + left):
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)
        scene.fleet.children["r0"].kill()
        await asyncio.gather(*reading)
        ended: dict[str, v.RequestEnded] = {}
        while not {r.name for r in cut + left} <= set(ended):
            assert time.monotonic() < deadline, sorted(ended)
            await asyncio.sleep(0.5)
            ended = await scene.ended()
        assert {ended[r.name].outcome for r in left} == {"cancelled"}
        assert {ended[r.name].outcome for r in cut} == {"failed"}
        assert all("did not come back" in ended[r.name].detail for r in cut + left)
        finished = await _finished(scene, {r.request for r in cut + left})
        assert set(finished.values()) == {"abort"}
        for reader in (cut[0], left[0]):
            await reader.read(session, second)
            assert reader.status == 410, reader.answer
        scene.fleet.children["r0"].process.wait()
        scene.fleet.restart("r0")
        await scene.sound(but=("I7",))  # with one worker nothing is chosen


class Helped:
    """The client helper, over a gateway that is killed: a chat in a thread, a completion."""

    def __init__(self, scene: Scene) -> None:
        urls = [f"{url}/v1" for url in scene.fleet.gateways]
        self._one = {"base_url": urls[0], "api_key": "-", "max_retries": 0}
        self._others = urls[1:]
        self._asked = {"model": "tiny", "max_tokens": 1900, "temperature": 0}
        self.chat: list[str] = []
        self.text: list[str] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def begin(self) -> None:
        """Run both until each has some chunks."""
        self._tasks = [
            asyncio.create_task(asyncio.to_thread(self._chatting, self.chat)),
            asyncio.create_task(self._completing(self.text)),
        ]
        deadline = time.monotonic() + HANG_S
        while min(len(self.chat), len(self.text)) < 10:
            assert time.monotonic() < deadline
            await asyncio.sleep(0.005)

    def _chatting(self, out: list[str], **more: Any) -> None:
        client = openai.OpenAI(**{**self._one, **more})
        messages = [{"role": "user", "content": TEXT}]
        for chunk in stream(client, replicas=self._others, messages=messages, **self._asked):
            out.append(chunk.choices[0].delta.content or "")

    async def _completing(self, out: list[str], **more: Any) -> None:
        client = openai.AsyncOpenAI(**{**self._one, **more})
        async for chunk in astream(client, replicas=self._others, prompt=TEXT, **self._asked):
            out.append(chunk.choices[0].text)

    @property
    def done(self) -> bool:
        """Whether both have come to their end."""
        return all(task.done() for task in self._tasks)

    async def check(self) -> None:
        """Both went on: nothing is lost, nothing came twice."""
        await asyncio.gather(*self._tasks)
        chat: list[str] = []
        text: list[str] = []
        await asyncio.to_thread(self._chatting, chat, base_url=self._others[0])
        await self._completing(text, base_url=self._others[0])
        assert "".join(self.chat) == "".join(chat) and len(chat) > 100
        assert "".join(self.text) == "".join(text) and len(text) > 100


async def _finished(scene: Scene, requests: set[str]) -> dict[str, str]:
    """How the engine ended each of `requests`."""
    deadline = time.monotonic() + HANG_S
    while True:
        steps = [e for e in await scene.events() if type(e) is v.EngineStep]
        changes = [c for e in steps for c in e.changes if type(c) is v.EngineFinished]
        found = {c.request: c.reason for c in changes if c.request in requests}
        if set(found) == requests:
            return found
        assert time.monotonic() < deadline, sorted(requests - set(found))
        await asyncio.sleep(0.5)


async def _kept(scene: Scene, session: aiohttp.ClientSession, count: int) -> None:
    """Wait until all engines are up and keep so many streams."""
    kept: list[int] = []
    deadline = time.monotonic() + HANG_S
    workers: list[dict[str, Any]] = []
    while not workers or len(kept) != len(workers) or sum(kept) != count:
        assert time.monotonic() < deadline, kept
        await asyncio.sleep(0.2)
        workers, kept = await scene.fleet.workers(1), []
        for worker in workers:
            url = f"http://127.0.0.1:{worker['port']}/relume/state"
            with suppress(aiohttp.ClientError):  # it may be starting
                async with session.get(url) as answer:
                    kept.append((await answer.json())["kept"]["streams"])


def assert_resumed(scene: Scene, calm: Reader, torn: Reader, tokens: int) -> None:
    assert torn.done and not torn.error, (torn.status, torn.answer, torn.events[-1:])
    assert len(set(torn.ids)) == len(torn.ids) == len(torn.events)
    left, right = calm.stream(TEXT), torn.stream(TEXT)
    assert len(set(left.tokens)) > 20
    for name in ("tokens", "text", "finish", "usage"):
        assert getattr(left, name) == getattr(right, name), name
    assert len(right.response_ids) == len(right.created) == 1
    scene.note(left, f"{tokens}", undisturbed=True)
    scene.note(right, f"{tokens}")
