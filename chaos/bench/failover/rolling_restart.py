"""A rolling restart of three workers, then SIGTERM of both replicas, under load by real `openai` clients.

Each client streams greedy completions of its own prompts without a pause, and sends each request to a
replica that is ready, as a load balancer would. What it gets is compared with what the same request got
before, when nothing was restarted. A gap is the time between two chunks of one stream.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import openai

from relume.chaos.bench.bench_figures import figure, percentile
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet

DESCRIPTION = "what clients notice of a rolling restart of workers and replicas, on real processes"
PROMPTS = 4
"""Of each client, in turn."""
ROLLOUT_S = 300.0
LEAVE_S = 30.0
ANNOUNCE_S = 2.0
POLL_S = 0.2
TIMES = 3.0
"""Goal: the longest gap against the longest one of undisturbed streams."""


class Stream:
    """What one request gave. `failed`: why it did; empty: it did not."""

    def __init__(self) -> None:
        self.text = ""
        self.gap_s = 0.0
        self.failed = ""


class Client:
    """One client: `openai`'s own, for each replica."""

    def __init__(self, number: int, gateways: list[str], tokens: int) -> None:
        self._number = number
        self._gateways = gateways
        self._tokens = tokens
        self._clients = [
            openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=60.0)
            for url in gateways
        ]
        self.reference: dict[str, str] = {}
        self.streams: list[tuple[str, Stream]] = []

    async def run(self, rounds: int = 0) -> None:
        """Stream until cancelled, or so many times all prompts."""
        turn = 0
        async with aiohttp.ClientSession() as session:
            while not rounds or turn < rounds * PROMPTS:
                prompt = f"client {self._number} tells story {turn % PROMPTS}: once upon a time"
                stream = Stream()
                self.streams.append((prompt, stream))
                await self._stream(await self._ready(session), prompt, stream)
                turn += 1

    async def _ready(self, session: aiohttp.ClientSession) -> int:
        """A replica that takes requests, in turn among the clients."""
        count = len(self._gateways)
        while True:
            for index in range(self._number, self._number + count):
                try:
                    async with session.get(f"{self._gateways[index % count]}/ready") as answer:
                        if answer.status == 200:
                            return index % count
                except aiohttp.ClientError:
                    pass
            await asyncio.sleep(0.05)

    async def _stream(self, replica: int, prompt: str, stream: Stream) -> None:
        last = 0.0
        try:
            chunks = await self._clients[replica].completions.create(
                model="tiny", prompt=prompt, max_tokens=self._tokens, temperature=0.0,
                stream=True, extra_body={"ignore_eos": True},
            )  # fmt: skip
            async for chunk in chunks:
                now = time.monotonic()
                if last:
                    stream.gap_s = max(stream.gap_s, now - last)
                last = now
                stream.text += chunk.choices[0].text if chunk.choices else ""
        except openai.OpenAIError as error:
            stream.failed = f"{type(error).__name__}: {error}"

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


class Noticed:
    """What clients noticed of one phase."""

    def __init__(self, clients: list[Client]) -> None:
        streams = [(c, prompt, s) for c in clients for prompt, s in c.streams]
        self.count = len(streams)
        self.failed = [s.failed for _, _, s in streams if s.failed]
        self.altered = sum(
            not s.failed and s.text != client.reference.get(prompt, s.text)
            for client, prompt, s in streams
        )
        self.gaps_s = [s.gap_s for _, _, s in streams if not s.failed]

    @property
    def longest_s(self) -> float:
        return max(self.gaps_s, default=0.0)

    def line(self, phase: str) -> str:
        p99 = percentile(self.gaps_s, 0.99) if self.gaps_s else 0.0
        return (
            f"{phase}: {self.count} streams, {len(self.failed)} failed, {self.altered} altered, longest gap "
            f"{1000 * self.longest_s:.0f} ms, of 99 % of the streams below {1000 * p99:.0f} ms"
        )


async def measure(model: str, clients: int, tokens: int, rounds: int) -> dict[str, Noticed]:
    """Undisturbed streams, those during the restart of the workers, and of the replicas."""
    with tempfile.TemporaryDirectory() as folder:
        options = FleetOptions(
            workers=3, replicas=2, state_dir=folder, port=0, admin_port=0, model=model,
            checkpoint_mb=64, replica_args=("--drain-announce-s", str(ANNOUNCE_S)),
        )  # fmt: skip
        async with LocalFleet(options) as fleet:
            load = [Client(number, fleet.gateways, tokens) for number in range(clients)]
            try:
                return await _phases(fleet, load, rounds)
            finally:
                for client in load:
                    await client.close()


async def _phases(fleet: LocalFleet, load: list[Client], rounds: int) -> dict[str, Noticed]:
    await asyncio.gather(*(client.run(1) for client in load))  # engines warm up
    for client in load:
        client.reference = {prompt: s.text for prompt, s in client.streams if not s.failed}
        client.streams = []
    await asyncio.gather(*(client.run(rounds) for client in load))
    found = {"undisturbed": _noticed(load, "undisturbed")}
    for phase, act in (("workers", _workers), ("replicas", _replicas)):
        running = [asyncio.create_task(client.run()) for client in load]
        await asyncio.sleep(2.0)
        await act(fleet)
        await asyncio.sleep(2.0)
        await _finish(load, running)
        found[phase] = _noticed(load, phase)
    return found


async def _finish(load: list[Client], running: list[asyncio.Task[None]]) -> None:
    """The streams that run are not of the phase: they are cut off."""
    for task in running:
        task.cancel()
    ended = await asyncio.gather(*running, return_exceptions=True)
    for client, end in zip(load, ended, strict=True):
        if isinstance(end, Exception):
            raise end
        client.streams.pop()


def _noticed(load: list[Client], phase: str) -> Noticed:
    found = Noticed(load)
    for client in load:
        client.streams = []
    print(found.line(phase), flush=True)
    for why in found.failed[:5]:
        print(f"  {why}", flush=True)
    return found


async def _workers(fleet: LocalFleet) -> None:
    headers = {"authorization": f"Bearer {fleet.admin_token}"}
    url = f"{fleet.admins[0]}/admin/v1/rollout"
    async with aiohttp.ClientSession(headers=headers) as session, asyncio.timeout(ROLLOUT_S):
        async with session.post(url, json={"model": "tiny"}) as answer:
            answer.raise_for_status()
        shown, found = "", {"active": True}
        while found["active"]:
            async with session.get(url) as answer:
                found = await answer.json()
            now = f"{found['stage']} {', '.join(found['workers'])} {found['paused']}".strip()
            if now != shown:
                shown = now
                print(f"  {now}", flush=True)
            await asyncio.sleep(POLL_S)


async def _replicas(fleet: LocalFleet) -> None:
    for name in ("r0", "r1"):
        process = fleet.children[name].process
        process.send_signal(signal.SIGTERM)
        status = await asyncio.to_thread(process.wait, LEAVE_S)
        print(f"  {name} left with status {status}", flush=True)
        fleet.restart(name)
        await _answers(f"{fleet.gateways[int(name[1:])]}/ready")


async def _answers(url: str) -> None:
    async with aiohttp.ClientSession() as session, asyncio.timeout(LEAVE_S):
        while True:
            try:
                async with session.get(url) as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(POLL_S)


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(prog="relume-chaos bench rollout", description=DESCRIPTION)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=400, help="of each answer")
    parser.add_argument("--rounds", type=int, default=4, help="undisturbed, of all prompts")
    parser.add_argument("--model", default=".relume/models/tiny")
    args = parser.parse_args(argv)
    model = str(Path(args.model).absolute())
    found = asyncio.run(measure(model, args.clients, args.tokens, args.rounds))
    calm = found["undisturbed"]
    figures: dict[str, Any] = {
        "undisturbed_streams": figure(calm.count, "streams", digits=0),
        "undisturbed_longest_gap": figure(1000 * calm.longest_s, "ms", digits=1),
    }
    met = not calm.failed and not calm.altered and calm.longest_s > 0
    for phase in ("workers", "replicas"):
        noticed = found[phase]
        ratio = noticed.longest_s / max(calm.longest_s, 1e-9)
        figures |= {
            f"{phase}_streams": figure(noticed.count, "streams", digits=0),
            f"{phase}_failed": figure(len(noticed.failed), "streams", 0, digits=0),
            f"{phase}_altered": figure(noticed.altered, "streams", 0, digits=0),
            f"{phase}_longest_gap": figure(1000 * noticed.longest_s, "ms", digits=1),
            f"{phase}_gap_ratio": figure(ratio, "times", TIMES, digits=2),
        }
        met &= noticed.count > 0 and not noticed.failed and not noticed.altered and ratio <= TIMES
    return {"bench": "rollout", "met": met, "figures": figures}
