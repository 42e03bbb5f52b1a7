"""A whole fleet on a network that repeats and reorders messages, damages what is restored, and
loses a host whose state daemon lives on: streams stay what they are, and the log is sound."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from contextlib import ExitStack

import msgspec
import pytest

from relume.controlplane.local.local_fleet import FleetOptions
from relume.events import vocabulary as v
from tests.live.checkpoints.test_checkpoints import (
    Victim,
    configure,
    hit,
    of,
    until_daemons,
    with_checkpoints,
)
from tests.live.conftest import HANG_S, Scene, scene_of
from tests.signals import stop
from tests.state_daemon.faulty import Shuffler, TcpProxy
from tests.suite.outcomes import inconclusive


@pytest.mark.usefixtures("patient")
@pytest.mark.timeout(300)
async def test_streams_on_a_network_that_repeats_reorders_damages_and_loses(
    options: FleetOptions,
) -> None:
    more = with_checkpoints(options, checkpoint_link="plain")
    with ExitStack() as stack:
        proxies = [stack.enter_context(TcpProxy()) for _ in range(more.workers)]
        shufflers = [stack.enter_context(Shuffler(proxy.port)) for proxy in proxies]
        advertise = tuple(f"127.0.0.1:{s.port}" for s in shufflers)
        more = msgspec.structs.replace(more, checkpoint_advertise=advertise)
        async with scene_of(more) as scene:
            assert scene.fleet.checkpoints is not None
            for proxy, port in zip(proxies, scene.fleet.checkpoints.ports, strict=True):
                proxy.target = port
            await until_daemons(scene)
            # All is to be restored, however dear that was on a busy machine before.
            await configure(scene, "checkpoints.recovery", "eq6")
            await configure(scene, "checkpoints.tau", "0")
            await _repeated_and_reordered(scene, shufflers)
            await _damaged_on_the_way(scene, proxies)
            await _host_lost_and_its_daemon_alive(scene)
            verdict = await scene.sound()
            assert verdict.plans >= 2


async def _repeated_and_reordered(scene: Scene, shufflers: list[Shuffler]) -> None:
    happened = await hit(scene, "shuffled", "w0")
    if not (sum(s.repeated for s in shufflers) and sum(s.swapped for s in shufflers)):
        inconclusive("the network repeated or reordered nothing")
    done = of(happened, v.RestoreDone)
    assert done and min(e.tokens for e in done) >= 320, done


async def _damaged_on_the_way(scene: Scene, proxies: list[TcpProxy]) -> None:
    """A bit of each restore's first blocks: they are computed (I14)."""

    async def strike(victim: Victim) -> None:
        for proxy in proxies:
            proxy.flip["out"] = 1

    happened = await hit(scene, "damaged", "w1", strike)
    if all(proxy.flip["out"] for proxy in proxies):
        inconclusive("nothing was damaged: no block crossed the network after the fault")
    assert "corrupt" in {e.reason for e in of(happened, v.RestoreFailed)}, happened
    for proxy in proxies:
        proxy.flip["out"] = 0


async def _host_lost_and_its_daemon_alive(scene: Scene) -> None:
    """A worker whose agent stands still beyond its lease is lost, and its state daemon, which
    still answers, is not asked for anything until the worker is back under another epoch."""
    worker = await scene.worker("w1")
    before = await scene.fold()
    address, epoch = before.holders["w1"].address, before.workers["w1"].epoch

    async def strike(victim: Victim) -> None:
        await asyncio.to_thread(stop, worker["agent_pid"])
        deadline = time.monotonic() + HANG_S
        while (await scene.fold()).workers["w1"].present:
            assert time.monotonic() < deadline, "it is not missed"
            await asyncio.sleep(0.1)

    try:
        happened = await hit(scene, "stale", "w0", strike)
    finally:
        os.kill(worker["agent_pid"], signal.SIGCONT)
    lost_at = [type(e) for e in happened].index(v.WorkerLost)
    later = happened[lost_at:]
    assert address not in {e.holder for e in of(later, v.RestoreStarted)}
    assert not [e for e in of(later, v.HolderChosen) if "w1" in e.holders]
    deadline = time.monotonic() + HANG_S
    while not (found := await scene.fold()).holders["w1"].alive:
        assert time.monotonic() < deadline, found.holders
        await asyncio.sleep(0.2)
    assert found.workers["w1"].epoch > epoch
