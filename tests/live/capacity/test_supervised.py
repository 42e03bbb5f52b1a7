"""Kubernetes and systemd replace replicas and workers under load, by the numbers of `deploy/`: no
client notices."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import aiohttp
import msgspec

from relume.chaos.traffic import Stream, complete, prompts
from relume.controlplane import serve_settings
from relume.controlplane.local.child_processes import free_port
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.engine_shim.agent import agent_config
from relume.engine_shim.canary_prompts import COUNT
from relume.events import vocabulary as v
from tests.live.capacity.supervisors import (
    NotifySocket,
    Probe,
    asks_command,
    asks_http,
    may_be_away,
    pod,
    stopped,
    unit,
)
from tests.live.conftest import HANG_S, Scene, scene_of

CLIENTS = 4
TOKENS = 96


class Supervised(LocalFleet):
    """Agents stop by their defaults, and have known status ports. The last worker is a unit of systemd."""

    def __init__(self, options: FleetOptions, say: Callable[[str], None] = print) -> None:
        super().__init__(options, say)
        self.status_ports = [free_port() for _ in range(options.workers)]
        self.notify = self.dir / "notify"

    def agent_flags(self, index: int) -> list[str]:
        drain_s = agent_config.AgentConfig(worker="w0", run_dir="run", model="m").drain_s
        port = self.status_ports[index]
        return [*super().agent_flags(index), "--drain-s", str(drain_s), "--status-port", str(port)]

    def agent_env(self, index: int) -> dict[str, str]:
        last = index == self.options.workers - 1
        more = {"NOTIFY_SOCKET": str(self.notify)} if last else {}
        return {**super().agent_env(index), **more}


class Clients:
    """Clients of a service: each request goes to one of `endpoints` that is ready, and none is sent
    again. `sent`: by stream, when and where."""

    def __init__(self, scene: Scene, endpoints: Callable[[], list[str]]) -> None:
        self.sent: list[tuple[float, str, Stream]] = []
        self._scene = scene
        self._endpoints = endpoints
        self._numbers = count()

    @asynccontextmanager
    async def load(self) -> AsyncIterator[None]:
        """Inside there is load."""
        stopping = asyncio.Event()
        connector = aiohttp.TCPConnector(force_close=True)
        async with aiohttp.ClientSession(connector=connector) as session:
            async with asyncio.TaskGroup() as tasks:
                for text in prompts(CLIENTS):
                    tasks.create_task(self._client(session, text, stopping))
                try:
                    yield
                finally:
                    stopping.set()

    async def _client(
        self, session: aiohttp.ClientSession, text: str, stopping: asyncio.Event
    ) -> None:
        while not stopping.is_set():
            number = next(self._numbers)
            ready = self._endpoints()
            assert ready, "no endpoint is ready"
            url = ready[number % len(ready)]
            stream = Stream(request=f"load-{number}", prompt=text)
            self.sent.append((time.monotonic(), url, stream))
            await complete(session, url, stream, TOKENS)
            self._scene.note(stream, f"{TOKENS} {{}} {text}")
            await asyncio.sleep(0.05)

    def check(self) -> None:
        """Every stream is whole, and all of one prompt are alike."""
        streams = [stream for _, _, stream in self.sent]
        assert [f"{s.request}: {s.error}" for s in streams if not s.whole] == []
        answers = {(s.prompt, tuple(s.tokens)) for s in streams}
        assert len(answers) == CLIENTS


async def test_kubernetes_replaces_each_replica(options: FleetOptions) -> None:
    manifest = pod("relume-control")
    config = serve_settings.load({}, {})
    flags = ("--drain-s", str(config.drain_s), "--drain-announce-s", str(config.drain_announce_s))
    options = msgspec.structs.replace(options, replicas=2, replica_args=flags)
    async with scene_of(options) as scene:
        numbers, path = manifest["container"]["readinessProbe"], "/ready"
        assert numbers["httpGet"]["path"] == path
        gateways = dict(zip(("r0", "r1"), scene.fleet.gateways, strict=True))
        probes = {name: Probe(asks_http(url + path), numbers) for name, url in gateways.items()}
        clients = Clients(scene, lambda: [gateways[n] for n in gateways if probes[n].since])
        probing = [asyncio.create_task(probe.run()) for probe in probes.values()]
        try:
            for probe in probes.values():
                await probe.ready_for(0.0, HANG_S)
            await scene.streams(CLIENTS, TOKENS, "calm")
            async with clients.load():
                for name, probe in probes.items():
                    await probe.success()
                    child, began = scene.fleet.children[name], time.monotonic()
                    took_s = await stopped(child, manifest["terminationGracePeriodSeconds"])
                    assert child.process.returncode == 0, f"killed after {took_s:.1f} s"
                    assert not probe.since, "the probe has not noticed"
                    late = [at - began for at, url, _ in clients.sent if url == gateways[name]]
                    late = [at for at in late if at > 0]
                    assert late, "it got requests until the probe noticed, and took them"
                    print(f"{name} left in {took_s:.1f} s, last request at {max(late):.1f} s")
                    scene.fleet.restart(name)
                    await probe.ready_for(1.0, HANG_S)
        finally:
            for task in probing:
                task.cancel()
        clients.check()
        served = Counter(url for _, url, _ in clients.sent)
        assert min(served[url] for url in gateways.values()) > CLIENTS
        await scene.sound()


async def test_kubernetes_and_systemd_replace_each_worker_and_kill_one_that_hangs(
    options: FleetOptions, tmp_path: Path
) -> None:
    """w0 and w1 are pods; w2 is a unit of systemd. Last, the agent of w0 is stopped: it ignores SIGTERM."""
    manifest, service = pod("relume-worker"), unit("relume-worker")
    assert service["Type"] == "notify" and service["KillMode"] == "process"
    options = msgspec.structs.replace(options, workers=3, state_dir=str(tmp_path / "fleet"))
    Path(options.state_dir).mkdir()
    notify = NotifySocket(Path(options.state_dir) / "notify")
    try:
        async with scene_of(options, Supervised) as scene:
            fleet = scene.fleet
            assert isinstance(fleet, Supervised)
            first = await notify.ready(HANG_S)
            assert any("STATUS=no engine is ready" in text for text in first)
            assert [text for text in first if "READY" in text] == ["READY=1\nSTATUS=ready"]
            await scene.streams(CLIENTS, TOKENS, "calm")
            numbers = manifest["container"]["readinessProbe"]
            ports = dict(zip(("w0", "w1"), fleet.status_ports, strict=False))
            probes = {
                name: Probe(asks_command(numbers, port), numbers) for name, port in ports.items()
            }
            probing = [asyncio.create_task(probe.run()) for probe in probes.values()]
            clients = Clients(scene, lambda: [scene.url])
            try:
                for probe in probes.values():
                    await probe.ready_for(manifest["minReadySeconds"], HANG_S)
                async with clients.load():
                    grace_s = manifest["terminationGracePeriodSeconds"]
                    for name, probe in probes.items():
                        await replaced(scene, name, grace_s)
                        away = [other for other, at in probes.items() if not at.since]
                        assert len(away) <= may_be_away("relume-worker", len(probes))
                        await probe.ready_for(manifest["minReadySeconds"], HANG_S)
                        await has_answered_canaries(scene, name, 2)
                    notify.heard()
                    await replaced(scene, "w2", float(service["TimeoutStopSec"]))
                    said = await notify.until("STOPPING=1", 1.0)
                    assert said == ["STOPPING=1\nSTATUS=its agent stops"], "and no longer ready"
                    await notify.ready(HANG_S)
                    await has_answered_canaries(scene, "w2", 2)
                    agent = fleet.children["w0"]
                    os.kill(agent.pid, signal.SIGSTOP)
                    took_s = await stopped(agent, grace_s)
                    assert took_s >= grace_s and agent.process.returncode == -signal.SIGKILL
                    fleet.restart("w0")
                    await scene.until_ready("w0", 3)
            finally:
                for task in probing:
                    task.cancel()
            clients.check()
            await scene.sound()
    finally:
        notify.close()


async def replaced(scene: Scene, name: str, grace_s: float) -> None:
    """Its supervisor stops the agent, which leaves in time, and starts it again."""
    agent = scene.fleet.children[name]
    took_s = await stopped(agent, grace_s)
    assert agent.process.returncode == 0, f"killed after {took_s:.1f} s"
    print(f"{name} left in {took_s:.1f} s")
    scene.fleet.restart(name)


async def has_answered_canaries(scene: Scene, name: str, incarnation: int) -> None:
    """A worker that is ready has answered each canary; its answers may be on their way to the log."""
    async with asyncio.timeout(HANG_S):
        while True:
            events = await scene.events(f"w.{name}")
            reports = [e for e in events if type(e) is v.CanaryReported]
            found = {e.canary for e in reports if e.incarnation == incarnation and not e.error}
            if len(found) == COUNT:
                return
            await asyncio.sleep(0.2)
