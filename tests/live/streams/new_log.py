"""etcd is restored from a backup while clients stream, and a new log begins: how tests do that, and what must
become of resumable streams."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest

from relume.chaos.live.failpoint_server import FailpointServer
from relume.chaos.validators.records import ClientRecord
from relume.controlplane.local.local_fleet import FleetOptions
from relume.events import vocabulary as v
from relume.events.etcd.maintenance import Maintenance
from relume.events.failpoints.failpoint_client import ENVIRONMENT
from relume.events.failpoints.points import Action, Failpoint
from relume.events.log.errors import LogUnavailable
from relume.policies.state.fleet import Fleet
from tests.live.conftest import HANG_S, Scene, scene_of, whole
from tests.live.resuming import Reader
from tests.live.streams.test_resumable import LONG_GRACE, asking, assert_resumed

TOKENS = 1500
STEP_S = 0.1
BODY = asking(TOKENS, ignore_eos=True)


class Disaster:
    """etcd of a fleet, which can be restored to what it was before, and the new log."""

    def __init__(self, scene: Scene) -> None:
        self.fleet = scene.fleet
        self.etcd = scene.etcd
        self._data = self.fleet.dir / "etcd"

    async def _etcd_stopped(self) -> None:
        child = self.fleet.children["etcd"]
        child.kill()
        await asyncio.to_thread(child.process.wait, HANG_S)

    async def identity(self) -> str:
        deadline = time.monotonic() + HANG_S
        while True:
            try:
                if found := await Maintenance(self.etcd.client).identity():
                    return found
            except LogUnavailable:
                pass
            assert time.monotonic() < deadline
            await asyncio.sleep(0.1)

    async def back_up(self) -> str:
        """The id of the log."""
        log_id = await self.identity()
        await self._etcd_stopped()
        shutil.copytree(self._data, self._data.with_suffix(".backup"))
        self.fleet.restart("etcd")
        assert await self.identity() == log_id
        return log_id

    async def restore(self) -> None:
        await self._etcd_stopped()
        shutil.rmtree(self._data)
        shutil.copytree(self._data.with_suffix(".backup"), self._data)
        self.fleet.restart("etcd")
        await self.identity()

    async def begin(self, former: str) -> Scene:
        """As an operator does it; the scene of the new log."""
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "relume.controlplane.cli.relume_command", "log", "begin",
            "--etcd", self.fleet.etcd_endpoint, "--archive-dir", str(self.fleet.dir / "archive"),
            "--replace", former,
        )  # fmt: skip
        assert await process.wait() == 0
        return Scene(self.fleet, self.etcd)

    async def left(self, replica: str) -> int:
        """The exit code of a replica."""
        process = self.fleet.children[replica].process
        return await asyncio.to_thread(process.wait, HANG_S)


async def returned(reader: Reader, session: aiohttp.ClientSession, url: str) -> None:
    """Return until the replica knows the stream, as its answers say."""
    deadline = time.monotonic() + HANG_S
    while not reader.done:
        await reader.read(session, url)
        assert reader.status in (200, 503) and not reader.error, (reader.status, reader.answer)
        assert time.monotonic() < deadline, reader.answer
        await asyncio.sleep(0.1)


async def running(readers: Sequence[Reader], tasks: Sequence[asyncio.Task[Any]]) -> None:
    deadline = time.monotonic() + HANG_S
    while any(len(r.events) < 20 for r in readers):
        assert time.monotonic() < deadline and not any(t.done() for t in tasks)
        await asyncio.sleep(0.005)


def stated(events: Sequence[Any], requests: set[str]) -> set[str]:
    """Of these requests, those that engines reported without a dispatch."""
    changes = [c for e in events if type(e) is v.EngineStep for c in e.changes]
    queued = [c for c in changes if type(c) is v.RequestQueued and not c.dispatch]
    return {c.request for c in queued if c.request in requests}


def before_the_log(record: ClientRecord) -> ClientRecord:
    """Of an undisturbed answer that the present log does not have."""
    return msgspec.structs.replace(record, status=0)


def held(fleet: Fleet) -> set[str]:
    return {a.request for w in fleet.workers.values() for a in w.attempts.values() if a.queued}


@asynccontextmanager
async def slow_steps(
    options: FleetOptions, patch: pytest.MonkeyPatch
) -> AsyncIterator[AbstractAsyncContextManager[object]]:
    """For the engines of a fleet that starts inside: within what it gives, each step takes a while, so
    that streams outlast what happens to their log."""
    async with FailpointServer(Path(options.state_dir) / "failpoints.sock") as failpoints:
        patch.setenv(ENVIRONMENT, str(failpoints.path))
        yield failpoints.armed(
            Failpoint.ENGINE_STEP, Action.DELAY, process="engine *", times=0, seconds=STEP_S
        )


async def streams_continue(options: FleetOptions, ends: str, patch: pytest.MonkeyPatch) -> None:
    """Their replica is `killed`, or `drained`: the time in which it lets them end is over. Then the engine
    dies on which they continue."""
    options = msgspec.structs.replace(
        options, replica_args=(*LONG_GRACE, "--drain-s", "1", "--drain-announce-s", "0")
    )
    async with (
        slow_steps(options, patch) as slow,
        scene_of(options) as scene,
        aiohttp.ClientSession() as session,
    ):
        url = f"{scene.url}/v1/completions"
        calm = Reader(name="calm")
        await calm.read(session, url, BODY)
        disaster = Disaster(scene)
        former = await disaster.back_up()
        torn = [Reader(name=f"torn-{i}") for i in range(3)]
        names = [r.name for r in torn]
        engines = {w["name"]: w["engine_pid"] for w in await scene.fleet.workers()}
        async with slow:
            reading = [asyncio.create_task(r.read(session, url, BODY)) for r in torn]
            await running(torn, reading)
            if ends == "killed":
                scene.fleet.children["r0"].kill()
            await disaster.restore()
            assert await disaster.left("r0") == (1 if ends == "drained" else -signal.SIGKILL)
            await asyncio.gather(*reading)
            assert not any(r.done or r.error for r in torn), [(r.done, r.error) for r in torn]
            present = await disaster.begin(former)
            scene.fleet.restart("r0")
            for name in engines:
                assert (await present.until_ready(name))["engine_pid"] == engines[name]
            requests = {r.request for r in torn}
            deadline = time.monotonic() + HANG_S
            while held(await present.fold()) != requests:
                assert time.monotonic() < deadline, held(await present.fold())
                await asyncio.sleep(0.1)
            assert stated(await present.events(), requests) == requests
            assert not any(type(e) is v.RequestArrived for e in await present.events())
            had = [len(r.events) for r in torn]
            coming = [asyncio.create_task(returned(r, session, url)) for r in torn]
            while any(len(r.events) < n + 20 for r, n in zip(torn, had, strict=True)):
                assert time.monotonic() < deadline and not any(t.done() for t in coming)
                await asyncio.sleep(0.005)
            places = await present.routes(names)
            assert not any(places.values()), "they continue where they ran"
            lost = next(w for w in (await present.fold()).workers.values() if w.attempts)
            os.kill(engines[lost.name], signal.SIGKILL)
        await asyncio.gather(*coming)
        for reader in torn:
            assert_resumed(scene, calm, reader, TOKENS)
        moved = [d for made in (await present.routes(names)).values() for d in made]
        assert moved and {d.worker for d in moved} == engines.keys() - {lost.name}
        assert all(d.attempt > 1 and d.mode == "continue" for d in moved), moved
        present.records = [before_the_log(r) if r.request == "calm" else r for r in scene.records]
        assert await disaster.identity() != former
        await present.until_ready(lost.name, 2)
        await present.until_idle(lost.name)
        later = await present.streams(4, 60, "later")
        assert not whole(later)
        await present.sound()
