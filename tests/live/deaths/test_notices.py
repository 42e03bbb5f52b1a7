"""A killed engine whose death nothing shows but its agent's word: etcd stands still, and its
sockets stay open because this process holds them too."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
from pathlib import Path

import pytest

from relume.controlplane.local.local_fleet import FleetOptions
from relume.controlplane.replay.why import why
from relume.controlplane.replica.death_notices import SEEN_DEAD
from relume.events import vocabulary as v
from tests.live.conftest import Scene, same, scene_of, whole
from tests.signals import stop

_PIDFD_GETFD = 438
_libc = ctypes.CDLL(None, use_errno=True)


def sockets_of(pid: int) -> list[int]:
    """Descriptors of our own for every socket of process `pid`."""
    pidfd = os.pidfd_open(pid)
    held = []
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            if os.readlink(entry).startswith("socket:"):
                fd = _libc.syscall(_PIDFD_GETFD, pidfd, int(entry.name), 0)
                if fd < 0:
                    pytest.skip(f"may not hold another process's sockets: {ctypes.get_errno()}")
                held.append(fd)
    finally:
        os.close(pidfd)
    return held


async def test_streams_of_a_killed_engine_move_by_its_agents_word(options: FleetOptions) -> None:
    async with scene_of(options) as scene:
        calm = await scene.streams(6, 400, "calm")
        assert not whole(calm)
        victim = await scene.worker("w0")
        pid, etcd = victim["engine_pid"], scene.fleet.children["etcd"]
        held: list[int] = []

        async def kill(streams: dict) -> None:
            await scene.ripe(streams, 1)
            held.extend(sockets_of(pid))
            await scene.paced(streams, 16, "w0", pid)
            # A last moment of progress: a long wait for etcd to stand still is not a stall.
            os.kill(pid, signal.SIGCONT)
            await asyncio.to_thread(stop, etcd.pid)
            os.kill(pid, signal.SIGKILL)

        try:
            hit = await scene.streams(6, 400, "told", kill)
            assert not whole(hit), "complete, with etcd still stopped"
        finally:
            os.kill(etcd.pid, signal.SIGCONT)
            for fd in held:
                os.close(fd)
        assert held
        assert same(calm, hit) == []
        await scene.until_ready("w0", victim["incarnation"] + 1)
        await scene.until_ended(hit)  # the spool has landed
        await _log_tells(scene, hit, victim["incarnation"])
        await scene.sound()


async def _log_tells(scene: Scene, hit: dict, incarnation: int) -> None:
    """Who was suspected and why, and each stream's move."""
    events = await scene.events("r.r0")
    suspected = [e for e in events if type(e) is v.WorkerSuspected]
    assert [(e.worker, e.incarnation, e.reason) for e in suspected] == [
        ("w0", incarnation, SEEN_DEAD)
    ]
    observed = [e for e in events if type(e) is v.TransportObserved]
    assert {(e.kind, e.detail) for e in observed} == {("engine_dead", SEEN_DEAD)}
    assert await scene.hung() == []
    moved = {name: made for name, made in (await scene.routes(hit)).items() if len(made) > 1}
    assert len(moved) == len(observed) >= 2
    for made in moved.values():
        assert [d.cause for d in made] == ["arrival", "engine_dead"]
        assert [d.worker for d in made] == ["w0", "w1"]
        told = why(await scene.log(), made[0].request)
        assert told is not None
        assert [s.event for s in told.steps if type(s.event) is v.TransportObserved]
