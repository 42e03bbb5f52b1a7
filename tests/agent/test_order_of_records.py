"""In which order an agent writes of its engine, and of which engine it takes reports."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from relume.engine_shim.agent.agent_logging import make_logger
from relume.engine_shim.agent.engine_process.child import EngineProcesses
from relume.engine_shim.agent.journal import Journal
from relume.engine_shim.agent.report_server import ReportServer
from relume.events import vocabulary as v
from relume.events.log.codec import decode, encode
from relume.events.log.errors import LogFull
from relume.events.log.memory import MemoryLog, MemoryWriter
from relume.events.wire.reports import Hello, hello_frame
from tests.agent.stage import Stage, staged
from tests.agent.test_reports import Desk, closed, step
from tests.pace import outlast
from tests.suite.outcomes import inconclusive

STARTED = v.EngineStarted("w0", 1, 2, 3)


def written(log: MemoryLog) -> list[Any]:
    segments = (segment for group in log.groups for segment in group.segments)
    return [decode(record) for segment in segments for record in segment.records]


async def test_a_step_does_not_overtake_a_fact_that_waits_for_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log, append, full = MemoryLog(), MemoryWriter.append, [True]

    def bounded(self: MemoryWriter, *events: Any) -> int:
        if full[0]:
            raise LogFull(self.stream, 1)
        return append(self, *events)

    monkeypatch.setattr(MemoryWriter, "append", bounded)
    async with log.writer("w.w0") as writer:
        journal = Journal(writer, make_logger("error"))
        journal.record(STARTED)
        full[0] = False
        assert not journal.step(step(1)), "to be sent again"
        assert await journal.flush(5)
        assert journal.step(step(1))
    assert [type(event) for event in written(log)] == [v.EngineStarted, v.EngineStep]


async def test_steps_that_wait_to_be_merged_are_written_before_the_death_of_their_engine() -> None:
    log = MemoryLog()
    async with log.writer("w.w0") as writer:
        journal = Journal(writer, make_logger("error"))
        journal.shed(True)
        for number in (1, 2):
            assert journal.step(encode(replace(decode(step(number)), changes=())))
        assert written(log) == []
        journal.record(v.EngineDied("w0", 1, "killed"))
        assert await journal.flush(5)
    steps, died = written(log)
    assert steps.step == 2 and type(died) is v.EngineDied


async def test_reports_of_an_earlier_engine_are_not_taken_for_the_present_ones(
    tmp_path: Path,
) -> None:
    log = MemoryLog()
    async with log.writer("w.w0") as writer:
        desk = Desk(tmp_path / "agent.sock", log, writer)
        async with desk.server:
            desk.server.begin(2)
            late = desk.connect()
            late.sendall(hello_frame(Hello(os.getpid(), "core", 1)))
            async with asyncio.timeout(5):
                while not closed(late):
                    await asyncio.sleep(0.01)
            assert desk.hellos == []


async def test_the_last_steps_of_an_engine_are_written_before_its_death(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are read from its socket when the agent knows that it is dead."""
    end = ReportServer.end

    def with_a_last_step(self: ReportServer) -> None:
        self._journal.step(step(99))
        end(self)

    monkeypatch.setattr(ReportServer, "end", with_a_last_step)
    async with staged(tmp_path) as stage:
        await kill(stage)
        await stage.nth(v.EngineDied, 1)
        events = stage.events()
        (last,) = [at for at, e in enumerate(events) if getattr(e, "step", 0) == 99]
        (died,) = [at for at, e in enumerate(events) if type(e) is v.EngineDied]
        assert last < died


async def kill(stage: Stage) -> None:
    await stage.nth(v.EngineReady, 1)
    os.kill(stage.events(v.EngineStarted)[0].pid, signal.SIGKILL)


async def test_an_agent_that_leaves_while_it_cleans_up_records_the_death_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    destroy, cleaning = EngineProcesses.destroy, asyncio.Event()

    async def slow_once(self: EngineProcesses) -> None:
        if not cleaning.is_set():
            cleaning.set()
            await asyncio.Event().wait()  # until the agent leaves
        await destroy(self)

    monkeypatch.setattr(EngineProcesses, "destroy", slow_once)
    async with staged(tmp_path) as stage:
        await kill(stage)
        async with asyncio.timeout(20):
            await cleaning.wait()
    assert [e.incarnation for e in stage.events(v.EngineDied)] == [1]


@pytest.mark.full
async def test_the_timeout_for_readiness_ends_with_readiness(tmp_path: Path) -> None:
    async with staged(tmp_path, ready_timeout_s=3.0) as stage:
        ready = await stage.until(lambda: stage.events(v.EngineReady, v.EngineDied))
        if type(ready[0]) is not v.EngineReady:
            inconclusive("the machine is too busy to start an engine in time")
        await outlast(3.1, "the timeout for readiness")
        assert stage.phase == "ready" and not stage.events(v.EngineDied)
