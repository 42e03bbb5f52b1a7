"""An agent whose log is gone from etcd: its engine serves on, and is stated again in the next log."""

from __future__ import annotations

from pathlib import Path

import pytest

from relume.engine_shim.agent.agent_errors import LogNotFollowed
from relume.engine_shim.agent.agent_logging import make_logger
from relume.engine_shim.agent.engine_process.process_identity import ProcessId, is_alive
from relume.engine_shim.agent.journal import Journal
from relume.engine_shim.agent.run_directory import RunDirectory
from relume.engine_shim.agent.stream_ownership import log_change
from relume.engine_shim.agent.stream_ownership.log_change import LogChange
from relume.engine_shim.engine.progress import Progress
from relume.events import vocabulary as v
from relume.events.etcd.errors import AccessRefused
from relume.events.log.errors import LogUnavailable
from relume.events.log.memory import MemoryLog
from relume.events.vocabulary.enums import EffectKind
from tests.agent.stage import staged

LIFE = v.WorkerRegistered, v.EngineStarted, v.EngineReady, v.EngineDied


async def test_a_running_engine_is_adopted_by_the_new_log(tmp_path: Path) -> None:
    async with staged(tmp_path / "run", "--pace", "0.02") as stage:
        ready = await stage.nth(v.EngineReady, 1)
        started = await stage.nth(v.EngineStarted, 1)
        await stage.until(lambda: stage.directory.state.log == "log0")
        stage.log.replace()
        assert await stage.nth(v.EngineReady, 1) == ready
        assert [type(e) for e in stage.events(*LIFE)] == list(LIFE[:3])
        assert await stage.nth(v.EngineStarted, 1) == started
        assert is_alive(ProcessId(started.pid, started.start_ticks))
        await stage.nth(v.EngineStep, 3)
        assert stage.directory.state.log == "log1"
        page = Progress(str(stage.directory.progress))
        assert page.statements() == 1, "its engine reports all requests that it has"
        state = stage.agent.describe()["log"]
        assert not state["replaced"] and state["epoch"] == stage.directory.state.epoch


async def test_the_new_log_learns_that_no_more_is_read_of_the_engine(tmp_path: Path) -> None:
    async with staged(tmp_path / "run", "--garbage", "--pace", "0.02") as stage:
        await stage.until(lambda: any(e.muted for e in stage.events(v.ReportsDropped)))
        await stage.until(lambda: stage.directory.state.log == "log0")
        stage.log.replace()
        await stage.nth(v.EngineReady, 1)
        dropped = await stage.nth(v.ReportsDropped, 1)
        assert dropped.muted and dropped.incarnation == 1


async def test_an_idle_agent_notices_the_new_log_by_its_id(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(log_change, "ID_POLL_S", 0.05)
    async with staged(tmp_path / "run") as stage:
        await stage.nth(v.EngineReady, 1)
        await stage.until(lambda: stage.directory.state.log == "log0")
        stage.log.replace()
        await stage.nth(v.EngineReady, 1)
        assert stage.agent.describe()["engine"]["incarnation"] == 1


async def test_effects_of_the_new_log_are_carried_out_whatever_was_applied_before(
    tmp_path: Path,
) -> None:
    """Decisions of two logs may have the same name."""
    async with staged(tmp_path / "run", "--pace", "0.02") as stage:
        await stage.nth(v.EngineReady, 1)
        await stage.until(lambda: stage.directory.state.log == "log0")
        restart = v.EffectsDecided(
            decision="r0.5.1",
            basis=v.Basis(1, 0),
            cause="admin",
            effects=(v.Effect(EffectKind.RESTART, "w0"),),
        )
        for life in (2, 3):
            async with stage.log.writer("fleet") as leader:
                leader.append(restart)
                await stage.until(lambda life=life: len(stage.events(v.EffectApplied)) == 1)
                await stage.until(
                    lambda life=life: stage.agent.describe()["engine"]["incarnation"] == life
                )
            await stage.until(lambda: stage.phase == "ready")
            (applied,) = stage.events(v.EffectApplied)
            assert (applied.decision, applied.outcome) == ("r0.5.1", "applied")
            stage.log.replace()


async def test_an_agent_that_starts_in_another_log_begins_there_at_once(tmp_path: Path) -> None:
    with RunDirectory(tmp_path / "run") as directory:
        directory.remember_log("former")
        directory.update(applied=(("r0.5.1", 0),))
    async with staged(tmp_path / "run") as stage:
        await stage.nth(v.EngineReady, 1)
        state = stage.directory.state
        assert (state.log, state.applied) == ("log0", ())
        assert len(stage.events(v.WorkerRegistered)) == 1


async def test_the_engine_is_started_under_the_highest_epoch_of_any_log(tmp_path: Path) -> None:
    """State daemons of other hosts refuse an engine with a lower epoch than they have seen."""
    with RunDirectory(tmp_path) as directory:
        directory.remember_log("one")
        directory.remember_epoch(900)
        directory.remember_log("two")
        directory.remember_epoch(7)
        assert (directory.state.epoch, directory.state.fence) == (7, 900)
        directory.remember_epoch(901)
        assert directory.state.fence == 901


class Etcd:
    """Which log etcd holds, by script: an id, or an error."""

    def __init__(self, *script: str | Exception, empty: bool = False) -> None:
        self.script = list(script)
        self.empty = empty

    async def identity(self) -> str:
        found = self.script.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    async def is_empty(self) -> bool:
        return self.empty


def change_of(etcd: Etcd, directory: RunDirectory) -> LogChange:
    return LogChange(etcd, directory, make_logger("error"))  # type: ignore[arg-type]


async def test_a_restored_backup_is_waited_out_until_a_new_log_begins(
    tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(log_change, "WAIT_POLL_S", 0.0)
    with RunDirectory(tmp_path) as directory:
        directory.remember_log("one")
        etcd = Etcd("one", LogUnavailable("away"), "", "one", "two", "never read")
        await change_of(etcd, directory).new_log()
        assert etcd.script == ["never read"] and directory.state.log == "two"


async def test_an_empty_etcd_is_a_new_log_without_a_name(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as directory:
        directory.remember_log("one")
        await change_of(Etcd("", empty=True), directory).new_log()
        assert directory.state.log == ""


async def test_an_agent_that_may_not_read_the_new_log_says_what_it_needs(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as directory:
        directory.remember_log("one")
        with pytest.raises(LogNotFollowed, match="give --etcd credentials") as refused:
            await change_of(Etcd(AccessRefused("no")), directory).new_log()
        assert refused.value.status == 1


async def test_what_a_journal_takes_between_two_logs_is_in_neither(tmp_path: Path) -> None:
    log = MemoryLog()
    async with log.writer("w.w0") as former:
        journal = Journal(former, make_logger("error"))
        epochs: list[int] = []
        journal.on_epoch(epochs.append)
        journal.suspend()
        journal.record(v.EngineDied("w0", 1, "killed"))
        assert former.position == 0
    async with log.writer("w.w1") as writer:
        journal.continue_in(writer)
        assert epochs == [writer.epoch]
        journal.record(v.EngineDied("w0", 2, "killed"))
        assert writer.position == 1 and not journal.is_fenced
