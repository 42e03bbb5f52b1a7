"""systemd starts and stops a replica by its unit in `deploy/`: a real replica and etcd, a scripted
engine."""

from __future__ import annotations

import asyncio
import os
import shlex
import signal
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path

import pytest

from relume.controlplane import serve_settings
from relume.controlplane.local.child_processes import Child, free_port
from relume.events.etcd.factory import EtcdLog
from tests.gateway.client_requests import TEXT, stream_body
from tests.gateway.peers import Behaviour, Engine
from tests.gateway.raw_client import RawClient
from tests.live.capacity.supervisors import NotifySocket, stopped, unit
from tests.live.conftest import HANG_S
from tests.live.test_replica_stops import LONG, begun, one_worker

pytestmark = [pytest.mark.etcd, pytest.mark.full]

COMMAND = [sys.executable, "-m", "relume.controlplane.cli.relume_command"]


class ReplicaUnit:
    """`relume-control@r0.service` on a host whose /var/lib/relume is in `folder`."""

    def __init__(self, folder: Path, log: EtcdLog, engine: Engine, endpoint: str) -> None:
        self.settings = unit("relume-control")
        self.log = log
        self.engine = engine
        self.port = free_port()
        self.notify = NotifySocket(folder / "notify")
        self._folder = folder
        self._env = dict([self.settings["Environment"].split("=", 1)]) | {
            "RELUME_ETCD_ENDPOINTS": endpoint,
            "RELUME_PORT": str(self.port),
            "RELUME_ADMIN_PORT": "0",
            "NOTIFY_SOCKET": str(folder / "notify"),
        }
        self.process: Child

    @property
    def grace_s(self) -> float:
        return float(self.settings["TimeoutStopSec"])

    def start(self) -> None:
        """As ExecStart says."""
        line = self.settings["ExecStart"].replace("%i", "r0")
        program, *words = shlex.split(line.replace("/var/lib/relume", str(self._folder / "lib")))
        assert program == "/opt/relume/bin/relume"
        self.process = Child.start("r0", [*COMMAND, *words], self._folder / "r0.log", self._env)

    async def status(self, path: str) -> int:
        """Of its answer; 0: nothing listens there."""
        with suppress(ConnectionError):
            async with RawClient(self.port) as client:
                return (await client.ask(path, method="GET")).status
        return 0


@asynccontextmanager
async def replica_unit(folder: Path) -> AsyncIterator[ReplicaUnit]:
    """It is not started."""
    async with one_worker() as (endpoint, log, engine):
        found = ReplicaUnit(folder, log, engine, endpoint)
        try:
            yield found
        finally:
            found.notify.close()
            if hasattr(found, "process"):
                found.process.kill()
                found.process.process.wait()


async def test_a_replica_is_started_when_it_accepts_requests_and_not_before(tmp_path: Path) -> None:
    """It needs its stream, which another process has at first."""
    async with replica_unit(tmp_path) as replica:
        assert replica.settings["Type"] == "notify" and "NotifyAccess" not in replica.settings
        async with replica.log.writer("r.r0"):
            replica.start()
            await replica.notify.until("STATUS=waits for the stream r.r0", HANG_S)
            assert await replica.status("/ready") == 0
        told = await replica.notify.ready(HANG_S)
        assert await replica.status("/ready") == 200
        assert [text for text in told if "READY" in text] == ["READY=1\nSTATUS=serving"]
        took_s = await stopped(replica.process, replica.grace_s)
        assert replica.process.process.returncode == 0, f"killed after {took_s:.1f} s"
        replica.start()
        await replica.notify.ready(HANG_S)


async def test_systemd_waits_until_the_streams_of_a_replica_have_ended(tmp_path: Path) -> None:
    """One ends after the replica closed its port; one would run beyond the drain, and is cut in time."""
    async with AsyncExitStack() as stack:
        replica = await stack.enter_async_context(replica_unit(tmp_path))
        config = serve_settings.load({}, {})
        ends_after_s = (config.drain_announce_s + config.drain_s) / 2
        replica.engine.script += [Behaviour(tokens=int(ends_after_s / 0.1), pause_s=0.1), LONG]
        replica.start()
        await replica.notify.ready(HANG_S)
        ends, too_long = [
            await stack.enter_async_context(RawClient(replica.port)) for _ in range(2)
        ]
        for client in (ends, too_long):
            await begun(client)
        stopping = asyncio.create_task(stopped(replica.process, replica.grace_s))
        told = await replica.notify.until("STOPPING=1", HANG_S)
        assert not any("READY" in text for text in told)
        assert await replica.status("/ready") == 503
        async with RawClient(replica.port) as late:
            assert (await late.ask(TEXT, stream_body())).body.endswith(b"data: [DONE]\n\n")
        async with asyncio.timeout(replica.grace_s):
            whole = await ends.reader.read()
            assert await replica.status("/ready") == 0, "it ended before the port was closed"
            cut = await too_long.reader.read()
        assert b"[DONE]" in whole and b'"error"' not in whole
        assert b'"stopping"' in cut
        took_s = await stopping
        assert replica.process.process.returncode == 0, f"killed after {took_s:.1f} s"
        assert took_s >= config.drain_s


async def test_systemd_kills_a_replica_that_hangs_and_starts_it_again(tmp_path: Path) -> None:
    async with replica_unit(tmp_path) as replica:
        replica.start()
        await replica.notify.ready(HANG_S)
        os.kill(replica.process.pid, signal.SIGSTOP)
        took_s = await stopped(replica.process, replica.grace_s)
        assert took_s >= replica.grace_s
        assert replica.process.process.returncode == -signal.SIGKILL
        began = time.monotonic()
        replica.start()
        await replica.notify.ready(HANG_S)
        print(f"ready {time.monotonic() - began:.1f} s after its new start")
        assert await replica.status("/ready") == 200
