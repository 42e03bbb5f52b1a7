"""A replica whose log is gone from etcd: its open streams end as if nothing had happened, also when a
new log begins meanwhile."""

from __future__ import annotations

import asyncio
import json
import re
import sys
from pathlib import Path

import pytest

from relume.controlplane.gateway.endpoint import Gateway
from relume.controlplane.history.errors import EtcdLostSegments
from relume.controlplane.replica.former_log.log_loss import is_log_lost
from relume.controlplane.replica.loop import Replica, ReplicaConfig
from relume.controlplane.replica.serve import _explain
from relume.events import vocabulary as v
from relume.events.etcd.errors import LogWentBack
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.maintenance import Maintenance
from relume.events.log.errors import (
    BrokenChain,
    Compacted,
    Fenced,
    LogError,
    LogReplaced,
    first_cause,
)
from tests.etcd_server import EtcdServer, free_port
from tests.gateway.peers import Behaviour, Engine, expected_stream
from tests.gateway.raw_client import Answer, RawClient
from tests.gateway.replica_scene import GATEWAY, NEVER, NO_CHECKS, scene, until
from tests.history.stage import config_for

pytestmark = [pytest.mark.etcd]

BODY = json.dumps({"model": "m", "prompt": "hi", "temperature": 0, "stream": True}).encode()
WANT = expected_stream(BODY, "cmpl-q", "1700000000", 12, False)


def ready(engine: Engine) -> tuple[object, ...]:
    """What an agent writes of a worker that serves."""
    name = engine.name
    return (
        v.WorkerRegistered(worker=name, domain="h", agent_pid=1, agent_url="", notices=""),
        v.EngineStarted(name, 1, 2, 3),
        v.EngineReady(
            worker=name, incarnation=1, host="127.0.0.1", port=engine.port, model="m",
            max_model_len=4096, block_size=16, kv_blocks=512, exact=(),
        ),
    )  # fmt: skip


async def begin_log(etcd: EtcdServer, log: EtcdLog, folder: Path) -> None:
    """As an operator does, once the replica says that its log is gone."""
    while '"log_replaced_streams_continue"' not in (folder / "serve.log").read_text():
        await asyncio.sleep(0.05)
    former = await Maintenance(log.client).identity() or "none"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "relume.controlplane.cli.relume_command", "log", "begin",
        "--etcd", etcd.endpoints[0], "--archive-dir", str(folder / "archive"), "--replace", former,
    )  # fmt: skip
    assert await process.wait() == 0


async def serving(
    etcd: EtcdServer, folder: Path, port: int, drain_s: int
) -> asyncio.subprocess.Process:
    """A replica that says in serve.log what it does."""
    with (folder / "serve.log").open("wb") as out:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "relume.controlplane.cli.relume_command", "serve",
            "--port", str(port), "--admin-port", "0", "--etcd", etcd.endpoints[0],
            "--lease-ttl-s", "2", "--tick-ms", "250", "--log-format", "json",
            "--spool-dir", str(folder / "spool"), "--drain-s", str(drain_s),
            "--drain-announce-s", "0",
            "--archive-dir", str(folder / "archive"), stdout=out, stderr=out,
        )  # fmt: skip


async def starts(folder: Path) -> None:
    """Until the replica serves."""
    async with asyncio.timeout(60):
        while '"serving"' not in (folder / "serve.log").read_text():
            await asyncio.sleep(0.05)


async def returned(port: int, headers: str) -> Answer:
    """What a client that returns to its stream gets, once the replica knows its log."""
    async with asyncio.timeout(60):
        while True:
            async with RawClient(port) as client:
                client.send("/v1/completions", b"", headers=headers)
                answer = await client.answer()
            if b'"code":"log_behind"' not in answer.body:
                return answer
            await asyncio.sleep(0.2)


async def ended(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        process.kill()
        await process.wait()


@pytest.mark.parametrize("restored", [True, False])
async def test_streams_end_well_and_the_replica_exits_with_the_remedy(
    etcd: EtcdServer, tmp_path: Path, restored: bool
) -> None:
    port, output = free_port(), tmp_path / "serve.log"
    async with EtcdLog(config_for(etcd), name="test") as log, Engine("w0") as engine:
        async with log.writer("w.w0") as writer:
            writer.append(*ready(engine))
            await writer.flush(5)
            if restored:
                etcd.back_up()
            process = await serving(etcd, tmp_path, port, 60)
            try:
                await starts(tmp_path)
                async with asyncio.timeout(60):
                    engine.default = Behaviour(pause_s=0.7)
                    async with RawClient(port) as client:
                        client.send("/v1/completions", BODY, headers="x-request-id: q\r\n")
                        while not engine.seen:
                            await asyncio.sleep(0.05)
                        etcd.restore()
                        reading = asyncio.create_task(client.answer())
                        if restored:
                            await begin_log(etcd, log, tmp_path)
                            assert not reading.done(), "the stream ended before the new log began"
                        answer = await reading
                    assert answer.complete and answer.body == WANT, output.read_text()
                    assert await process.wait() == 1
            finally:
                await ended(process)
    said = output.read_text()
    assert '"log_replaced_streams_continue"' in said and "relume log begin" in said
    assert "Traceback" not in said, said


@pytest.mark.parametrize("resumable", [False, True])
async def test_a_stream_that_outlasts_the_drain_is_cut(
    etcd: EtcdServer, tmp_path: Path, resumable: bool
) -> None:
    """Its client gets the error of a replica that stops. That of a resumable stream returns, and learns
    from the new log that its stream is gone."""
    port = free_port()
    async with EtcdLog(config_for(etcd), name="test") as log, Engine("w0") as engine:
        async with log.writer("w.w0") as writer:
            writer.append(*ready(engine))
            await writer.flush(5)
            process = await serving(etcd, tmp_path, port, 2)
            try:
                await starts(tmp_path)
                engine.default = Behaviour(hang_at=200)
                async with RawClient(port) as client:
                    head = "x-request-id: q\r\n"
                    more = "x-relume-resumable: 1\r\n" if resumable else ""
                    client.send("/v1/completions", BODY, headers=head + more)
                    while not engine.seen:
                        await asyncio.sleep(0.05)
                    etcd.restore()
                    answer = await client.answer()
                assert await process.wait() == 1
                assert '"cut": 1' in (tmp_path / "serve.log").read_text()
                assert (b'"code":"stopping"' in answer.body, answer.complete) == (
                    (False, False) if resumable else (True, True)
                )
                if resumable:
                    last = re.findall(rb"id: (\S+)", answer.body)[-1].decode()
                    process = await serving(etcd, tmp_path, port, 2)
                    await starts(tmp_path)
                    gone = await returned(port, f"{head}{more}last-event-id: {last}\r\n")
                    assert gone.status == 410 and b'"code":"stream_gone"' in gone.body
            finally:
                await ended(process)


@pytest.mark.parametrize(
    "error",
    [
        LogReplaced("r.r0", 7, 12),
        LogWentBack(100, 7),
        EtcdLostSegments("4f2a", "w.w0", 3, 5, "the archive"),
        BrokenChain("w.w0", 4, "does not follow segment 5"),
        Compacted(100, 1_000_000_100),
    ],
)
def test_a_replica_that_lost_its_log_names_the_command(capsys, error: LogError) -> None:
    assert is_log_lost(ExceptionGroup("replica", [error]))
    assert _explain(error) == 1
    said = capsys.readouterr().out
    assert str(error) in said and "relume log begin" in said


def test_another_owner_is_no_lost_log() -> None:
    assert not is_log_lost(Fenced("r.r0", 7))
    assert _explain(Fenced("r.r0", 7)) == 3


async def test_a_stream_whose_engine_dies_meanwhile_continues_on_another_worker() -> None:
    async with scene(exact=("restart", "resume")) as s:
        writer = await s.stack.enter_async_context(s.log.writer("r.r0"))
        config = ReplicaConfig(name="r0", tick_s=0.05, stall=NEVER, cross_checks=NO_CHECKS)
        replica = Replica(config, s.log, writer, s.log.writer)
        await replica.catch_up()
        gateway = await s.stack.enter_async_context(Gateway(replica.scheduler, GATEWAY))
        running = asyncio.create_task(replica.run(gateway))
        s.script(Behaviour(pause_s=0.2))
        async with RawClient(gateway.port) as client:
            client.send("/v1/completions", BODY, headers="x-request-id: q\r\n")
            serving = [w.engine for w in s.workers]
            await until(lambda: any(engine.seen for engine in serving))
            s.log.replace()
            with pytest.raises(LogReplaced):
                writer.append(v.Tick(0, 0))  # an idle writer on etcd learns it from its lease
            await until(running.done)
            assert isinstance(first_cause(running.exception()), LogReplaced)
            next(engine for engine in serving if engine.seen).stop()
            answer = await client.answer()
        assert answer.complete and answer.body == WANT
        assert all(engine.seen for engine in serving)
        assert await gateway.drain(5.0)
