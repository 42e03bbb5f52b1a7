"""Whole fleets whose engines reach holders over TCP, as between hosts: two holders of which
one dies with the primary, workers that cannot use each other's blocks, links that are cut
when they are needed, and holders with next to no room."""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import msgspec
import pytest

from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.controlplane.local.orphans import daemons
from relume.events import vocabulary as v
from relume.policies.state.coverage import covered_tokens
from tests.live.checkpoints.test_checkpoints import (
    COUNT,
    Victim,
    daemon_of,
    hit,
    of,
    padding,
    until_daemons,
    with_checkpoints,
)
from tests.live.conftest import EVENLY, HANG_S, Scene, same, scene_of, whole
from tests.signals import slowed
from tests.state_daemon.faulty import TcpProxy
from tests.suite.outcomes import inconclusive

DISK = 160_000
"""Bytes a file may have: a few blocks."""


class OddFleet(LocalFleet):
    """The engine of w2 has blocks of another size: its fingerprint fits nobody else's."""

    def engine_args(self, index: int) -> tuple[str, ...]:
        given = list(super().engine_args(index))
        if index == 2:
            given[given.index("--block-size") + 1] = "64"
        return tuple(given)


@pytest.mark.usefixtures("patient")
@pytest.mark.timeout(300)
async def test_two_holders_in_plaintext_and_a_worker_of_another_fingerprint(
    options: FleetOptions,
) -> None:
    more = with_checkpoints(
        options, checkpoint_link="plain", checkpoint_holders=2, replica_args=EVENLY
    )
    async with behind_proxies(more, OddFleet) as (scene, proxies):
        fleet = await until_daemons(scene)
        assert all(h.address and not h.local for h in fleet.holders.values())
        assert fleet.holders["w0"].family == fleet.holders["w1"].family
        assert fleet.holders["w2"].family not in ("", fleet.holders["w0"].family)
        await _second_holder_serves(scene, fleet.holders["w2"].address)
        await until_daemons(scene)
        await _nobody_can_use_its_blocks(scene)
        await until_daemons(scene)
        await _holders_killed_in_the_restore(scene, proxies)
        verdict = await scene.sound()
        assert verdict.plans >= 3


async def _second_holder_serves(scene: Scene, address: str) -> None:
    """Primary and one of two holders die in the same moment, and the other when it has given
    what it has."""

    async def strike(victim: Victim) -> None:
        fleet = await victim.run_until(
            lambda f: all(covered_tokens(f, "w2", r) >= 320 for r in victim.requests)
        )
        assert victim.holders(fleet) == {"w1", "w2"}
        os.kill(daemon_of(scene, "w1"), signal.SIGKILL)

    async def until_restored() -> None:
        while not of(await scene.events(), v.RestoreDone):
            await asyncio.sleep(0.05)
        os.kill(daemon_of(scene, "w2"), signal.SIGKILL)

    happened = await watched(until_restored(), hit(scene, "twofold", "w0", strike))
    done = of(happened, v.RestoreDone)
    assert done and {e.holder for e in done} == {address}, restores_in(happened)
    assert min(e.tokens for e in done) >= 320
    unfit = [o for p in of(happened, v.RecoveryPlanned) for c in p.choices for o in c.options]
    assert {o.excluded for o in unfit if o.worker == "w2" and o.kind == "restore"} == {
        "fingerprint"
    }


async def watched(
    watch: Coroutine[Any, Any, None], hit_: Coroutine[Any, Any, list[Any]]
) -> list[Any]:
    """What `hit_` returns. `watch` acts when a restore is under way, and ends with it at the latest."""
    async with asyncio.TaskGroup() as tasks:
        watching = tasks.create_task(watch)
        happened = await hit_
        watching.cancel()
    chosen = [c.options[c.chosen] for p in of(happened, v.RecoveryPlanned) for c in p.choices]
    if not any(option.kind == "restore" for option in chosen):
        inconclusive(f"no plan chose a restore: {chosen}")
    if not of(happened, v.RestoreStarted):
        inconclusive(f"no holder said in time what it has: {restores_in(happened)}")
    return happened


def restores_in(happened: list[Any]) -> str:
    """The plans, dispatches and restores among these events, for whoever reads a failure."""
    kinds = (v.RecoveryPlanned, v.RouteDecided, v.RestoreStarted, v.RestoreDone, v.RestoreFailed)
    return "\n".join(str(e) for e in happened if type(e) in (*kinds, v.StateDaemonLost))


async def _nobody_can_use_its_blocks(scene: Scene) -> None:
    happened = await hit(scene, "unfit", "w2")
    assert of(happened, v.RecoveryPlanned)
    chosen = [c.options[c.chosen] for p in of(happened, v.RecoveryPlanned) for c in p.choices]
    assert {o.kind for o in chosen} == {"recompute"}
    assert not of(happened, v.RestoreStarted)


async def _holders_killed_in_the_restore(scene: Scene, proxies: Sequence[TcpProxy]) -> None:
    """Some of the blocks are on their way when whoever sends them dies."""

    async def strike(victim: Victim) -> None:
        for proxy in proxies:
            proxy.hold_after = 50_000

    async def until_held() -> None:
        while not any(proxy.held.is_set() for proxy in proxies):
            await asyncio.sleep(0.01)
        for pid in daemons(scene.fleet.dir / "run"):
            os.kill(pid, signal.SIGKILL)
        for proxy in proxies:
            proxy.cut()

    happened = await watched(until_held(), hit(scene, "during", "w1", strike))
    failed = of(happened, v.RestoreFailed)
    assert failed and not of(happened, v.RestoreDone), restores_in(happened)
    assert {e.reason for e in failed} <= {"unreachable", "unknown"}


@asynccontextmanager
async def behind_proxies(
    options: FleetOptions, kind: type[LocalFleet] = LocalFleet
) -> AsyncIterator[tuple[Scene, list[TcpProxy]]]:
    """A fleet whose engines reach each daemon by a proxy."""
    proxies = [TcpProxy() for _ in range(options.workers)]
    advertise = tuple(f"127.0.0.1:{proxy.port}" for proxy in proxies)
    more = msgspec.structs.replace(options, checkpoint_advertise=advertise)
    try:
        async with scene_of(more, kind) as scene:
            assert scene.fleet.checkpoints is not None
            for proxy, port in zip(proxies, scene.fleet.checkpoints.ports, strict=True):
                proxy.target = port
            yield scene, proxies
    finally:
        for proxy in proxies:
            proxy.__exit__()


@pytest.mark.usefixtures("patient")
async def test_encrypted_links_that_are_cut_and_holders_without_room(
    options: FleetOptions,
) -> None:
    """Memory for some thirty blocks and a file for as many: holders refuse and drop, what they
    have is told as it is, and no more is used (I8)."""
    more = with_checkpoints(options, checkpoint_link="curve")
    more = msgspec.structs.replace(more, checkpoint_mb=1, checkpoint_file_mb=1)
    async with behind_proxies(more) as (scene, proxies):
        for proxy in proxies:
            proxy.delay_s = 0.001
        fleet = await until_daemons(scene)
        assert {h.budget_bytes for h in fleet.holders.values()} == {2 << 20}
        await _cut_when_needed(scene, proxies)
        await _disk_full(scene)
        await _no_room(scene)
        await scene.sound()


async def _cut_when_needed(scene: Scene, proxies: Sequence[TcpProxy]) -> None:
    """The links of all holders break with the engine, and stay so."""

    async def strike(victim: Victim) -> None:
        for proxy in proxies:
            proxy.closed = True
            proxy.cut()

    happened = await hit(scene, "cut", "w0", strike, found=some_covered)
    assert not of(happened, v.RestoreDone)
    assert of(happened, v.CheckpointsAcknowledged) or of(happened, v.CheckpointAcknowledged)
    for proxy in proxies:
        proxy.closed = False


async def _disk_full(scene: Scene) -> None:
    """What nobody has written to for a while goes to a file that cannot grow beyond a few
    blocks: the rest stays where it is, and the streams are what they would have been."""
    for pid in daemons(scene.fleet.dir / "run"):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (DISK, DISK))
    asked = {"padding": padding("disk"), "ignore_eos": True}
    with ExitStack() as slow:
        for worker in await scene.fleet.workers():
            slow.enter_context(slowed(worker["engine_pid"], 0.005, 0.12))
        long = asyncio.create_task(scene.streams(COUNT, 1200, "disk", **asked))
        try:
            await _until_filed(scene, long)
        finally:
            slow.close()
            streams = await long
    assert not whole(streams)
    calm = await scene.streams(COUNT, 1200, "calm-disk", **asked)
    assert same(calm, streams) == []
    assert max(figures["file_used"] for figures in await reported(scene)) <= DISK


async def _until_filed(scene: Scene, long: asyncio.Task[Any]) -> None:
    """Others come until room is made for them by moving what the long ones hold."""
    number = 0
    while not any(figures["demoted"] for figures in await reported(scene)):
        assert not long.done(), "nothing has gone to a file"
        await scene.streams(3, 8, f"late{number}", padding=padding(f"late{number}"))
        number += 1


async def reported(scene: Scene) -> list[dict[str, int]]:
    """What daemons have told of themselves so far."""
    return [dict(e.figures) for e in of(await scene.events(), v.StateDaemonReported)]


def some_covered(victim: Victim) -> Callable[[Any], bool]:
    """Whether every client has some output, and a holder something of any of the streams."""

    def found(fleet: Any) -> bool:
        held = [covered_tokens(fleet, h, r) for h in fleet.holders for r in victim.requests]
        return min(len(s.tokens) for s in victim.streams) >= 8 and max(held) >= 64

    return found


async def _no_room(scene: Scene) -> None:
    """The streams wanted more than there was, and the log says so."""
    deadline = time.monotonic() + HANG_S
    while True:
        told = await reported(scene)
        assert {figures["file_budget"] for figures in told} <= {1 << 20}
        if any(figures["refused"] + figures["evicted"] for figures in told):
            return
        assert time.monotonic() < deadline, told
        await asyncio.sleep(0.2)
