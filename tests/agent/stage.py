"""An agent in this process, on a MemoryLog, with scripted engines; and waiting for facts."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

from relume.engine_shim.agent.agent_config import AgentConfig
from relume.engine_shim.agent.agent_logging import make_logger
from relume.engine_shim.agent.engine_process.engine_hosts import EngineHost, ServeHost
from relume.engine_shim.agent.engine_process.process_identity import marked_processes
from relume.engine_shim.agent.life import Agent
from relume.engine_shim.agent.run_directory import RunDirectory
from relume.events.log.codec import decode
from relume.events.log.memory import MemoryLog

ROOT = Path(__file__).resolve().parents[2]
ENGINE = (sys.executable, "-m", "tests.agent.scripted_engine")
T = TypeVar("T")

QUICK = {
    "backoff_s": (0.0, 0.05, 0.1),
    "stable_after_s": 60.0,
    "ready_timeout_s": 20.0,
    "drain_s": 0.0,
    "stop_timeout_s": 5.0,
    "lease_ttl_s": 2,
}


def environment() -> dict[str, str]:
    """For child processes: this checkout on the path."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def weight_of_session(pid: int) -> int | None:
    """Niceness of the process's session; None where sessions have none."""
    try:
        return int(Path(f"/proc/{pid}/autogroup").read_text().split()[-1])
    except (OSError, IndexError):
        return None


class Stage:
    """The agent under test, its log, and questions to both."""

    def __init__(self, log: MemoryLog, directory: RunDirectory, agent: Agent) -> None:
        self.log = log
        self.directory = directory
        self.agent = agent
        self.task: asyncio.Task[None] | None = None

    def events(self, *kinds: type) -> list[Any]:
        """Facts of the worker's stream so far, in order."""
        found = [
            decode(record)
            for group in self.log.groups
            for segment in group.segments
            if segment.stream == "w.w0"
            for record in segment.records
        ]
        return [e for e in found if not kinds or isinstance(e, kinds)]

    async def until(self, found: Callable[[], T], timeout_s: float = 30.0) -> T:
        """Wait until `found()` is true; the agent must not end meanwhile."""
        deadline = time.monotonic() + timeout_s
        while not (result := found()):
            assert time.monotonic() < deadline, [repr(e) for e in self.events()]
            if self.task is not None and self.task.done():
                self.task.result()
                raise AssertionError(f"the agent left: {self.events()}")
            await asyncio.sleep(0.005)
        return result

    async def nth(self, kind: type[T], number: int) -> T:
        """Wait for the `number`-th (1-based) event of that kind."""
        return (await self.until(lambda: self.events(kind)[number - 1 : number]))[0]

    @property
    def phase(self) -> str:
        """What the supervisor does at present; empty before there is one."""
        engine = self.agent.describe()["engine"]
        return engine["phase"] if engine else ""

    def left_over(self) -> list[int]:
        """Pids of processes any engine of this stage left alive."""
        return [process.pid for process in marked_processes(self.directory.marker)]


def make_config(path: Path, *engine_args: str, **settings: Any) -> AgentConfig:
    """A quick configuration for a scripted engine."""
    merged = {**QUICK, "worker": "w0", "run_dir": str(path), "model": "m", "domain": "d"}
    return AgentConfig(**{**merged, **settings}, engine_args=engine_args).check()


@asynccontextmanager
async def staged(
    path: Path,
    *engine_args: str,
    log: MemoryLog | None = None,
    make_host: Callable[[AgentConfig, RunDirectory], EngineHost] | None = None,
    **settings: Any,
) -> AsyncIterator[Stage]:
    """A running agent; at the end it is stopped and must have left nothing."""
    config = make_config(path, *engine_args, **settings)
    logger = make_logger("info")
    log = log or MemoryLog()
    with RunDirectory(path) as directory:
        host = (
            make_host(config, directory)
            if make_host is not None
            else ServeHost(directory, logger, ENGINE, environment())
        )

        async def free_stream(stream: str, epoch: int) -> bool:
            dead = log.owner_epochs.get(stream) == epoch
            if dead:
                log.lapse(stream)
            return dead

        agent = Agent(config, directory, log.writer, free_stream, log, host, logger)
        stage = Stage(log, directory, agent)
        stage.task = asyncio.create_task(agent.run())
        try:
            yield stage
        finally:
            agent.stop("test is over")
            try:
                await stage.task
            finally:
                assert stage.left_over() == []
