"""A worker host of real processes: a zygote, agents, a real etcd; and questions to them."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from relume.engine_shim.agent.engine_process.process_identity import (
    ProcessId,
    is_alive,
    marked_processes,
)
from relume.events.etcd.factory import EtcdLog
from relume.events.log.codec import decode
from tests.agent.stage import environment
from tests.etcd_server import EtcdServer

T = TypeVar("T")


def _flag(setting: tuple[str, str]) -> str:
    return "--" + setting[0].replace("_", "-")


def _value(setting: tuple[str, str]) -> str:
    return setting[1]


class Host:
    """A worker host with a zygote of scripted engines; starts agents, asks the log."""

    def __init__(self, path: Path, etcd: EtcdServer, log: EtcdLog, **settings: str) -> None:
        """`settings` are flags of the agent beyond those of a quick test."""
        self.settings = {
            "model": "m",
            "host_kind": "zygote",
            "zygote": str(path / "z.sock"),
            "lease_ttl_s": "2",
            "backoff_s": "0,0.1",
            **settings,
        }
        self.path = path
        self.etcd = etcd
        self.log = log
        self.processes: list[subprocess.Popen[bytes]] = []

    def spawn(self, name: str, *argv: str) -> subprocess.Popen[bytes]:
        with open(self.path / f"{name}.log", "ab") as output:
            process = subprocess.Popen(argv, env=environment(), stdout=output, stderr=output)
        self.processes.append(process)
        return process

    def agent(self, *engine_args: str, directory: str = "run") -> subprocess.Popen[bytes]:
        """Start an agent of worker w0 in `directory`."""
        flags = [f(x) for x in self.settings.items() for f in (_flag, _value)]
        return self.spawn(
            "agent",
            *(sys.executable, "-m", "relume.engine_shim.agent", "--worker", "w0"),
            *("--run-dir", str(self.path / directory), "--etcd", self.etcd.url),
            *(*flags, "--", *engine_args),
        )

    @property
    def state(self) -> dict[str, Any]:
        return json.loads((self.path / "run" / "state.json").read_text())

    @property
    def engine(self) -> ProcessId:
        return ProcessId(*self.state["engine"]["process"])

    async def events(self, *kinds: type) -> list[Any]:
        groups = await self.log.reader().read()
        found = [
            decode(record)
            for group in groups
            for segment in group.segments
            if segment.stream == "w.w0"
            for record in segment.records
        ]
        return [e for e in found if not kinds or isinstance(e, kinds)]

    async def nth(self, kind: type[T], number: int, timeout_s: float = 30.0) -> T:
        """Wait until the log holds the `number`-th event of that kind."""
        deadline = time.monotonic() + timeout_s
        while len(found := await self.events(kind)) < number:
            assert time.monotonic() < deadline, (await self.events(), self.words())
            await asyncio.sleep(0.02)
        return found[number - 1]

    def words(self) -> str:
        return (self.path / "agent.log").read_text()

    def status(self) -> dict[str, Any]:
        """GET /state of the agent, at the address told in its own log."""
        told = [line for line in self.words().splitlines() if '"owns the stream"' in line]
        with urllib.request.urlopen(json.loads(told[-1])["url"] + "/state", timeout=5) as answer:
            return json.loads(answer.read())

    async def stop(self) -> None:
        """Kill all of it; engines follow their agent."""
        for process in self.processes:
            process.kill()
            process.wait()
        await until(lambda: not self.left_over())
        if (self.path / "run" / "state.json").exists() and self.state["engine"]:
            await until(lambda: not is_alive(self.engine))

    def left_over(self) -> list[int]:
        marker = f"RELUME_AGENT_SOCKET={self.path / 'run' / 'agent.sock'}"
        return [p.pid for p in marked_processes(marker)]


async def until(found: Callable[[], T], timeout_s: float = 20.0) -> T:
    deadline = time.monotonic() + timeout_s
    while not (result := found()):
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    return result


async def left(process: subprocess.Popen[bytes], timeout_s: float = 20.0) -> int:
    """The exit status of a process, once it has ended."""
    await until(lambda: process.poll() is not None, timeout_s)
    return process.returncode
