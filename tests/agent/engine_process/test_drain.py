"""An agent that is asked to stop: its requests leave the engine before it stops it."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from relume.events import vocabulary as v
from tests.agent.stage import staged
from tests.signals import stop


def kinds(events: list) -> list[type]:
    return [type(event) for event in events]


async def test_the_engine_lives_until_its_requests_have_left(tmp_path: Path) -> None:
    async with staged(tmp_path, "--busy", "2.5", drain_s=60.0) as stage:
        await stage.nth(v.EngineReady, 1)
        began = time.monotonic()
        stage.agent.stop("test")
        (leaving,) = await stage.until(lambda: stage.events(v.WorkerLeaving))
        assert (leaving.worker, leaving.within_ms) == ("w0", 60_000)
        assert stage.agent.describe()["stopping"]
        await stage.task
        assert 2.0 < time.monotonic() - began < 20
        assert kinds(stage.events())[-3:] == [v.WorkerLeaving, v.EngineDied, v.WorkerDeregistered]
        assert stage.events(v.EngineDied)[0].reason == "stopped"


async def test_an_engine_that_stays_busy_is_stopped_when_the_time_is_over(tmp_path: Path) -> None:
    async with staged(tmp_path, "--busy", "1000", drain_s=1.0) as stage:
        await stage.nth(v.EngineReady, 1)
        began = time.monotonic()
        stage.agent.stop("test")
        await stage.task
        assert 1.0 <= time.monotonic() - began < 15
        assert stage.events(v.EngineDied)[0].reason == "stopped"


async def test_an_engine_that_does_not_answer_has_the_whole_time(tmp_path: Path) -> None:
    async with staged(tmp_path, drain_s=3.0) as stage:
        await stage.nth(v.EngineReady, 1)
        stop(stage.events(v.EngineStarted)[0].pid)
        began = time.monotonic()
        stage.agent.stop("test")
        await stage.task
        assert 3.0 <= time.monotonic() - began < 20


async def test_a_second_signal_ends_the_drain_and_the_engine_at_once(tmp_path: Path) -> None:
    async with staged(tmp_path, "--busy", "1000", "--ignore-term", drain_s=600.0) as stage:
        await stage.nth(v.EngineReady, 1)
        stage.agent.stop("test")
        await stage.until(lambda: stage.events(v.WorkerLeaving))
        began = time.monotonic()
        stage.agent.stop("again")
        await stage.task
        assert time.monotonic() - began < 4


async def test_an_engine_that_dies_while_it_drains_is_not_waited_for(tmp_path: Path) -> None:
    async with staged(tmp_path, "--busy", "1000", drain_s=600.0, backoff_s=(5.0,)) as stage:
        await stage.nth(v.EngineReady, 1)
        stage.agent.stop("test")
        await stage.until(lambda: stage.events(v.WorkerLeaving))
        began = time.monotonic()
        os.kill(stage.events(v.EngineStarted)[0].pid, signal.SIGKILL)
        await stage.task
        assert time.monotonic() - began < 4
        assert kinds(stage.events(v.EngineStarted)) == [v.EngineStarted]


async def test_an_engine_that_is_not_ready_has_nothing_to_drain(tmp_path: Path) -> None:
    async with staged(tmp_path, "--mute", drain_s=600.0) as stage:
        await stage.nth(v.EngineStarted, 1)
        stage.agent.stop("test")
        await stage.task
        assert not stage.events(v.WorkerLeaving)
