"""A fleet of stock `vllm serve` with two ranks each: a rank is killed, a rank hangs, a worker is
drained, and streams continue from the blocks of both ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relume.chaos.traffic import Stream
from relume.controlplane.incidents.incident_fold import incidents_of
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import FailedPart, FailureClass
from tests.live.checkpoints.test_checkpoints import of, until_daemons
from tests.live.conftest import EVENLY, Scene, same, scene_of, small_fleet, whole
from tests.processes import cpu_time, ranks, starved
from tests.signals import stop
from tests.suite.outcomes import inconclusive

pytestmark = [pytest.mark.full, pytest.mark.timeout(900)]
STREAMS, TOKENS, CUT = 4, 96, 40
TWO = ("--tensor-parallel-size", "2")


async def test_ranks_die_and_hang_and_workers_are_drained(tmp_path: Path) -> None:
    """Full: two ranks share a core with two others, and take minutes."""
    options = small_fleet(
        tmp_path, host_kind="serve", ready_timeout_s=300.0, checkpoint_mb=64, replica_args=EVENLY
    )
    options = msgspec.structs.replace(options, engine_args=(*options.engine_args, *TWO))
    async with scene_of(options) as scene:
        await until_daemons(scene, 2)
        calm = await scene.streams(STREAMS, TOKENS, "calm", ignore_eos=True)
        assert not whole(calm)
        await _drained(scene, calm)
        await _hung(scene, calm)
        await _killed(scene, calm)
        verdict = await scene.sound()
        assert verdict.holders
        incidents = [r for r in incidents_of(await scene.log()) if r.part == FailedPart.WORKER]
        assert [r.failure for r in incidents] == [FailureClass.HANG, FailureClass.CRASH]


async def _struck(
    scene: Scene, calm: dict[str, Stream], tag: str, strike: Callable[[int], Awaitable[None]]
) -> tuple[list[Any], int]:
    """The events while `strike` befalls w0, once its streams have CUT tokens; number of its streams."""
    worker = await scene.until_idle("w0")
    before = len(await scene.events())
    moved: list[str] = []

    async def begin(streams: dict[str, Stream]) -> None:
        places = await scene.until_routed(streams)
        moved.extend(name for name in streams if places[name][-1].worker == "w0")
        if not moved:
            inconclusive("no stream was routed to w0")
        await scene.ripe({name: streams[name] for name in moved}, CUT)
        await strike(worker["engine_pid"])

    hit = await scene.streams(STREAMS, TOKENS, tag, begin, ignore_eos=True)
    assert not whole(hit)
    assert same(calm, hit) == []
    gap_s = max(s.longest_gap_s for s in hit.values())
    print(f"{tag}: {len(moved)} streams of w0, longest gap {gap_s:.2f} s")
    return (await scene.events())[before:], len(moved)


def _restored(happened: list[Any], streams: int) -> None:
    """Both ranks of the other worker read their blocks of each stream that moved."""
    again = {e.request for e in of(happened, v.RouteDecided) if e.attempt == 2}
    assert len(again) == streams
    done = [e for e in of(happened, v.RestoreDone) if e.request in again]
    by_request = {name: [e for e in done if e.request == name] for name in again}
    assert all(len(parts) == 2 for parts in by_request.values()), by_request
    for first, second in by_request.values():
        assert (first.tokens, first.bytes) == (second.tokens, second.bytes) and first.bytes


async def _drained(scene: Scene, calm: dict[str, Stream]) -> None:
    async def strike(pid: int) -> None:
        await scene.drain("w0")

    happened, streams = await _struck(scene, calm, "drained", strike)
    assert of(happened, v.MigrationPlanned)
    _restored(happened, streams)
    await scene.drain("w0", "undrain")


async def _hung(scene: Scene, calm: dict[str, Stream]) -> None:
    """One rank is stopped: the other waits for it, and the scheduler for both."""
    other = ranks((await scene.worker("w1"))["engine_pid"]).values()
    since, stopped = cpu_time(other), 0

    async def strike(pid: int) -> None:
        nonlocal stopped
        stopped = ranks(pid)[1]
        stop(stopped)

    try:
        happened, streams = await _struck(scene, calm, "hung", strike)
    finally:
        if stopped:
            os.kill(stopped, signal.SIGCONT)
    hung = {e.worker for e in happened if type(e) is v.EngineHung}
    hung |= {e.worker for e in of(happened, v.StallJudged) if e.hung}
    if "w1" in hung and starved(since, cpu_time(other)):
        inconclusive("w1 got no processor and was judged hung too")
    assert hung == {"w0"}
    _restored(happened, streams)
    await scene.until_serving("w0")


async def _killed(scene: Scene, calm: dict[str, Stream]) -> None:
    async def strike(pid: int) -> None:
        os.kill(ranks(pid)[1], signal.SIGKILL)

    worker = await scene.worker("w0")
    happened, streams = await _struck(scene, calm, "killed", strike)
    (died,) = of(happened, v.EngineDied)
    assert died.worker == "w0" and "worker" in died.detail
    _restored(happened, streams)
    await scene.until_ready("w0", worker["incarnation"] + 1)
