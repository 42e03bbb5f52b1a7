"""Common parts of the benches of lost engines: timed streams, a fleet's settings, and a kill."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import Struct, field

from relume.chaos.kill_demo import Watch
from relume.chaos.traffic import Stream, complete
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog

PATIENCE_S = 90.0
CHECKPOINT_MB = 512
"""Budget of each worker's state daemon, enough for all checkpoints of a bench."""


class TimedStream(Struct, kw_only=True):
    """One stream, its random prompt, and the arrival times of its tokens (monotonic seconds). The
    request carries `headers`."""

    stream: Stream
    prompt: list[int]
    output: int
    at: list[float] = field(default_factory=list)
    headers: dict[str, str] = {}

    @property
    def name(self) -> str:
        return self.stream.request

    def gap_s(self, moment: float) -> float:
        """The longest time between two tokens, of those with the later token after `moment`."""
        pairs = zip(self.at, self.at[1:], strict=False)
        return max((b - a for a, b in pairs if b > moment), default=0.0)

    async def run(self, session: aiohttp.ClientSession, url: str) -> None:
        """Send it and read it to its end; no behaviour of the server raises."""
        await complete(
            session, url, self.stream, self.output, on_token=self._note, headers=self.headers,
            prompt=self.prompt, ignore_eos=True, stream_options=None,
        )  # fmt: skip

    def _note(self, stream: Stream) -> None:
        self.at.append(time.monotonic())


def timed(name: str, rng: random.Random, prompt_tokens: int, output: int) -> TimedStream:
    """A request whose prompt is in no cache."""
    return TimedStream(
        stream=Stream(request=name, prompt=""),
        prompt=rng.choices(range(300, 3000), k=prompt_tokens),
        output=output,
    )


class Log(Watch):
    """Follows the log; `happened` has the events of the kinds in `KINDS`, with the monotonic
    time at which they were read."""

    KINDS = (v.RestoreStarted, v.RestoreDone, v.RestoreFailed, v.RecoveryPlanned, v.RouteDecided)

    def __init__(self, reader: Any) -> None:
        super().__init__(reader)
        self.happened: list[tuple[float, Any]] = []

    def _seen(self, stream: str, position: int, event: Any) -> None:
        super()._seen(stream, position, event)
        if isinstance(event, self.KINDS):
            self.happened.append((time.monotonic(), event))

    def place(self, one: TimedStream) -> str:
        """The last worker it was sent to; empty if unknown."""
        return self.route.get(one.name, [""])[-1]


@asynccontextmanager
async def fleet_of(
    folder: str, model: str, workers: int, engine_args: tuple[str, ...]
) -> AsyncIterator[tuple[LocalFleet, Log]]:
    """A fleet with checkpoints, with all state daemons up, and a follower of its log."""
    options = FleetOptions(
        workers=workers, state_dir=folder, port=0, admin_port=0, model=model,
        checkpoint_mb=CHECKPOINT_MB, engine_args=engine_args,
    )  # fmt: skip
    async with LocalFleet(options) as fleet:
        async with EtcdLog(EtcdConfig(endpoints=(fleet.etcd_endpoint,))) as etcd:
            log = Log(etcd.reader())
            following = asyncio.create_task(log.run())
            try:
                await until(
                    lambda: (
                        sum(h.alive and bool(h.family) for h in log.fleet.holders.values())
                        == workers
                    ),
                    "state daemons answer",
                )
                yield fleet, log
            finally:
                following.cancel()


async def until(condition: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
    """Waits for a condition. Raises TimeoutError."""
    deadline = time.monotonic() + patience_s
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {patience_s} s: {what}")
        await asyncio.sleep(0.02)


async def configure(fleet: LocalFleet, log: Log, settings: Mapping[str, Any]) -> None:
    """Puts settings `checkpoints.*` and waits until the log has them."""
    headers = {"Authorization": f"Bearer {fleet.admin_token}"}
    wanted = {f"checkpoints.{name}": str(value) for name, value in settings.items()}
    async with aiohttp.ClientSession(headers=headers) as session:
        for key, value in wanted.items():
            body = {"key": key, "value": value}
            async with session.put(f"{fleet.admins[0]}/admin/v1/config", json=body) as answer:
                answer.raise_for_status()
    await until(
        lambda: all(log.fleet.config.get(key) == value for key, value in wanted.items()),
        f"settings {wanted}",
    )


async def kill(log: Watch, victim: str) -> tuple[float, int]:
    """kill -9 of a worker's engine; return the time (monotonic) and its incarnation."""
    worker = log.fleet.workers[victim]
    killed_at = time.monotonic()
    os.kill(worker.engine_pid, signal.SIGKILL)
    return killed_at, worker.incarnation


async def until_back(log: Watch, victim: str, incarnation: int) -> None:
    """Waits for the engine that follows `incarnation`."""
    await until(lambda: (victim, incarnation + 1) in log.ready_at, f"{victim} is back")


def log_lines(log_path: Path, event: str) -> list[dict[str, Any]]:
    """Lines about `event` in a process's log, in order."""
    lines = log_path.read_text(errors="replace").splitlines()
    return [json.loads(line) for line in lines if f'"{event}"' in line]


def wide_model(path: Path) -> str:
    """Makes the `wide` model there, if it is not; its absolute path."""
    script = Path(__file__).resolve().parents[3] / "deploy" / "dev" / "make_model.py"
    subprocess.run([sys.executable, str(script), "--size", "wide", "--out", str(path)], check=True)
    return str(path.absolute())
