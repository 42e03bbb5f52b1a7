"""`relume serve` as a process is told to stop: a real etcd, a scripted engine, SIGTERM."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from relume.controlplane.local.child_processes import free_port
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.log.codec import decode
from tests.etcd_server import EtcdServer, etcd_binary
from tests.gateway.client_requests import TEXT, stream_body, until
from tests.gateway.peers import Behaviour, Engine
from tests.gateway.raw_client import RawClient

pytestmark = [pytest.mark.etcd, pytest.mark.full]

RESUMABLE = "x-relume-resumable: 1\r\n"
LONG = Behaviour(tokens=20_000, pause_s=0.02)


class Stage:
    """One replica as a process, and its one worker in this process."""

    def __init__(self, log: EtcdLog, engine: Engine, port: int, output: Path) -> None:
        self.log = log
        self.engine = engine
        self.port = port
        self.process: asyncio.subprocess.Process
        self._output = output

    def client(self) -> RawClient:
        return RawClient(self.port)

    def logged(self, event: str) -> list[dict[str, Any]]:
        """The replica's log lines of that event."""
        lines = [json.loads(line) for line in self._output.read_text().splitlines() if line]
        return [line for line in lines if line["event"] == event]

    async def status(self, path: str) -> int:
        async with self.client() as client:
            return (await client.ask(path, method="GET")).status

    async def recorded(self, kind: type) -> list[Any]:
        """All events of a kind in the log."""
        groups = await self.log.reader().read()
        records = (r for g in groups for s in g.segments for r in s.records)
        return [event for event in map(decode, records) if type(event) is kind]


@asynccontextmanager
async def one_worker() -> AsyncIterator[tuple[str, EtcdLog, Engine]]:
    """A fleet without a replica: its etcd, its log and the engine of its one worker."""
    if etcd_binary() is None:
        pytest.skip("no etcd on PATH")
    async with AsyncExitStack() as stack:
        etcd = stack.enter_context(EtcdServer())
        config = msgspec.structs.replace(EtcdConfig(endpoints=etcd.endpoints), lease_ttl_s=8)
        log = await stack.enter_async_context(EtcdLog(config, name="test"))
        engine = await stack.enter_async_context(Engine("w0"))
        worker = await stack.enter_async_context(log.writer("w.w0"))
        worker.append(
            v.WorkerRegistered(worker="w0", domain="host", agent_pid=1, agent_url=""),
            v.EngineStarted("w0", 1, 2, 3),
            v.EngineReady(
                worker="w0",
                incarnation=1,
                host="127.0.0.1",
                port=engine.port,
                model="m",
                max_model_len=4096,
                block_size=16,
                kv_blocks=512,
            ),
        )
        yield etcd.endpoints[0], log, engine


@asynccontextmanager
async def stage(folder: Path, *flags: str) -> AsyncIterator[Stage]:
    async with one_worker() as (endpoint, log, engine):
        port, output = free_port(), folder / "serve.log"
        found = Stage(log, engine, port, output)
        with output.open("wb") as out:
            found.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "relume.controlplane.cli.relume_command", "serve",
                "--port", str(port), "--admin-port", "0", "--etcd", endpoint,
                "--log-format", "json", "--spool-dir", str(folder / "spool"),
                "--archive-dir", "", *flags, stdout=out, stderr=out,
            )  # fmt: skip
        try:
            await until(lambda: found.logged("serving"), 60)
            async with asyncio.timeout(20):
                while await found.status("/health") != 200:
                    await asyncio.sleep(0.05)
            yield found
        finally:
            if found.process.returncode is None:
                found.process.kill()
            await found.process.wait()


async def begun(client: RawClient, headers: str = "") -> None:
    """A stream of that client has begun."""
    client.send(TEXT, stream_body(), headers=headers)
    async with asyncio.timeout(20):
        await client.reader.readuntil(b"data: ")


async def test_at_sigterm_streams_end_move_or_are_cut_and_none_too_soon(tmp_path: Path) -> None:
    flags = ("--drain-s", "8", "--drain-announce-s", "2")
    async with AsyncExitStack() as stack:
        s = await stack.enter_async_context(stage(tmp_path, *flags))
        s.engine.script += [Behaviour(pause_s=0.2), LONG, LONG, Behaviour()]
        short, plain, resumable = [await stack.enter_async_context(s.client()) for _ in range(3)]
        for client, headers in ((short, ""), (plain, ""), (resumable, RESUMABLE)):
            await begun(client, headers)
        s.process.send_signal(signal.SIGTERM)
        await until(lambda: s.logged("stopping"), 20)
        assert (await s.status("/ready"), await s.status("/live")) == (503, 200)
        async with s.client() as late:
            answer = await late.ask(TEXT, stream_body())
        assert answer.complete and answer.body.endswith(b"data: [DONE]\n\n")
        async with asyncio.timeout(20):
            rest = [await client.reader.read() for client in (short, plain, resumable)]
        assert b"[DONE]" in rest[0] and b'"error"' not in rest[0]
        assert b'"stopping"' in rest[1] and b"[DONE]" in rest[1]
        assert b"[DONE]" not in rest[2] and b'"error"' not in rest[2]
        async with asyncio.timeout(20):
            assert await s.process.wait() == 0
        (stopped,) = s.logged("stopped")
        assert (stopped["ended"], stopped["moved"], stopped["cut"]) == (2, 1, 1)
        assert 8 <= stopped["seconds"] < 16
        (event,) = await s.recorded(v.ReplicaStopped)
        assert (event.ended, event.moved, event.cut) == (2, 1, 1)
        ends = await s.recorded(v.RequestEnded)
        assert sorted(e.outcome for e in ends) == ["completed", "completed", "failed"]


async def test_a_replica_without_requests_leaves_after_its_announcement(tmp_path: Path) -> None:
    async with stage(tmp_path, "--drain-s", "60", "--drain-announce-s", "1") as s:
        s.process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(20):
            assert await s.process.wait() == 0
        (stopped,) = s.logged("stopped")
        assert stopped["reason"] == "stopped" and 1 <= stopped["seconds"] < 10


@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
async def test_a_second_signal_ends_the_drain_at_once(
    second: signal.Signals, tmp_path: Path
) -> None:
    async with stage(tmp_path, "--drain-s", "600", "--drain-announce-s", "300") as s:
        s.engine.script += [LONG]
        async with s.client() as client:
            await begun(client)
            s.process.send_signal(signal.SIGTERM)
            await until(lambda: s.logged("stopping"), 20)
            s.process.send_signal(second)
            async with asyncio.timeout(20):
                assert await s.process.wait() == 0
        (event,) = await s.recorded(v.ReplicaStopped)
        assert (event.reason, event.cut) == ("stopped at once", 1)
