"""The processes of the relay bench: synthetic engines, etcd, our control plane, vllm-router.

Our side is `relume serve` as in production, on a real etcd: every request's arrival,
decision and end go to the log. The engines' registrations are written to the log as their
agents would.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import aiohttp

from relume.chaos.bench.gateway.relay_upstream import MODEL
from relume.controlplane.local.child_processes import Child, free_port
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.controlplane.serve_settings import ServeConfig
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.log.errors import RelumeError

START_TIMEOUT_S = 40.0


class BenchFailed(RelumeError):
    """A part of the bench did not come up or gave wrong answers."""


class Routers:
    """Async context manager: inside, `ports` maps direct, relume and vllm-router to their
    ports, and `pids` maps the latter two to their processes."""

    def __init__(self, router_policy: str, with_peer: bool = True) -> None:
        self.router_policy = router_policy
        self.with_peer = with_peer
        self.ports: dict[str, int] = {}
        self.pids: dict[str, int] = {}
        self._children: list[Child] = []
        self._dir = Path(tempfile.mkdtemp(prefix="relume-bench-relay-"))
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        try:
            await self._start()
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_exc: object) -> None:
        await self._stop()

    async def _start(self) -> None:
        engines = [free_port(), free_port()]
        self._child(
            "engines", ["-m", "relume.chaos.bench.gateway.relay_upstream", *map(str, engines)]
        )
        self.ports["direct"] = engines[0]
        await self._answers("direct", "/v1/models")
        # Start every process before this one has a gRPC client: gRPC warns of a fork under its
        # threads.
        etcd = await self._start_relume()
        if self.with_peer:
            self._start_peer(engines)
        await self._register(etcd, engines)
        for name in self.pids:
            await self._answers(name, "/health")

    async def _start_relume(self) -> str:
        fleet = LocalFleet(FleetOptions(workers=0, state_dir=str(self._dir)), lambda _text: None)
        self._stack.push_async_callback(fleet.stop)
        await fleet.start_etcd()
        port = free_port()
        config = {
            "port": port,
            "admin_port": 0,
            "etcd": [fleet.etcd_endpoint],
            "spool_dir": str(self._dir / "spool"),
        }
        child = self._child(
            "relume", ["-m", "relume.chaos.bench.gateway.relay_routers", json.dumps(config)]
        )
        self.ports["relume"], self.pids["relume"] = port, child.pid
        return fleet.etcd_endpoint

    async def _register(self, etcd: str, engines: list[int]) -> None:
        log = await self._stack.enter_async_context(EtcdLog(EtcdConfig(endpoints=(etcd,))))
        for index, port in enumerate(engines):
            name = f"w{index}"
            writer = await self._stack.enter_async_context(log.writer(f"w.{name}"))
            writer.append(
                v.WorkerRegistered(worker=name, domain=f"host{index}", agent_pid=0),
                v.EngineStarted(name, 1, 0, 0),
                v.EngineReady(
                    worker=name,
                    incarnation=1,
                    host="127.0.0.1",
                    port=port,
                    model=MODEL,
                    max_model_len=8192,
                    block_size=32,
                    kv_blocks=4096,
                ),
            )
            await writer.flush(5.0)

    def _start_peer(self, engines: list[int]) -> None:
        binary = shutil.which("vllm-router") or str(Path(sys.executable).parent / "vllm-router")
        port = free_port()
        argv = [
            binary, "--host", "127.0.0.1", "--port", str(port),
            "--worker-urls", *[f"http://127.0.0.1:{engine}" for engine in engines],
            "--worker-startup-check-interval", "1",
            "--prometheus-port", str(free_port()), "--log-level", "error",
        ]  # fmt: skip
        if self.router_policy:
            argv += ["--policy", self.router_policy]
        child = Child.start("vllm-router", argv, self._dir / "logs" / "vllm-router.log")
        self._children.append(child)
        self.ports["vllm-router"], self.pids["vllm-router"] = port, child.pid

    def _child(self, name: str, arguments: list[str]) -> Child:
        child = Child.start(name, [sys.executable, *arguments], self._dir / "logs" / f"{name}.log")
        self._children.append(child)
        return child

    async def _answers(self, name: str, path: str) -> None:
        url = f"http://127.0.0.1:{self.ports[name]}{path}"
        try:
            async with asyncio.timeout(START_TIMEOUT_S), aiohttp.ClientSession() as session:
                while True:
                    try:
                        async with session.get(url) as answer:
                            if answer.status == 200:
                                return
                    except aiohttp.ClientError:
                        pass
                    for child in self._children:
                        if not child.alive:
                            code = child.process.returncode
                            raise BenchFailed(f"{child.name} stopped ({code}):\n{child.tail()}")
                    await asyncio.sleep(0.1)
        except TimeoutError as error:
            tails = "\n".join(child.tail() for child in self._children)
            raise BenchFailed(f"{name} does not answer {path}:\n{tails}") from error

    async def _stop(self) -> None:
        for child in reversed(self._children):
            await child.stop(3.0)
        await self._stack.aclose()
        shutil.rmtree(self._dir, ignore_errors=True)


class LoadClient:
    """The load client's process; `run` gives it one point and returns its counts. Start it
    before `Routers`."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "relume.chaos.bench.gateway.relay_load"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._results = self._process.stdin, self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exc: object) -> None:
        self._requests.close()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def run(self, point: dict[str, Any]) -> dict[str, Any]:
        """Blocking; raises `BenchFailed` when the client died."""
        self._requests.write(json.dumps(point) + "\n")
        self._requests.flush()
        line = self._results.readline()
        if not line:
            raise BenchFailed("the load client died")
        return json.loads(line)


def cpu_ns(pid: int) -> int:
    """CPU time of all threads of a process that live now, in nanoseconds (/proc schedstat)."""
    return sum(
        int(path.read_text().split()[0]) for path in Path(f"/proc/{pid}/task").glob("*/schedstat")
    )


def _serve() -> int:
    from relume.controlplane.replica.serve import main

    given = json.loads(sys.argv[1])
    return main(ServeConfig(**{**given, "etcd": tuple(given["etcd"])}))


if __name__ == "__main__":
    sys.exit(_serve())
