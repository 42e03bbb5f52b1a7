"""Engines die, hang and refuse; the agent sees it, says it, cleans up and starts again."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest

from relume.engine_shim.agent.engine_process.process_identity import is_alive
from relume.engine_shim.agent.engine_process.supervisor import Backoff
from relume.events import vocabulary as v
from tests.agent.stage import staged
from tests.signals import stop


def test_backoff_walks_its_list_and_starts_over_after_a_stable_life() -> None:
    backoff = Backoff((0.0, 0.5, 1.0), stable_after_s=60)
    assert [backoff.after(1) for _ in range(5)] == [0.0, 0.5, 1.0, 1.0, 1.0]
    assert backoff.after(61) == 0.0
    assert backoff.after(0) == 0.5


async def test_a_start_is_recorded_in_order(tmp_path: Path) -> None:
    async with staged(tmp_path, "--steps", "3") as stage:
        await stage.nth(v.EngineStep, 3)
        kinds = [type(e) for e in stage.events()]
        assert kinds == [v.WorkerRegistered, v.EngineStarted, v.EngineReady, *[v.EngineStep] * 3]
        started, ready = stage.events(v.EngineStarted, v.EngineReady)
        assert (started.incarnation, ready.incarnation) == (1, 1)
        assert (ready.host, ready.model, ready.exact) == ("127.0.0.1", "m", ("greedy",))
    assert [type(e) for e in stage.events()][-2:] == [v.EngineDied, v.WorkerDeregistered]
    assert stage.events(v.EngineDied)[0].reason == "stopped"


async def test_killed_engine_is_seen_at_once_and_restarted(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await stage.nth(v.EngineReady, 1)
        pid = stage.events(v.EngineStarted)[0].pid
        killed_at = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        died = await stage.nth(v.EngineDied, 1)
        assert time.monotonic() - killed_at < 2
        assert (died.incarnation, died.reason, died.detail) == (1, "killed", "SIGKILL")
        scheduled = await stage.nth(v.EngineRestartScheduled, 1)
        assert (scheduled.incarnation, scheduled.delay_ms) == (2, 0)
        assert (await stage.nth(v.EngineReady, 2)).incarnation == 2


@pytest.mark.full
async def test_death_of_any_process_ends_the_whole_engine(tmp_path: Path) -> None:
    async with staged(tmp_path, "--family", "2", "--after", "0.5") as stage:
        for number in (1, 2):
            await stage.nth(v.EngineReady, number)
            await stage.until(lambda: len(stage.directory.state.engine.members) == 2)
            engine = stage.directory.state.engine
            os.kill(engine.members[0].pid, signal.SIGKILL)
            died = await stage.nth(v.EngineDied, number)
            assert died.reason == "killed"
            assert died.detail == f"worker (pid {engine.members[0].pid}) SIGKILL"
            await stage.nth(v.EngineRestartScheduled, number)
            assert not any(is_alive(p) for p in (engine.process, *engine.members))


@pytest.mark.full
async def test_a_stopped_member_does_not_outlive_its_engine(tmp_path: Path) -> None:
    async with staged(tmp_path, "--family", "1", "--after", "0.5") as stage:
        await stage.nth(v.EngineReady, 1)
        await stage.until(lambda: stage.directory.state.engine.members)
        engine = stage.directory.state.engine
        stop(engine.members[0].pid)
        os.kill(engine.process.pid, signal.SIGKILL)
        await stage.nth(v.EngineRestartScheduled, 1)
        assert not is_alive(engine.members[0])


@pytest.mark.full
async def test_engine_that_always_exits_is_restarted_with_growing_delays(tmp_path: Path) -> None:
    async with staged(tmp_path, "--exit", "3", "--mute") as stage:
        await stage.nth(v.EngineRestartScheduled, 4)
        scheduled = stage.events(v.EngineRestartScheduled)[:4]
        assert [e.delay_ms for e in scheduled] == [0, 50, 100, 100]
        assert [e.incarnation for e in scheduled] == [2, 3, 4, 5]
        assert {(e.reason, e.detail) for e in stage.events(v.EngineDied)[:4]} == {
            ("exit", "status 3")
        }


@pytest.mark.full
async def test_engine_that_is_never_ready_is_killed(tmp_path: Path) -> None:
    async with staged(tmp_path, "--mute", "--ignore-term", ready_timeout_s=0.5) as stage:
        died = await stage.nth(v.EngineDied, 1)
        assert died.reason == "hung"
        assert "not ready within 0.5 s" in died.detail
        assert (await stage.nth(v.EngineStarted, 2)).incarnation == 2


async def test_stopping_does_not_wait_for_ever(tmp_path: Path) -> None:
    async with staged(tmp_path, "--ignore-term", "--family", "1", stop_timeout_s=0.3) as stage:
        await stage.nth(v.EngineReady, 1)
    assert stage.events(v.EngineDied)[0].reason == "stopped"
    assert isinstance(stage.events()[-1], v.WorkerDeregistered)


async def test_stopping_wakes_a_stopped_engine(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await stage.nth(v.EngineReady, 1)
        stop(stage.events(v.EngineStarted)[0].pid)
        began = time.monotonic()
        stage.agent.stop("test")
        await stage.task
        assert time.monotonic() - began < 4


async def test_restarts_continue_while_the_log_is_unavailable(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await stage.nth(v.EngineReady, 1)
        stage.log.pause()
        os.kill(stage.events(v.EngineStarted)[0].pid, signal.SIGKILL)
        await stage.until(lambda: stage.agent.describe()["engine"]["incarnation"] == 2)
        await stage.until(lambda: stage.agent.describe()["engine"]["ready"])
        assert not stage.agent.describe()["log"]["healthy"]
        assert stage.events(v.EngineDied) == []
        stage.log.resume()
        assert [e.incarnation for e in stage.events(v.EngineReady)] == [1, 2]
