"""Zygotes that are late, refuse, talk nonsense or die; programs that do not exist."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from relume.engine_shim.agent.agent_config import AgentConfig
from relume.engine_shim.agent.agent_errors import HostRefused
from relume.engine_shim.agent.agent_logging import make_logger
from relume.engine_shim.agent.engine_process.engine_hosts import (
    EngineHost,
    ServeHost,
    ZygoteHost,
    make_order,
)
from relume.engine_shim.agent.run_directory import RunDirectory
from relume.engine_shim.engine.hosts import vllm_serve
from relume.events import vocabulary as v
from tests.agent.stage import ENGINE, environment, make_config, staged


@asynccontextmanager
async def answering(path: Path, answer: bytes) -> AsyncIterator[None]:
    """A zygote that gives everybody the same answer."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if await reader.readline():
            writer.write(answer)
        writer.close()

    async with await asyncio.start_unix_server(serve, str(path)):
        yield


@pytest.mark.parametrize(
    "answer",
    [b'{"error":"fork failed: no memory"}\n', b"{}\n", b"nonsense\n", b"", b'{"pid":"x"}\n'],
)
async def test_a_bad_answer_of_the_zygote_is_a_refusal(tmp_path: Path, answer: bytes) -> None:
    config = make_config(tmp_path)
    with RunDirectory(tmp_path) as run:
        host = ZygoteHost(str(tmp_path / "z.sock"), run, make_logger("error"))
        async with answering(tmp_path / "z.sock", answer):
            await host.available()
            with pytest.raises(HostRefused):
                await host.start(make_order(config, run, 1))


async def test_a_child_that_is_gone_already_counts_as_dead(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    with RunDirectory(tmp_path) as run:
        host = ZygoteHost(str(tmp_path / "z.sock"), run, make_logger("error"))
        answer = f'{{"pid":{os.getpid()},"start_time":1}}\n'.encode()
        async with answering(tmp_path / "z.sock", answer):
            engine = await host.start(make_order(config, run, 1))
        assert engine.dead.is_set()
        engine.close()


async def test_refusals_are_retried_with_backoff(tmp_path: Path) -> None:
    def nothing(config: AgentConfig, run: RunDirectory) -> EngineHost:
        return ServeHost(run, make_logger("error"), ("/no/such/program",), {})

    async with staged(tmp_path, make_host=nothing) as stage:
        await stage.nth(v.EngineRestartScheduled, 3)
        delays = [e.delay_ms for e in stage.events(v.EngineRestartScheduled)[:3]]
        assert delays == [0, 50, 100]
        assert stage.events(v.EngineStarted, v.EngineDied) == []


async def test_secrets_of_the_log_stay_with_the_agent(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        program = ("/bin/sh", "-c", "env")
        environ = {"RELUME_ETCD_ENDPOINTS": "http://u:hunter2@e:1", "PATH": os.environ["PATH"]}
        host = ServeHost(run, make_logger("error"), program, environ)
        engine = await host.start(make_order(make_config(tmp_path), run, 3))
        await engine.dead.wait()
        await engine.destroy()
        said = run.engine_log.read_text()
        assert "RELUME_INCARNATION=3" in said and "RELUME_PROGRESS=" in said
        assert "hunter2" not in said


async def test_an_engine_of_vllm_serve_gives_way_to_its_agent_as_far_as_said(
    tmp_path: Path,
) -> None:
    own = os.getpriority(os.PRIO_PROCESS, 0)
    config = make_config(tmp_path, engine_nice=3)
    code = (
        "import os; from relume.engine_shim.engine.hosts.niceness import give_way, keep_niceness; "
        "keep_niceness(); path = '/proc/self/autogroup'; print('has', os.getpriority(os.PRIO_PROCESS, 0), "
        "open(path).read().split()[-1] if os.path.exists(path) else ''); "
        "give_way(); print('computes', os.getpriority(os.PRIO_PROCESS, 0))"
    )
    program = (sys.executable, "-c", code)
    with RunDirectory(tmp_path) as run:
        host = ServeHost(run, make_logger("error"), program, niceness=config.engine_nice)
        engine = await host.start(make_order(config, run, 1))
        await engine.dead.wait()
        await engine.destroy()
        said = run.engine_log.read_text().splitlines()
    nice = min(19, own + 3)
    assert said[0].split() in (["has", str(nice)], ["has", str(nice), str(nice)])
    assert said[1] == f"computes {min(19, 2 * nice)}"


def test_vllm_serve_weighs_its_session_before_it_becomes_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(vllm_serve, "check_plugin", lambda: done.append("checked"))
    monkeypatch.setattr(vllm_serve, "keep_niceness", lambda: done.append("weighed"))
    monkeypatch.setattr(os, "execv", lambda path, argv: done.append(argv[3]))
    monkeypatch.setattr(sys, "argv", ["vllm_serve", "--model", "m"])
    vllm_serve.main()
    assert done == ["checked", "weighed", "serve"]


@pytest.mark.full
async def test_engine_outlives_its_zygote_and_restarts_wait_for_the_next(tmp_path: Path) -> None:
    socket = tmp_path / "z.sock"
    zygotes: list[subprocess.Popen[bytes]] = []

    def start_zygote() -> None:
        argv = [*ENGINE, "--as", "zygote", str(socket)]
        zygotes.append(subprocess.Popen(argv, env=environment()))

    def forked(config: AgentConfig, run: RunDirectory) -> EngineHost:
        return ZygoteHost(str(socket), run, make_logger("info"))

    try:
        async with staged(tmp_path / "run", "--pace", "0.01", make_host=forked) as stage:
            await stage.until(lambda: stage.phase == "waiting")
            assert stage.events(v.EngineStarted) == []
            start_zygote()
            await stage.nth(v.EngineReady, 1)
            zygotes[0].kill()
            zygotes[0].wait()
            seen = len(stage.events(v.EngineStep))
            await stage.until(lambda: len(stage.events(v.EngineStep)) > seen + 20)
            assert stage.events(v.EngineDied) == []
            os.kill(stage.events(v.EngineStarted)[0].pid, signal.SIGKILL)
            assert (await stage.nth(v.EngineDied, 1)).incarnation == 1
            await stage.until(lambda: stage.phase == "waiting")
            start_zygote()
            assert (await stage.nth(v.EngineReady, 2)).incarnation == 2
    finally:
        for zygote in zygotes:
            zygote.kill()
            zygote.wait()
