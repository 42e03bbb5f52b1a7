"""`make demo` without options: kill a worker under load, and see that no client notices.

The demo starts a fleet of real vLLM workers and runs the same streams twice. In the middle of the
second run it kills one worker's engine with SIGKILL. Then it compares the runs, prints a table, and
repeats every decision of the log. The last line is one JSON object; exit 1 if anything failed.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import aiohttp
from msgspec import Struct
from rich.console import Console
from rich.table import Table

from relume.chaos.page_picture import take_picture
from relume.chaos.traffic import Stream, complete, prompts
from relume.controlplane.local.local_fleet import FleetFailed, FleetOptions, LocalFleet
from relume.controlplane.replay.divergence import Verdict
from relume.controlplane.replay.verify import verify
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group

DELIVERED_BEFORE = 16
LACKING_AFTER = 64
ON_VICTIM = 8
PICTURE = "page.png"
"""In the state directory: the live page after the kill."""
console = Console(highlight=False)


class Result(Struct, kw_only=True):
    """The result, which the last line has."""

    streams: int
    broken: int
    moved: int
    identical: int
    distinct_tokens_min: int
    longest_gap_ms: int
    undisturbed_gap_ms: int
    served_while_down: int
    back_after_s: float
    replayed_decisions: int
    divergences: int


class Watch:
    """Follows the log and knows which worker holds which stream (by x-request-id)."""

    def __init__(self, reader: Any) -> None:
        self.fleet = Fleet()
        self.route: dict[str, list[str]] = {}
        self.ready_at: dict[tuple[str, int], float] = {}
        self.died_at: dict[tuple[str, int], float] = {}
        self._client_ids: dict[str, str] = {}
        self._reader = reader

    async def run(self) -> None:
        """Follow until the caller cancels."""
        async for group in self._reader.follow(0):
            apply_group(self.fleet, group, self._seen)

    def _seen(self, stream: str, position: int, event: Any) -> None:
        kind = type(event)
        if kind is v.RequestArrived:
            self._client_ids[event.request] = event.client_id
        elif kind is v.RouteDecided and event.worker:
            self.route.setdefault(self._client_ids[event.request], []).append(event.worker)
        elif kind is v.EngineReady:
            self.ready_at[event.worker, event.incarnation] = time.monotonic()
        elif kind is v.EngineDied:
            self.died_at[event.worker, event.incarnation] = time.monotonic()


async def run_all(
    url: str, tag: str, texts: list[str], max_tokens: int, streams: dict[str, Stream]
) -> None:
    """Run all prompts at once; `streams` fills as they go."""
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector) as session:
        async with asyncio.TaskGroup() as tasks:
            for index, text in enumerate(texts):
                stream = streams[f"{tag}-{index}"] = Stream(request=f"{tag}-{index}", prompt=text)
                tasks.create_task(complete(session, url, stream, max_tokens))


def find_victim(watch: Watch, streams: dict[str, Stream], max_tokens: int) -> str:
    """A worker with at least ON_VICTIM streams that are far enough from start and end."""
    held: dict[str, list[Stream]] = {}
    for stream in streams.values():
        places = watch.route.get(stream.request)
        if places:
            held.setdefault(places[-1], []).append(stream)
    for name, group in held.items():
        ripe = [
            s
            for s in group
            if len(s.tokens) >= DELIVERED_BEFORE and max_tokens - len(s.tokens) >= LACKING_AFTER
        ]
        if len(ripe) >= ON_VICTIM and len(ripe) == len(group):
            return name
    return ""


async def serve_meanwhile(
    url: str, text: str, watch: Watch, victim: str, incarnation: int, killed_at: float
) -> tuple[int, float]:
    """Send small requests until the victim is back: (requests served, seconds)."""
    served, number = 0, 0
    async with aiohttp.ClientSession() as session:
        while time.monotonic() - killed_at < 90:
            back = watch.ready_at.get((victim, incarnation + 1))
            if back is not None:
                return served, back - killed_at
            number += 1
            stream = Stream(request=f"while-down-{number}", prompt=text)
            await complete(session, url, stream, 8)
            if stream.whole and (victim, incarnation + 1) not in watch.ready_at:
                served += 1
            await asyncio.sleep(0.05)
    return served, -1.0


async def demo(options: FleetOptions, count: int, max_tokens: int) -> Result:
    """The whole demo; raises FleetFailed if a process does not come up."""
    say = console.print
    async with LocalFleet(options, say) as fleet:
        async with EtcdLog(EtcdConfig(endpoints=(fleet.etcd_endpoint,))) as etcd:
            watch = Watch(etcd.reader())
            following = asyncio.create_task(watch.run())
            try:
                result = await _act(fleet, watch, etcd, count, max_tokens)
            finally:
                following.cancel()
    return result


async def _act(
    fleet: LocalFleet, watch: Watch, etcd: EtcdLog, count: int, max_tokens: int
) -> Result:
    url, texts = fleet.gateways[0], prompts(count)
    fleet.say(f"while this runs, watch it in a browser: {fleet.page}")
    fleet.say(f"undisturbed run: {count} streams of {max_tokens} tokens")
    calm: dict[str, Stream] = {}
    await run_all(url, "warm", texts, 8, {})
    await run_all(url, "calm", texts, max_tokens, calm)

    fleet.say("the same again; one engine will be killed in the middle")
    hit: dict[str, Stream] = {}
    running = asyncio.create_task(run_all(url, "hit", texts, max_tokens, hit))
    victim = ""
    while not victim and not running.done():
        await asyncio.sleep(0.005)
        victim = find_victim(watch, hit, max_tokens)
    if not victim:
        raise FleetFailed(f"no worker had {ON_VICTIM} streams ripe for the kill; more --tokens?")
    worker = watch.fleet.workers[victim]
    pid, incarnation = worker.engine_pid, worker.incarnation
    killed_at = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    held = [s for s in hit.values() if watch.route.get(s.request, [""])[-1] == victim]
    hurt = sum(not s.done for s in held)
    fleet.say(f"kill -9 {pid}: the engine of {victim}, with {hurt} streams on it")
    served, back_after = await serve_meanwhile(url, texts[0], watch, victim, incarnation, killed_at)
    await running
    fleet.say(f"{victim} answers again after {back_after:.1f} s")
    await asyncio.sleep(1.0)
    picture = fleet.dir / PICTURE
    why_not = await take_picture(fleet.page, picture)
    fleet.say(f"no picture of the page: {why_not}" if why_not else f"the page shows it: {picture}")
    verdict = verify(await etcd.reader().read())
    return _judge(calm, hit, watch, served, back_after, verdict)


def _judge(
    calm: dict[str, Stream],
    hit: dict[str, Stream],
    watch: Watch,
    served: int,
    back_after: float,
    verdict: Verdict,
) -> Result:
    pairs = [(calm[f"calm-{i}"], hit[f"hit-{i}"]) for i in range(len(hit))]
    same = sum(
        a.tokens == b.tokens and a.text == b.text and a.finish == b.finish and a.usage == b.usage
        for a, b in pairs
    )
    moved = sum(len(watch.route.get(s.request, [])) > 1 for s in hit.values())
    for _, stream in pairs:
        if not stream.whole:
            console.print(f"broken: {stream.request} after {len(stream.tokens)}: {stream.error}")
    for found in verdict.divergences[:5]:
        console.print(f"divergence: {found}")
    result = Result(
        streams=len(hit),
        broken=sum(not s.whole for s in hit.values()),
        moved=moved,
        identical=same,
        distinct_tokens_min=min(len(set(s.tokens)) for s in hit.values()),
        longest_gap_ms=round(1000 * max(s.longest_gap_s for s in hit.values())),
        undisturbed_gap_ms=round(1000 * max(s.longest_gap_s for s in calm.values())),
        served_while_down=served,
        back_after_s=round(back_after, 2),
        replayed_decisions=verdict.decisions,
        divergences=len(verdict.divergences) + (verdict.contested == 0),
    )
    _table(result, verdict)
    return result


def _table(result: Result, verdict: Verdict) -> None:
    table = Table(title="One engine killed with SIGKILL while it was streaming", show_header=False)
    rows = [
        ("streams", str(result.streams)),
        ("broken", str(result.broken)),
        ("completed", str(result.streams - result.broken)),
        ("moved to another worker", str(result.moved)),
        ("identical to the undisturbed run", f"{result.identical} of {result.streams}"),
        ("distinct tokens in the poorest output", str(result.distinct_tokens_min)),
        ("longest gap a client saw", f"{result.longest_gap_ms} ms"),
        ("longest gap, undisturbed", f"{result.undisturbed_gap_ms} ms"),
        ("requests served while it was down", str(result.served_while_down)),
        ("the worker was back after", f"{result.back_after_s} s"),
        ("recorded decisions repeated in replay", str(result.replayed_decisions)),
        ("of them between two or more workers", str(verdict.contested)),
        ("divergences", str(result.divergences)),
    ]
    for row in rows:
        table.add_row(*row)
    console.print(table)


def passed(result: Result) -> bool:
    """Whether the demo met all its conditions."""
    return (
        result.streams >= ON_VICTIM
        and result.broken == 0
        and result.moved >= ON_VICTIM
        and result.identical == result.streams
        and result.distinct_tokens_min >= 30
        and result.served_while_down > 0
        and result.back_after_s > 0
        and result.replayed_decisions > 0
        and result.divergences == 0
    )
