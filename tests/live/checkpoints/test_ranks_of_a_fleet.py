"""A fleet of stock `vllm serve` with two ranks each: a rank is killed, a rank hangs, a worker is
drained, and streams continue from the blocks of both ranks."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relume.chaos.traffic import Stream
from relume.controlplane.incidents.incident_fold import incidents_of
from relume.controlplane.local.local_fleet import FleetOptions
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import FailedPart, FailureClass
from relume.policies.state.coverage import covered_tokens
from tests.live.checkpoints.test_checkpoints import of, until_daemons
from tests.live.conftest import EVENLY, HANG_S, Scene, same, scene_of, small_fleet, whole
from tests.processes import cpu_time, ranks, starved
from tests.signals import stop
from tests.suite.outcomes import inconclusive

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
STREAMS, TOKENS, CUT, BLOCK = 4, 400, 40, 32
TWO = ("--tensor-parallel-size", "2")


@pytest.mark.usefixtures("patient")
async def test_streams_leave_a_drained_worker_and_a_killed_rank(tmp_path: Path) -> None:
    """Full: two ranks share a core with two others, and take a minute to start."""
    async with scene_of(_two_ranks_each(tmp_path)) as scene:
        await until_daemons(scene, 2)
        await _drained(scene)
        await _killed(scene)
        assert (await scene.sound()).holders
        await _incident(scene, FailureClass.CRASH)


async def test_streams_leave_a_rank_that_hangs(tmp_path: Path) -> None:
    """Full: as above; and nothing else may be judged hung on a busy machine."""
    async with scene_of(_two_ranks_each(tmp_path)) as scene:
        await until_daemons(scene, 2)
        await _hung(scene)
        assert (await scene.sound()).holders
        await _incident(scene, FailureClass.HANG)


def _two_ranks_each(folder: Path) -> FleetOptions:
    options = small_fleet(
        folder, host_kind="serve", ready_timeout_s=300.0, checkpoint_mb=64, replica_args=EVENLY
    )
    return msgspec.structs.replace(options, engine_args=(*options.engine_args, *TWO))


async def _incident(scene: Scene, failure: FailureClass) -> None:
    """It is the one of a worker."""
    incidents = [r for r in incidents_of(await scene.log()) if r.part == FailedPart.WORKER]
    assert [(r.name, r.failure) for r in incidents] == [("w0", failure)]


async def _struck(
    scene: Scene, tag: str, strike: Callable[[int], Awaitable[None]]
) -> tuple[list[Any], set[str]]:
    """The events while `strike` befalls w0, once its streams have CUT tokens and are covered; the
    requests of these streams."""
    worker = await scene.until_idle("w0")
    before = len(await scene.events())
    requests: set[str] = set()

    async def begin(streams: dict[str, Stream]) -> None:
        places = await scene.until_routed(streams)
        moved = {name: places[name][-1] for name in streams if places[name][-1].worker == "w0"}
        if not moved:
            inconclusive("no stream was routed to w0")
        requests.update(decision.request for decision in moved.values())
        await scene.ripe({name: streams[name] for name in moved}, CUT)
        await _covered(scene, requests)
        await strike(worker["engine_pid"])

    # Other prompts each time: what the other worker's prefix cache has is not restored.
    hit = await scene.streams(STREAMS, TOKENS, tag, begin, padding=f" {tag}", ignore_eos=True)
    happened = (await scene.events())[before:]
    assert not whole(hit)
    calm = await scene.streams(STREAMS, TOKENS, f"calm-{tag}", padding=f" {tag}", ignore_eos=True)
    assert not whole(calm)
    assert same(calm, hit) == []
    gap_s = max(s.longest_gap_s for s in hit.values())
    print(f"{tag}: {len(requests)} streams of w0, longest gap {gap_s:.2f} s")
    return happened, requests


async def _covered(scene: Scene, requests: set[str]) -> None:
    """Wait until holders have a block of each, of both ranks."""
    deadline = time.monotonic() + HANG_S
    while True:
        fleet = await scene.fold()
        held = {
            r: max((covered_tokens(fleet, h, r) for h in fleet.placed[r].holders), default=0)
            for r in requests & fleet.placed.keys()
        }
        if held.keys() == requests and min(held.values()) >= BLOCK:
            return
        assert time.monotonic() < deadline, held
        await asyncio.sleep(0.05)


def _restored(happened: list[Any], requests: set[str]) -> None:
    """Both ranks of the other worker read their blocks of each stream that moved."""
    done = [e for e in of(happened, v.RestoreDone) if e.request in requests and e.attempt == 2]
    by_request = {name: [e for e in done if e.request == name] for name in requests}
    plans = [c for e in of(happened, v.RecoveryPlanned) for c in e.choices]
    assert all(len(parts) == 2 for parts in by_request.values()), (by_request, plans)
    for first, second in by_request.values():
        assert (first.tokens, first.bytes) == (second.tokens, second.bytes) and first.bytes


async def _drained(scene: Scene) -> None:
    async def strike(pid: int) -> None:
        await scene.drain("w0")

    happened, requests = await _struck(scene, "drained", strike)
    assert of(happened, v.MigrationPlanned)
    _restored(happened, requests)
    await scene.drain("w0", "undrain")


async def _hung(scene: Scene) -> None:
    """One rank is stopped: the other waits for it, and the scheduler for both."""
    other = ranks((await scene.worker("w1"))["engine_pid"]).values()
    since, stopped = cpu_time(other), 0

    async def strike(pid: int) -> None:
        nonlocal stopped
        stopped = ranks(pid)[1]
        stop(stopped)

    try:
        happened, requests = await _struck(scene, "hung", strike)
    finally:
        if stopped:
            os.kill(stopped, signal.SIGCONT)
    hung = {e.worker for e in happened if type(e) is v.EngineHung}
    hung |= {e.worker for e in of(happened, v.StallJudged) if e.hung}
    if "w1" in hung and starved(since, cpu_time(other)):
        inconclusive("w1 got no processor and was judged hung too")
    assert hung == {"w0"}
    _restored(happened, requests)
    await scene.until_serving("w0")


async def _killed(scene: Scene) -> None:
    async def strike(pid: int) -> None:
        os.kill(ranks(pid)[1], signal.SIGKILL)

    worker = await scene.worker("w0")
    happened, requests = await _struck(scene, "killed", strike)
    (died,) = of(happened, v.EngineDied)
    assert died.worker == "w0" and "worker" in died.detail
    _restored(happened, requests)
    await scene.until_ready("w0", worker["incarnation"] + 1)
