"""A fleet with checkpoints loses engines: streams go on from their blocks where that is
faster, and are token for token what they would have been, whatever happens to the blocks."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import aiohttp
import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from relume.chaos.traffic import Stream
from relume.controlplane.local.local_fleet import FleetOptions
from relume.controlplane.local.orphans import daemons
from relume.events import vocabulary as v
from relume.policies.state.coverage import covered_tokens
from relume.policies.state.fleet import Fleet
from tests.live.conftest import EVENLY, HANG_S, Scene, same, scene_of, whole
from tests.signals import let_work, stop
from tests.suite.outcomes import inconclusive

TOKENS = 400
COUNT = 6


def padding(tag: str) -> str:
    """Some 600 tokens of its own for each run: no prefix cache of an earlier one helps."""
    return f" {tag} " + " ".join(f"{tag}{n} and" for n in range(110))


def with_checkpoints(options: FleetOptions, **more: Any) -> FleetOptions:
    return msgspec.structs.replace(options, workers=3, checkpoint_mb=64, **more)


async def until_daemons(scene: Scene, count: int = 3) -> Fleet:
    deadline = time.monotonic() + HANG_S
    while True:
        fleet = await scene.fold()
        if sum(h.alive and bool(h.family) for h in fleet.holders.values()) >= count:
            return fleet
        assert time.monotonic() < deadline, fleet.holders
        await asyncio.sleep(0.1)


class Victim:
    """The engine that is to die, run a moment at a time so that nothing ends too soon, and
    the streams on it."""

    def __init__(self, scene: Scene, worker: dict[str, Any]) -> None:
        self.scene = scene
        self.name = worker["name"]
        self.pid = worker["engine_pid"]
        self.streams: list[Stream] = []
        self.requests: list[str] = []
        self._ran_at = time.monotonic()

    async def take(self, streams: dict[str, Stream]) -> None:
        """Stop it, and wait until all streams have a worker. It takes them in meanwhile, and its agent
        sees that its loop takes turns: else it would be judged hung."""
        await asyncio.to_thread(stop, self.pid)
        deadline = time.monotonic() + HANG_S
        while not all((places := await self.scene.routes(streams)).values()):
            assert time.monotonic() < deadline, places
            await self._moment(0.4, work_s=0.1)
            await asyncio.sleep(0.02)
        for name, made in places.items():
            if made[-1].worker == self.name:
                self.streams.append(streams[name])
                self.requests.append(made[-1].request)
        if len(self.requests) < 2:
            inconclusive(f"{len(self.requests)} streams were routed to {self.name}")

    def holders(self, fleet: Fleet) -> set[str]:
        return {h for r in self.requests if r in fleet.placed for h in fleet.placed[r].holders}

    async def run_until(self, found: Callable[[Fleet], bool]) -> Fleet:
        """Let it run until the log shows it; it is left stopped. The log may be far behind on
        a busy machine, so half way through the streams it hardly runs on."""
        deadline = time.monotonic() + HANG_S
        while True:
            fleet = await self.scene.fold()
            there = {r: fleet.requests[r].worker for r in self.requests if r in fleet.requests}
            if left := [r for r, worker in there.items() if worker != self.name]:
                inconclusive(f"{left} went elsewhere before anything befell {self.name}")
            if found(fleet):
                return fleet
            placed = [fleet.placed.get(r) for r in self.requests]
            assert time.monotonic() < deadline, (placed, fleet.holders)
            if any(s.done for s in self.streams):
                inconclusive("a stream ended before its blocks were held")
            far = max((len(s.tokens) for s in self.streams), default=0) >= TOKENS // 2
            await self._moment(0.7 if far else 0.0)
            await asyncio.sleep(0.05)

    async def _moment(self, since_s: float, work_s: float = 0.04) -> None:
        """Let it work for a moment if it has not for so long: who is silent for long is hung."""
        if time.monotonic() - self._ran_at >= since_s:
            await asyncio.to_thread(let_work, self.pid, work_s)
            self._ran_at = time.monotonic()

    async def until_moved(self, lost: set[str]) -> None:
        """Wait, the engine all but stopped, until none of these is to hold anything of it."""
        deadline = time.monotonic() + HANG_S
        while lost & self.holders(fleet := await self.scene.fold()):
            assert time.monotonic() < deadline, fleet.holders
            await self._moment(0.7)
            await asyncio.sleep(0.05)

    def covered(self, fleet: Fleet) -> bool:
        """Whether each stream's present holder has ten blocks and its client some output."""
        return min(len(s.tokens) for s in self.streams) >= 8 and all(
            r in fleet.placed
            and any(covered_tokens(fleet, h, r) >= 320 for h in fleet.placed[r].holders)
            for r in self.requests
        )


async def hit(
    scene: Scene,
    tag: str,
    name: str,
    strike: Any = None,
    found: Callable[[Victim], Callable[[Fleet], bool]] = lambda victim: victim.covered,
) -> list[Any]:
    """Streams of which those on worker `name` lose their engine when they are covered (or
    `found` is), and `strike` befalls what holds them; the same without it; the events in
    between."""
    worker = await scene.until_ready(name)
    before = len(await scene.events())

    async def kill(streams: dict[str, Stream]) -> None:
        victim = Victim(scene, worker)
        await victim.take(streams)
        fleet = await victim.run_until(found(victim))
        assert name not in victim.holders(fleet)
        if strike is not None:
            await strike(victim)
        os.kill(victim.pid, signal.SIGKILL)

    struck = await scene.streams(COUNT, TOKENS, tag, kill, padding=padding(tag), ignore_eos=True)
    assert not whole(struck)
    happened = (await scene.events())[before:]
    await scene.until_ready(name, worker["incarnation"] + 1)
    calm = await scene.streams(COUNT, TOKENS, f"calm-{tag}", padding=padding(tag), ignore_eos=True)
    assert not whole(calm)
    assert same(calm, struck) == []
    return happened


def of(happened: list[Any], kind: type) -> list[Any]:
    return [e for e in happened if type(e) is kind]


@pytest.mark.usefixtures("patient")
async def test_killed_engines_and_what_befalls_their_checkpoints(options: FleetOptions) -> None:
    async with scene_of(with_checkpoints(options, replica_args=EVENLY)) as scene:
        await until_daemons(scene)
        await _restored(scene)
        await _holders_killed_with_it(scene)
        await until_daemons(scene)
        await _holder_lost_before(scene)
        await until_daemons(scene)
        await _damaged(scene)
        verdict = await scene.sound()
        assert verdict.holders > 3 * COUNT and verdict.plans >= 2
        await _metrics_say_so(scene)


async def _restored(scene: Scene) -> None:
    happened = await hit(scene, "restored", "w0")
    plans = of(happened, v.RecoveryPlanned)
    chosen = [c.options[c.chosen] for p in plans for c in p.choices]
    assert "restore" in {o.kind for o in chosen}, plans
    done = of(happened, v.RestoreDone)
    assert done and min(e.tokens for e in done) >= 320, done
    moved = [e for e in of(happened, v.RouteDecided) if e.attempt == 2]
    assert {e.policy for e in moved} == {"planned"}
    again = [e for e in of(happened, v.HolderChosen) if e.attempt == 2]
    assert len(again) == len(moved), "a new holder at once"
    assert all(e.holders and e.primary not in e.holders for e in again)


async def _holders_killed_with_it(scene: Scene) -> None:
    """Whoever holds anything is gone in the same moment: all is computed again."""

    async def strike(victim: Victim) -> None:
        for pid in daemons(scene.fleet.dir / "run"):
            os.kill(pid, signal.SIGKILL)

    happened = await hit(scene, "together", "w1", strike)
    assert not of(happened, v.RestoreDone)


async def _holder_lost_before(scene: Scene) -> None:
    """A holder dies while all is well: another one is chosen, told to the running engine, and
    has everything from the first block on when the engine dies too."""
    lost: set[str] = set()

    async def strike(victim: Victim) -> None:
        fleet = await scene.fold()
        lost.add(min(victim.holders(fleet)))
        os.kill(daemon_of(scene, min(lost)), signal.SIGKILL)
        await victim.until_moved(lost)
        await victim.run_until(lambda f: not lost & victim.holders(f) and victim.covered(f))

    happened = await hit(scene, "another", "w0", strike)
    again = [e for e in of(happened, v.HolderChosen) if e.cause == "holder_lost"]
    assert again and all(e.holders and not lost & {*e.holders} for e in again)
    restored = {e.request for e in of(happened, v.RestoreDone)}
    assert restored & {e.request for e in again}


async def _metrics_say_so(scene: Scene) -> None:
    """Restores as the log has them; what daemons count themselves comes with their reports."""
    events = await scene.events()
    done, failed = of(events, v.RestoreDone), of(events, v.RestoreFailed)
    counted = ("received_bytes", "served_blocks", "corrupt_blocks", "dropped_requests")
    deadline = time.monotonic() + HANG_S
    while True:
        found = await metrics(scene)
        if all(found[f"relume_checkpoint_{name}_total"] for name in counted):
            break
        assert time.monotonic() < deadline, found
        await asyncio.sleep(0.5)
    assert found["relume_checkpoint_restores_total"] == len(done) + len(failed) > 0
    tokens = sum(e.tokens for e in (*done, *failed))
    assert found["relume_checkpoint_restored_tokens_total"] == tokens
    assert found["relume_recomputed_tokens_total"] > 0
    assert found["relume_checkpoint_lag_tokens"] == 0, "nothing runs"
    assert found["relume_checkpoint_coverage_ratio"] == 1
    assert found["relume_checkpoint_balance_ratio"] >= 1


async def metrics(scene: Scene) -> Counter[str]:
    """The page's samples, summed over labels."""
    url = f"{scene.url}/metrics"
    async with aiohttp.ClientSession() as session, session.get(url) as answer:
        assert answer.status == 200
        text = await answer.text()
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value  # type: ignore[assignment]
    return found


def daemon_of(scene: Scene, worker: str) -> int:
    """The pid of a worker's state daemon."""
    record = scene.fleet.dir / "run" / worker / "state.json"
    return json.loads(record.read_bytes())["daemon"]["process"][0]


async def _damaged(scene: Scene) -> None:
    """A bit of every block that is held: none of them is used (I14). All is to be restored,
    however dear a restore was before."""
    await configure(scene, "checkpoints.recovery", "eq6")
    await configure(scene, "checkpoints.tau", "0")

    async def strike(victim: Victim) -> None:
        for pid in daemons(scene.fleet.dir / "run"):
            damage(pid)

    happened = await hit(scene, "damaged", "w2", strike)
    begun = {(e.request, e.attempt) for e in of(happened, v.RestoreStarted)}
    failed = [e for e in of(happened, v.RestoreFailed) if (e.request, e.attempt) in begun]
    assert failed and {e.tokens for e in failed} == {0}
    assert all("corrupt" in e.reason for e in failed), failed
    assert not of(happened, v.RestoreDone)


async def configure(scene: Scene, key: str, value: str) -> None:
    """A setting of the fleet, from now on."""
    headers = {"Authorization": f"Bearer {scene.fleet.admin_token}"}
    url = f"{scene.fleet.admins[0]}/admin/v1/config"
    body = {"key": key, "value": value}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.put(url, json=body) as answer:
            assert answer.status in (200, 202), await answer.text()
    deadline = time.monotonic() + HANG_S
    while (await scene.fold()).config.get(key) != value:
        assert time.monotonic() < deadline, key
        await asyncio.sleep(0.05)


def damage(pid: int) -> None:
    """Flips a bit in each page of a daemon's memory of blocks."""
    for fd in os.listdir(f"/proc/{pid}/fd"):
        link = f"/proc/{pid}/fd/{fd}"
        if "relume-checkpoints" not in os.readlink(link):
            continue
        file = os.open(link, os.O_RDWR)
        for at in range(100, os.fstat(file).st_size, 4096):
            if (old := os.pread(file, 1, at)) and os.pread(file, 4096, at - 100).strip(b"\0"):
                os.pwrite(file, bytes([old[0] ^ 64]), at)
        os.close(file)
        return
    raise AssertionError("no arena")
