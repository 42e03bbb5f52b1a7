"""An agent gets SIGTERM while streams run on its engine: they leave, and no client notices."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from relume.chaos.traffic import Stream
from relume.controlplane.local.local_fleet import FleetOptions
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import DeathReason
from tests.live.checkpoints.test_checkpoints import Victim, of, until_daemons, with_checkpoints
from tests.live.conftest import EVENLY, HANG_S, Scene, scene_of
from tests.live.streams.test_migration import left, moved, sliced, struck, troubles

DRAIN_S = 40.0
"""More than a machine with other work needs to move the streams."""


@pytest.mark.usefixtures("patient")
async def test_streams_leave_before_the_agent_stops_their_engine(
    options: FleetOptions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("relume.controlplane.local.local_fleet.DRAIN_S", DRAIN_S)
    async with scene_of(with_checkpoints(options, replica_args=EVENLY)) as scene:
        await until_daemons(scene)
        await _terminated(scene)
        await scene.sound()


async def _terminated(scene: Scene) -> None:
    worker = await scene.until_ready("w0")
    agent = scene.fleet.children["w0"]
    requests: list[str] = []

    async def act(streams: dict[str, Stream]) -> None:
        victim = Victim(scene, worker)
        await victim.take(streams)
        requests.extend(victim.requests)
        await victim.run_until(victim.covered)
        os.kill(worker["agent_pid"], signal.SIGTERM)
        await sliced(victim, left(victim.requests), 0.03)
        os.kill(victim.pid, signal.SIGCONT)
        assert await asyncio.to_thread(agent.process.wait, HANG_S) == 0
        scene.fleet.restart("w0")
        await scene.until_ready("w0", worker["incarnation"] + 1)

    happened = await struck(scene, "terminated", act)
    assert moved(happened) == set(requests), troubles(happened)
    assert {e.kind for e in of(happened, v.TransportObserved)} == {"moved"}, "no failure"
    of_worker = [
        e
        for e in happened
        if type(e) in (v.WorkerLeaving, v.EngineDied, v.WorkerDeregistered, v.WorkerRegistered)
    ]
    assert [type(e) for e in of_worker] == [
        v.WorkerLeaving, v.EngineDied, v.WorkerDeregistered, v.WorkerRegistered
    ]  # fmt: skip
    assert of(happened, v.EngineDied)[0].reason == DeathReason.STOPPED
    assert {e.request for e in of(happened, v.RestoreDone)} == set(requests)
