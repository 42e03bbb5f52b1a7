"""An engine that hangs is found by its agent, its stacks are written, and it is restarted, unless it
returns or an operator holds it."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from relume.engine_shim.engine.progress import Progress
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind
from tests.agent.stage import Stage, staged
from tests.pace import outlast
from tests.signals import stop

FOUND_S = 3.0
"""Bound of the detection; a busy machine gets as much again."""


def effect(decision: str, kind: EffectKind) -> v.EffectsDecided:
    told = (v.Effect(kind, "w0"),)
    return v.EffectsDecided(decision=decision, basis=v.Basis(1, 0), cause="test", effects=told)


async def hangs(stage: Stage, number: int = 1) -> v.EngineHung:
    """Make the engine's server answer no more; the event that says so."""
    await stage.nth(v.EngineReady, number)
    began = time.monotonic()
    os.kill(stage.events(v.EngineStarted)[-1].pid, signal.SIGUSR1)
    hung = await stage.nth(v.EngineHung, number)
    assert time.monotonic() - began < 2 * FOUND_S
    return hung


async def test_a_hung_engine_is_found_and_restarted_with_its_stacks_written(tmp_path: Path) -> None:
    async with staged(tmp_path, hang_restart_s=0.5) as stage:
        hung = await hangs(stage)
        assert (hung.worker, hung.incarnation, hung.looks) == ("w0", 1, 3)
        assert hung.process_state in "SR", "it waits, or just answers a probe"
        stacks = Path(hung.stacks).read_text()
        assert Path(hung.stacks).parent == tmp_path / "stacks"
        assert "scripted_engine.py" in stacks and "in main" in stacks
        assert f"pid {stage.events(v.EngineStarted)[0].pid}" in stacks
        died = await stage.nth(v.EngineDied, 1)
        assert (died.incarnation, died.reason) == (1, "hung")
        assert died.detail.startswith("no turn of its loop for ")
        assert (await stage.nth(v.EngineRestartScheduled, 1)).incarnation == 2
        assert (await stage.nth(v.EngineReady, 2)).incarnation == 2
        assert stage.events(v.EngineRecovered) == []
    assert not list(tmp_path.glob("agent.sock.*"))


async def test_a_stopped_engine_is_found_and_one_that_returns_is_not_restarted(
    tmp_path: Path,
) -> None:
    """SIGSTOP stops the thread that would write its stacks, too."""
    async with staged(tmp_path) as stage:
        await stage.nth(v.EngineReady, 1)
        pid = stage.events(v.EngineStarted)[0].pid
        began = time.monotonic()
        stop(pid)
        hung = await stage.nth(v.EngineHung, 1)
        assert time.monotonic() - began < 2 * FOUND_S
        assert hung.process_state == "T"
        assert "none: the process is stopped" in Path(hung.stacks).read_text()
        os.kill(pid, signal.SIGCONT)
        recovered = await stage.nth(v.EngineRecovered, 1)
        assert recovered.incarnation == 1
        assert recovered.hung_us >= hung.silent_us
        assert stage.phase == "ready"
    assert [e.reason for e in stage.events(v.EngineDied)] == ["stopped"]


async def test_a_held_worker_is_left_alone_until_it_is_released(tmp_path: Path) -> None:
    async with staged(tmp_path, hang_restart_s=0.0) as stage:
        await stage.nth(v.EngineReady, 1)
        async with stage.log.writer("fleet") as fleet:
            fleet.append(effect("d1", EffectKind.HOLD))
            await stage.nth(v.EffectApplied, 1)
            await hangs(stage)
            await outlast(1.5, "looks at the engine, one every half second")
            assert stage.events(v.EngineDied) == []
            fleet.append(effect("d2", EffectKind.RELEASE))
            assert (await stage.nth(v.EngineDied, 1)).reason == "hung"
            await stage.nth(v.EngineReady, 2)


async def test_an_engine_that_steps_is_not_probed(tmp_path: Path) -> None:
    """The page it counts its steps on is enough: its server answers nobody here."""
    async with staged(tmp_path) as stage:
        await stage.nth(v.EngineReady, 1)
        page = Progress(str(stage.directory.progress))
        os.kill(stage.events(v.EngineStarted)[0].pid, signal.SIGUSR1)
        until, steps = time.monotonic() + 4.0, 0
        while time.monotonic() < until:
            steps += 1
            page.write(steps=steps, began_ns=0, running=1, waiting=0, kv_used=1)
            await asyncio.sleep(0.05)
        assert stage.events(v.EngineHung) == []
        assert await stage.nth(v.EngineHung, 1), "it stepped no more"
