"""A fleet with checkpoints loses engines: streams go on from their blocks where that is
faster, and are token for token what they would have been, whatever happens to the blocks."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import msgspec

from chaos.traffic import Stream
from controlplane.leftovers import daemons
from controlplane.local_fleet import FleetOptions
from events import vocabulary as v
from policies.coverage import covered_tokens
from policies.fleet import apply_group
from policies.state import Fleet
from tests.live.conftest import Scene, let_run, same, scene_of, whole

TOKENS = 400
COUNT = 6


def padding(tag: str) -> str:
    """Some 600 tokens of its own for each run: no prefix cache of an earlier one helps."""
    return f" {tag} " + " ".join(f"{tag}{n} and" for n in range(110))


def with_checkpoints(options: FleetOptions, **more: Any) -> FleetOptions:
    return msgspec.structs.replace(options, workers=3, checkpoint_mb=64, **more)


async def fold(scene: Scene) -> Fleet:
    fleet = Fleet()
    for group in await scene.log():
        apply_group(fleet, group)
    return fleet


async def until_daemons(scene: Scene, count: int = 3) -> Fleet:
    deadline = time.monotonic() + 30
    while True:
        fleet = await fold(scene)
        if sum(h.alive and bool(h.family) for h in fleet.holders.values()) >= count:
            return fleet
        assert time.monotonic() < deadline, fleet.holders
        await asyncio.sleep(0.1)


async def covered_on(scene: Scene, streams: dict[str, Stream], victim: dict[str, Any]) -> set[str]:
    """Lets the engine of `victim` run a moment at a time until holders acknowledged a part of
    the output of every stream on it; it is left stopped. Their holders are returned."""
    pid = victim["engine_pid"]
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 60
    while not all((places := await scene.routes(streams)).values()):
        assert time.monotonic() < deadline, places
        await asyncio.sleep(0.02)
    held = [made[-1].request for made in places.values() if made[-1].worker == victim["name"]]
    mine = [s for n, s in streams.items() if places[n][-1].worker == victim["name"]]
    assert len(held) >= 2, places
    while True:
        fleet = await fold(scene)
        holders = {h for r in held if r in fleet.placed for h in fleet.placed[r].holders}
        least = [max((covered_tokens(fleet, h, r) for h in holders), default=0) for r in held]
        if min(least) >= 640 and min(len(s.tokens) for s in mine) >= 8:
            return holders
        assert time.monotonic() < deadline, (least, [len(s.tokens) for s in mine])
        assert not any(s.done for s in mine), f"a stream ended, covered are {least}"
        await asyncio.to_thread(let_run, pid, 0.02)
        await asyncio.sleep(0.02)


async def hit(scene: Scene, tag: str, name: str, strike: Any = None) -> list[Any]:
    """Streams of which those on worker `name` lose their engine when they are covered, and
    `strike` befalls what holds them; the same without it; the events in between."""
    victim = await scene.until_ready(name)
    before = len(await scene.events())

    async def kill(streams: dict[str, Stream]) -> None:
        holders = await covered_on(scene, streams, victim)
        assert name not in holders
        if strike is not None:
            await strike(holders)
        os.kill(victim["engine_pid"], signal.SIGKILL)

    struck = await scene.streams(COUNT, TOKENS, tag, kill, padding=padding(tag), ignore_eos=True)
    assert not whole(struck)
    happened = (await scene.events())[before:]
    await scene.until_ready(name, victim["incarnation"] + 1)
    calm = await scene.streams(COUNT, TOKENS, f"calm-{tag}", padding=padding(tag), ignore_eos=True)
    assert not whole(calm)
    assert same(calm, struck) == []
    return happened


def of(happened: list[Any], kind: type) -> list[Any]:
    return [e for e in happened if type(e) is kind]


async def test_killed_engines_and_what_befalls_their_checkpoints(options: FleetOptions) -> None:
    async with scene_of(with_checkpoints(options)) as scene:
        await until_daemons(scene)
        await _restored(scene)
        await _holders_killed_with_it(scene)
        await until_daemons(scene)
        await _damaged(scene)
        verdict = await scene.sound()
        assert verdict.holders > 3 * COUNT and verdict.plans >= 2


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

    async def strike(holders: set[str]) -> None:
        for pid in daemons(scene.fleet.dir / "run"):
            os.kill(pid, signal.SIGKILL)

    happened = await hit(scene, "together", "w1", strike)
    assert not of(happened, v.RestoreDone)


async def _damaged(scene: Scene) -> None:
    """A bit of every block that is held: none of them is used (I14)."""

    async def strike(holders: set[str]) -> None:
        for pid in daemons(scene.fleet.dir / "run"):
            damage(pid)

    happened = await hit(scene, "damaged", "w2", strike)
    failed = of(happened, v.RestoreFailed)
    assert failed and {e.tokens for e in failed} == {0}
    assert all("corrupt" in e.reason for e in failed), failed
    assert not of(happened, v.RestoreDone)


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
