"""GET /ready of an agent: 200 while its worker may serve, else 503 with the reason."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path

import pytest

from relume.engine_shim.agent.engine_process.watched_engine import ServingEngine
from relume.events import systemd
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import FailureClass, HealthState
from relume.events.wire.worker_calls import CanaryAnswered
from tests.agent.stage import Stage, staged


def ask(url: str) -> tuple[int, str]:
    """Status, and why it is not ready."""
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            status, body = answer.status, json.loads(answer.read())
    except urllib.error.HTTPError as error:
        status, body = error.code, json.loads(error.read())
    assert body["ready"] == (status == 200)
    return status, body["why"]


async def ready(stage: Stage) -> tuple[int, str]:
    registered = await stage.nth(v.WorkerRegistered, 1)
    return await asyncio.to_thread(ask, f"{registered.agent_url}/ready")


async def until_ready(stage: Stage) -> None:
    async with asyncio.timeout(30):
        while (await ready(stage))[0] != 200:
            await asyncio.sleep(0.02)


async def judged(stage: Stage, incarnation: int, state: str) -> None:
    """The leader decides about the worker's health."""
    async with stage.log.writer("fleet") as leader:
        leader.append(
            v.HealthDecided(
                worker="w0",
                incarnation=incarnation,
                state=HealthState(state),
                failure=FailureClass.CORRUPTION,
                evidence="its canaries differ",
                since=0,
            )
        )


async def test_a_worker_is_ready_when_its_engine_has_answered_each_canary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_answer = asyncio.Event()

    async def canary(self: ServingEngine, number: int) -> CanaryAnswered:
        await may_answer.wait()
        return CanaryAnswered(tokens=(number,), logprobs=(-0.5,), took_us=10, alone=True)

    monkeypatch.setattr(ServingEngine, "canary", canary)
    async with staged(tmp_path, "--after", "0.3") as stage:
        await stage.nth(v.EngineStarted, 1)
        assert await ready(stage) == (503, "no engine is ready: starting")
        await stage.nth(v.EngineReady, 1)
        assert await ready(stage) == (503, "its engine has not answered each canary yet")
        may_answer.set()
        await until_ready(stage)
        may_answer.clear()
        async with stage.log.writer("fleet") as leader:
            restart = v.Effect("restart", "w0", 1)
            basis = v.Basis(1, 0)
            leader.append(
                v.EffectsDecided(decision="d1", basis=basis, cause="admin", effects=(restart,))
            )
        await stage.nth(v.EngineReady, 2)
        assert (await ready(stage))[0] == 503, "the answers were those of the engine before"


async def test_a_quarantined_engine_is_not_ready_until_it_is_released_or_replaced(
    tmp_path: Path,
) -> None:
    async with staged(tmp_path) as stage:
        await until_ready(stage)
        await judged(stage, 1, "quarantined")
        await stage.until(lambda: stage.agent._not_ready())
        assert await ready(stage) == (503, "the worker is quarantined")
        await judged(stage, 1, "probing")
        await until_ready(stage)
        await judged(stage, 2, "quarantined")
        await judged(stage, 1, "healthy")
        await stage.until(lambda: not stage.agent._not_ready())


async def test_a_worker_that_leaves_is_not_ready(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await until_ready(stage)
        stage.agent.stop("test")
        assert stage.agent._not_ready() == "its agent stops"


@pytest.mark.parametrize("form", ["path", "abstract"])
async def test_systemd_learns_when_it_is_ready_and_why_not_and_that_it_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    name = str(tmp_path / "notify") if form == "path" else f"\0relume-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(name)
        listener.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", name.replace("\0", "@"))
        monkeypatch.setattr(systemd, "NOTICE_PERIOD_S", 0.01)
        async with staged(tmp_path, "--after", "0.3") as stage:
            await until_ready(stage)
            said = await heard_until(listener, "READY=1\nSTATUS=ready")
            assert "STATUS=no engine is ready: starting" in said
            assert "NOTIFY_SOCKET" not in os.environ, "no engine takes it over"
            stage.agent.stop("test")
            said = await heard_until(listener, "STOPPING=1\nSTATUS=its agent stops")
            assert not any("READY" in text for text in said)


async def test_systemd_learns_of_a_stop_that_takes_less_than_a_period(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
        listener.setblocking(False)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        monkeypatch.setattr(systemd, "NOTICE_PERIOD_S", 60.0)
        async with staged(tmp_path):
            await heard_until(listener, "STATUS=")
        said = await heard_until(listener, "STOPPING=1")
        assert not any("READY" in text for text in said)


async def heard_until(listener: socket.socket, words: str) -> list[str]:
    """What came until a message with these words, which is the last one."""
    said: list[str] = []
    async with asyncio.timeout(10):
        while not said or words not in said[-1]:
            with suppress(BlockingIOError):
                said.append(listener.recv(1000).decode())
            await asyncio.sleep(0.01)
    return said
