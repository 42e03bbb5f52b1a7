"""Running requests leave an engine that lives: clients see nothing of it, blocks go along, and
what fails on the way is a failover like any other."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from itertools import pairwise
from typing import Any

import pytest

from relume.chaos.traffic import Stream
from relume.controlplane.local.local_fleet import FleetOptions
from relume.events import vocabulary as v
from relume.policies.state.fleet import Fleet
from tests.live.checkpoints.test_checkpoints import (
    COUNT,
    TOKENS,
    Victim,
    of,
    padding,
    until_daemons,
    with_checkpoints,
)
from tests.live.conftest import EVENLY, HANG_S, Scene, same, scene_of, whole
from tests.signals import let_work, stop

COOL_TICKS = 3


@pytest.mark.usefixtures("patient")
async def test_requests_leave_a_living_engine(options: FleetOptions) -> None:
    async with scene_of(with_checkpoints(options, replica_args=EVENLY)) as scene:
        await until_daemons(scene)
        await _drained(scene)
        await _target_killed(scene)
        await until_daemons(scene)
        await _crowded(scene)
        verdict = await scene.sound()
        assert verdict.migrations >= 3


async def struck(
    scene: Scene, tag: str, act: Callable[[dict[str, Stream]], Awaitable[None]]
) -> list[Any]:
    """Streams that `act` befalls, and the same undisturbed; the events in between."""
    before = len(await scene.events())
    hit = await scene.streams(COUNT, TOKENS, tag, act, padding=padding(tag), ignore_eos=True)
    assert not whole(hit)
    happened = (await scene.events())[before:]
    for worker in ("w0", "w1", "w2"):
        await scene.drain(worker, "undrain")
        await scene.until_ready(worker)
    calm = await scene.streams(COUNT, TOKENS, f"calm-{tag}", padding=padding(tag), ignore_eos=True)
    assert not whole(calm)
    assert same(calm, hit) == []
    return happened


async def sliced(victim: Victim, over: Callable[[Fleet], bool], pause_s: float) -> Fleet:
    """Let an engine run a moment at a time until the log shows it; the engine is left stopped.
    It runs no more often than the log is read: where a busy machine is late with the log, the
    engine does not come far meanwhile."""
    deadline = time.monotonic() + HANG_S
    while not over(fleet := await victim.scene.fold()):
        told = [
            (w.name, w.engine, w.batch, w.decode_us, w.moved_tick, w.recent[-4:])
            for w in fleet.workers.values()
        ]
        assert time.monotonic() < deadline, told
        ended = [s.request for s in victim.streams if s.done or s.error]
        assert not ended, f"{ended} ended before: {told}, tick {fleet.tick}"
        await asyncio.to_thread(let_work, victim.pid)
        await asyncio.sleep(pause_s)
    return fleet


def left(requests: list[str]) -> Callable[[Fleet], bool]:
    """Whether all of these have had a second dispatch."""
    return lambda fleet: all(
        r not in fleet.requests or fleet.requests[r].attempt > 1 for r in requests
    )


def moved(happened: list[Any]) -> set[str]:
    return {e.request for e in of(happened, v.TransportObserved) if e.kind == "moved"}


def troubles(happened: list[Any]) -> list[Any]:
    """What may have kept requests from moving."""
    kinds = (v.TransportObserved, v.MigrationAbandoned, v.MigrationPlanned, v.StallJudged)
    return [e for e in happened if type(e) in kinds]


async def _drained(scene: Scene) -> None:
    """All that ran on w0 goes on elsewhere, from its blocks; w0 is empty while it lives on."""
    worker = await scene.until_ready("w0")
    requests: list[str] = []

    async def act(streams: dict[str, Stream]) -> None:
        victim = Victim(scene, worker)
        await victim.take(streams)
        requests.extend(victim.requests)
        await victim.run_until(victim.covered)
        drained = asyncio.create_task(scene.drain("w0"))
        await sliced(victim, left(victim.requests), 0.03)
        os.kill(victim.pid, signal.SIGCONT)
        await drained
        deadline = time.monotonic() + HANG_S
        while (now := await scene.worker("w0"))["state"] != "drained":
            assert time.monotonic() < deadline, now
            await asyncio.sleep(0.1)

    happened = await struck(scene, "drained", act)
    assert moved(happened) == set(requests), troubles(happened)
    assert {e.kind for e in of(happened, v.TransportObserved)} == {"moved"}, "no failure"
    assert not of(happened, v.WorkerSuspected) and not of(happened, v.EngineDied)
    plans = of(happened, v.MigrationPlanned)
    assert {(p.worker, p.cause) for p in plans} == {("w0", "drain")}
    routes = [e for e in of(happened, v.RouteDecided) if e.attempt > 1]
    assert {(e.cause, e.policy, e.mode) for e in routes} == {("moved", "planned", "continue")}
    assert {e.request for e in of(happened, v.RestoreDone)} == set(requests)


async def _target_killed(scene: Scene) -> None:
    """The worker a request was moved to hangs from before that on, and is killed."""
    worker = await scene.until_ready("w1")
    targets = {name: (await scene.until_ready(name))["engine_pid"] for name in ("w0", "w2")}
    struck_ones: set[str] = set()

    async def act(streams: dict[str, Stream]) -> None:
        victim = Victim(scene, worker)
        await victim.take(streams)
        await victim.run_until(victim.covered)
        for pid in targets.values():
            stop(pid)
        drained = asyncio.create_task(scene.drain("w1"))
        struck_ones.update(await _first_target(victim))
        for name, pid in targets.items():
            os.kill(pid, signal.SIGKILL if name in struck_ones else signal.SIGCONT)
        os.kill(victim.pid, signal.SIGCONT)
        await drained

    incarnations = {w["name"]: w["incarnation"] for w in await scene.fleet.workers()}
    happened = await struck(scene, "killed", act)
    (killed,) = struck_ones
    assert moved(happened), troubles(happened)
    again = [e for e in of(happened, v.RouteDecided) if e.attempt > 2]
    assert again and all((e.worker, e.incarnation) != (killed, incarnations[killed]) for e in again)
    await scene.until_ready(killed, incarnations[killed] + 1)


async def _first_target(victim: Victim) -> list[str]:
    """Where the first request moved to."""
    found: list[str] = []

    def dispatched(fleet: Fleet) -> bool:
        moves = [fleet.requests[r] for r in victim.requests if r in fleet.requests]
        found[:] = [r.places[-1][0] for r in moves if r.attempt > 1 and len(r.places) > 1]
        return bool(found)

    await sliced(victim, dispatched, 0.03)
    return found[:1]


async def _crowded(scene: Scene) -> None:
    """Everything is on w0, then all take requests again: some leave it, and nothing comes back.
    How many gain more than they cost is up to paces learnt from engines that were stopped."""
    for name, value in (("moves", "all"), ("gap", 3), ("ticks", 2), ("cool_ticks", COOL_TICKS)):
        asked = {"key": f"migration.{name}", "value": value}
        answer = await scene.fleet.admin("config", "PUT", body=asked)
        assert answer.get("state") == "decided", answer
    worker = await scene.until_ready("w0")
    for name in ("w1", "w2"):
        await scene.until_ready(name)
        await scene.drain(name)

    async def act(streams: dict[str, Stream]) -> None:
        victim = Victim(scene, worker)
        await victim.take(streams)
        assert len(victim.requests) == COUNT
        for name in ("w1", "w2"):
            await scene.drain(name, "undrain")
        await sliced(victim, _planned, 0.15)
        await sliced(victim, _carried_out, 0.03)
        os.kill(victim.pid, signal.SIGCONT)

    happened = await struck(scene, "crowded", act)
    plans = of(happened, v.MigrationPlanned)
    assert plans and {(p.worker, p.cause) for p in plans} == {("w0", "imbalance")}
    assert all(b.tick - a.tick >= COOL_TICKS for a, b in pairwise(plans)), plans
    goes = [{c.request for c in p.choices if c.chosen >= 0} for p in plans]
    assert all(1 <= len(g) <= COUNT // 2 for g in goes), troubles(happened)
    assert goes[0] <= moved(happened) <= set().union(*goes), troubles(happened)
    assert sum(map(len, goes)) == len(set().union(*goes)), "twice"
    assert all(c.go_us < c.stay_us for p in plans for c in p.choices if c.chosen >= 0)


def _leaving(fleet: Fleet) -> list[str]:
    return [r for r, planned in fleet.planned.items() if planned.source]


def _planned(fleet: Fleet) -> bool:
    return bool(_leaving(fleet))


def _carried_out(fleet: Fleet) -> bool:
    return left(_leaving(fleet))(fleet)
