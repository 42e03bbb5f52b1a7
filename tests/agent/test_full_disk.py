"""The agent on a disk without room: what runs goes on, nothing is done that could be forgotten."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from relume.engine_shim.agent.__main__ import main
from relume.engine_shim.agent.agent_logging import make_logger
from relume.engine_shim.agent.engine_process.orphan_engine import kill_orphan
from relume.engine_shim.agent.engine_process.process_identity import (
    ProcessId,
    is_alive,
    marked_processes,
    stat_of,
)
from relume.engine_shim.agent.run_directory import AgentState, EngineRecord, RunDirectory
from relume.engine_shim.engine.hosts import deathwatch
from relume.engine_shim.engine.progress import Progress
from relume.events import vocabulary as v
from relume.events.log.memory import MemoryLog
from tests.agent.host import until
from tests.agent.stage import ROOT, environment, staged
from tests.full_disk import full_disk


def on_disk(path: Path) -> AgentState:
    return msgspec.json.decode((path / "state.json").read_bytes(), type=AgentState)


def test_what_happened_is_known_at_once_and_written_when_there_is_room(tmp_path: Path) -> None:
    record = EngineRecord(1, ProcessId(10, 20))
    with RunDirectory(tmp_path) as run:
        run.next_incarnation()
        with full_disk():
            run.remember_engine(record)
            assert run.state.engine == record and "too large" in run.unsaved
            assert not run.save()
        assert on_disk(tmp_path).engine is None
        assert run.save() and not run.unsaved
        assert on_disk(tmp_path) == run.state


def test_nothing_is_given_that_could_be_given_again(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.next_incarnation()
        with full_disk():
            with pytest.raises(OSError, match="too large"):
                run.next_incarnation()
            with pytest.raises(OSError, match="too large"):
                run.remember_applied(("d", 0), held=True, draining=False)
            assert (run.state.incarnation, run.state.held) == (1, False)
            run.remember_epoch(7)
        assert run.next_incarnation() == 2, "and what was noted meanwhile goes with it"
        assert (on_disk(tmp_path).epoch, on_disk(tmp_path).incarnation) == (7, 2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lock", "state.json"]


async def test_an_engine_that_dies_is_started_again_when_there_is_room(tmp_path: Path) -> None:
    async with staged(tmp_path) as stage:
        await stage.nth(v.EngineReady, 1)
        with full_disk():
            os.kill(stage.events(v.EngineStarted)[0].pid, signal.SIGKILL)
            await stage.nth(v.EngineDied, 1)
            await stage.nth(v.EngineRestartScheduled, 3)
            assert len(stage.events(v.EngineStarted)) == 1
            assert "too large" in stage.agent.describe()["unsaved"]
        assert (await stage.nth(v.EngineReady, 2)).incarnation == 2
        assert on_disk(tmp_path).engine.incarnation == 2


async def test_an_agent_starts_on_a_full_disk_and_its_engine_when_there_is_room(
    tmp_path: Path,
) -> None:
    async with staged(tmp_path) as stage:
        await stage.nth(v.EngineReady, 1)
    with ExitStack() as full:
        full.enter_context(full_disk())
        async with staged(tmp_path) as stage:
            await stage.nth(v.EngineRestartScheduled, 2)
            assert stage.events(v.EngineStarted) == []
            full.close()
            assert (await stage.nth(v.EngineReady, 1)).incarnation == 2


async def test_an_effect_that_cannot_be_remembered_waits_to_be_stated_again(
    tmp_path: Path,
) -> None:
    log = MemoryLog()
    async with staged(tmp_path, log=log) as stage, log.writer("fleet") as leader:
        await stage.nth(v.EngineReady, 1)
        decided = v.EffectsDecided(
            decision="d1", basis=v.Basis(1, 0), cause="admin", effects=(v.Effect("hold", "w0"),)
        )
        with full_disk():
            leader.append(
                decided,
                v.DetailDecided(
                    detail="shed", was="full", database_bytes=1, quota_bytes=1, shed_percent=1
                ),
            )
            await stage.until(lambda: stage.agent.describe()["log"]["shedding"])
            assert stage.events(v.EffectApplied) == [] and not stage.directory.state.held
        leader.append(msgspec.structs.replace(decided, again=0))
        applied = await stage.nth(v.EffectApplied, 1)
        assert (applied.decision, applied.outcome) == ("d1", "applied")
        assert on_disk(tmp_path).held


async def test_an_orphan_that_could_not_be_recorded_is_killed_all_the_same(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        assert await kill_orphan(run, "w0", make_logger("error")) is None
        run.next_incarnation()
        name, _, socket = run.marker.partition("=")
        sleeping = [sys.executable, "-c", "import time; time.sleep(60)"]
        child = subprocess.Popen(sleeping, env={name: socket}, start_new_session=True)
        try:
            process = stat_of(child.pid).id
            # An environment appears a moment after Popen has returned.
            await until(lambda: process in marked_processes(run.marker))
            died = await kill_orphan(run, "w0", make_logger("error"))
            assert died is not None and (died.incarnation, died.reason) == (1, "killed")
            assert not is_alive(process)
        finally:
            child.kill()
            child.wait()
        assert await kill_orphan(run, "w0", make_logger("error")) is None


def test_an_unusable_run_directory_is_an_error_with_its_remedy(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    directory = str(tmp_path / "file" / "run")
    flags = ["--worker", "w0", "--model", "m", "--host-kind", "serve", "--run-dir", directory]
    assert main([*flags, "--etcd", "http://127.0.0.1:1"]) == 1
    said = capfd.readouterr().err
    assert "RunDirectoryUnusable" in said and "make room" in said and "Traceback" not in said


def test_pages_the_disk_has_no_room_for_are_refused_before_they_are_touched(
    tmp_path: Path,
) -> None:
    with full_disk():
        with pytest.raises(OSError, match="too large"):
            Progress(str(tmp_path / "progress"))
        assert deathwatch.hold(str(tmp_path / "alive")) is None
    Progress(str(tmp_path / "progress"))
    assert os.stat(tmp_path / "progress").st_blocks, "it has its room before it is written to"


def test_lines_that_stderr_does_not_take_end_nothing(tmp_path: Path) -> None:
    said = _run(
        tmp_path,
        """
        from relume.engine_shim.agent.agent_logging import make_logger
        from tests.full_disk import full_disk
        logger = make_logger("info", worker="w0")
        logger.info("before")
        with full_disk():
            for number in range(400):
                logger.info("meanwhile", number=number, padding="x" * 100)
        logger.info("after")
        """,
    )
    lines = [msgspec.json.decode(line) for line in said.splitlines()]
    assert [line["event"] for line in lines[:1] + lines[-2:]] == [
        "before", "log lines were refused", "after",
    ]  # fmt: skip
    assert lines[-2]["lines"] == 400 and {line["worker"] for line in lines} == {"w0"}


def test_an_engine_whose_last_words_find_no_room_does_not_become_a_second_zygote(
    tmp_path: Path,
) -> None:
    _run(
        tmp_path,
        """
        import os, sys, types
        from relume.engine_shim.engine.hosts.zygote import FAILED_EXIT, Zygote
        from tests.full_disk import full_disk

        def main(argv):
            sys.stdout.write("words")
            raise RuntimeError("no model")

        sys.modules["relume.engine_shim.engine.hosts.inproc_host"] = types.SimpleNamespace(main=main)
        from relume import engine_shim
        engine_shim.engine_host = sys.modules["relume.engine_shim.engine.hosts.inproc_host"]
        zygote = Zygote("z.sock")
        with full_disk():
            pid = zygote._fork({}, [], "engine.log")
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == FAILED_EXIT
        """,
    )


def _run(directory: Path, program: str) -> str:
    """What a program of its own process said on stderr, which is a file."""
    told = directory / "stderr"
    with open(told, "wb") as errors:
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(program)],
            cwd=directory,
            env={**environment(), "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": ""},
            stderr=errors,
            timeout=60,
        )
    assert done.returncode == 0, told.read_text()
    return told.read_text()
