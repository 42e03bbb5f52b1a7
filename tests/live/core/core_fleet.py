"""The fleet that all tests of the core use, one after the other.

Three workers with checkpoints, two replicas, one zygote. After each test it is brought back to rest
and checked: what died is started again, every worker serves, nothing runs, and every promise holds
on the whole log. A fleet that does not come to rest is replaced.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from relume.chaos.live.failpoint_server import ArmedFailpoint, FailpointServer
from relume.chaos.traffic import Stream
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.controlplane.local.orphans import daemons
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.failpoints.failpoint_client import ENVIRONMENT
from relume.events.failpoints.points import Failpoint
from relume.events.log.interface import RevisionGroup
from relume.policies.state.coverage import covered_tokens
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group
from tests.live.conftest import HANG_S, Scene, small_fleet, whole

CORE = [pytest.mark.core, pytest.mark.asyncio(loop_scope="session")]
"""`pytestmark` of each module of the core."""
WORKERS = ("w0", "w1", "w2")
PARSERS = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
CHUNK = ("--max-num-batched-tokens", "256")
"""Prompts of more tokens are several prefill chunks."""


class CoreFleet(Scene):
    """A running fleet, its log as it comes, and its failpoints. Events are those since `begin`."""

    def __init__(self, fleet: LocalFleet, etcd: EtcdLog, failpoints: FailpointServer) -> None:
        super().__init__(fleet, etcd)
        self.failpoints = failpoints
        self.state = Fleet()
        self._since = self._turn = 0
        self._calm: dict[tuple[int, int, str], dict[str, Stream]] = {}

    async def __aenter__(self) -> CoreFleet:
        self._following = asyncio.create_task(self._follow())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._following.cancel()

    async def _follow(self) -> None:
        async for group in self.etcd.reader().follow(0):
            self.take(group)
            apply_group(self.state, group)

    def begin(self) -> None:
        """A test begins, perhaps for the second time."""
        self._since = len(self._events)
        self._turn += 1

    def named(self, name: str) -> str:
        """An x-request-id, or the beginning of some, of the present test alone."""
        return f"{name}.{self._turn}"

    # --- Scene, with the log as it comes and the events of this test

    async def log(self) -> list[RevisionGroup]:
        if self._following.done():
            self._following.result()
        return list(self._groups)

    async def events(self, stream: str = "") -> list[Any]:
        if self._following.done():
            self._following.result()
        return [e for name, e in self._events[self._since :] if name == stream or not stream]

    async def calm(self, count: int, max_tokens: int, padding: str = "") -> dict[str, Stream]:
        """The undisturbed run of such streams, once per fleet."""
        key = count, max_tokens, padding
        if key not in self._calm:
            tag = self.named(f"calm{len(self._calm)}")
            self._calm[key] = await self.streams(count, max_tokens, tag, padding=padding)
            assert not whole(self._calm[key])
        return self._calm[key]

    # --- moments

    @asynccontextmanager
    async def at(
        self, point: Failpoint, worker: str, **facts: Any
    ) -> AsyncIterator[ArmedFailpoint]:
        """`worker` is the only one that takes new requests, and its engine pauses at that point."""
        await self.only(worker)
        process = f"engine {worker}"
        async with self.failpoints.armed(point, process=process, **facts) as armed:
            yield armed

    async def open_all(self) -> None:
        """All workers take requests again."""
        for name in WORKERS:
            await self.drain(name, "undrain")

    async def configure(self, room: str, **settings: str) -> None:
        """Settings of that room, from now on."""
        for key, value in settings.items():
            body = {"key": f"{room}.{key}", "value": value}
            answer = await self.fleet.admin("config", "PUT", body=body)
            assert answer.get("state") == "decided", answer

    async def until_held(self, requests: Iterable[str], blocks: int) -> set[str]:
        """Wait until holders have that many blocks of each request, and all replicas know; the
        holders."""
        names, deadline = list(requests), time.monotonic() + 30
        while True:
            placed = [self.state.placed.get(name) for name in names]
            held = [self._held(p, name) for p, name in zip(placed, names, strict=True)]
            if all(count >= blocks for count in held):
                break
            assert time.monotonic() < deadline, (names, held)
            await asyncio.sleep(0.02)
        revision = self.state.revision
        for replica in range(self.fleet.options.replicas):
            while (behind := revision - (await self._live(replica))["revision"]) > 0:
                assert time.monotonic() < deadline, (replica, behind)
                await asyncio.sleep(0.02)
        return {holder for p in placed if p is not None for holder in p.holders}

    def _held(self, placed: Any, request: str) -> int:
        if placed is None or not placed.holders:
            return 0
        return min(covered_tokens(self.state, h, request) for h in placed.holders) // 32

    # --- rest

    async def rest(self) -> None:
        """Come to rest, and check every promise on the whole log."""
        await self.until_at_rest()
        await self.sound()

    async def until_at_rest(self) -> None:
        """Start again what died, and wait until every worker serves and nothing runs."""
        children = [child.pid for child in self.fleet.children.values()]
        for pid in children + daemons(self.fleet.dir / "run"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
        for name, child in list(self.fleet.children.items()):
            if not child.alive:
                self.fleet.restart(name)
        deadline, seen = time.monotonic() + HANG_S, ["unknown"]
        while seen:
            assert time.monotonic() < deadline, f"the fleet does not come to rest: {seen}"
            await asyncio.sleep(0.1)
            seen = await self._unrest()

    async def _unrest(self) -> list[Any]:
        """What is not at rest, as any replica sees it."""
        replicas = range(self.fleet.options.replicas)
        views = [await self.fleet.workers(replica) for replica in replicas]
        if any({w["name"] for w in view} != set(WORKERS) for view in views):
            return ["a replica does not answer, or knows no worker"]
        if not all([await self._appends(replica) for replica in replicas]):
            return ["what a replica decides does not reach etcd"]
        for worker in views[0]:
            if worker["state"] in ("draining", "drained"):
                await self.drain(worker["name"], "undrain")
        left: list[Any] = [
            [w[key] for key in ("name", "state", "engine", "requests")]
            for view in views
            for w in view
            if w["state"] != "serving" or w["engine"] != "ready" or w["requests"]
        ]
        lost = [name for name in WORKERS if not self._has_daemon(name)]
        return left + [f"no state daemon of {name}" for name in lost]

    async def _appends(self, replica: int) -> bool:
        """Whether the replica's events land; after an outage it has to regain its stream first."""
        return bool((await self._live(replica))["log_healthy"])

    async def _live(self, replica: int) -> dict[str, Any]:
        """What the replica says of itself."""
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{self.fleet.admins[replica]}/live") as answer:
                return await answer.json()

    def _has_daemon(self, worker: str) -> bool:
        holder = self.state.holders.get(worker)
        return holder is not None and holder.alive and bool(holder.family)


class _Local(LocalFleet):
    """Its last worker is restarted soon if it hangs; others are paused at failpoints for long."""

    def agent_env(self, index: int) -> dict[str, str]:
        soon = {"RELUME_HANG_RESTART_S": "2"} if index == len(WORKERS) - 1 else {}
        return {**super().agent_env(index), **soon}


class CoreFleets:
    """The present fleet of the core, made when a test needs one."""

    def __init__(self, folder: Path, zygote: str) -> None:
        self._folder = folder
        self._zygote = zygote
        self._number = 0
        self._stack = AsyncExitStack()
        self._fleet: CoreFleet | None = None

    async def get(self) -> CoreFleet:
        """The fleet that runs, or a new one. What starts until `leave` connects to its failpoints."""
        if self._fleet is not None:
            os.environ[ENVIRONMENT] = str(self._fleet.failpoints.path)
        else:
            self._number += 1
            folder = self._folder / str(self._number)
            folder.mkdir()
            try:
                self._fleet = await self._start(folder)
            except BaseException:
                await self.close()
                raise
        return self._fleet

    async def _start(self, folder: Path) -> CoreFleet:
        options = small_fleet(
            folder,
            zygote=self._zygote,
            workers=len(WORKERS),
            replicas=2,
            checkpoint_mb=64,
            replica_args=("--resume-grace-s", str(HANG_S)),
            engine_args=(*FleetOptions().engine_args, *PARSERS, *CHUNK),
        )
        enter = self._stack.enter_async_context
        failpoints = await enter(FailpointServer(folder / "failpoints.sock"))
        os.environ[ENVIRONMENT] = str(failpoints.path)
        fleet = await enter(_Local(options, lambda text: print(text, flush=True)))
        etcd = await enter(EtcdLog(EtcdConfig(endpoints=(fleet.etcd_endpoint,))))
        core = await enter(CoreFleet(fleet, etcd, failpoints))
        await core.until_at_rest()
        await core.calm(4, 96)
        return core

    def leave(self) -> None:
        """No test uses the fleet: what others start has no failpoints."""
        os.environ.pop(ENVIRONMENT, None)

    async def close(self) -> None:
        """End the fleet, if there is one."""
        self._fleet = None
        stack, self._stack = self._stack, AsyncExitStack()
        await stack.aclose()
