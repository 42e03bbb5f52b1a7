"""The agent and the state daemon of its host: who outlives whom, and what the log is told."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from relume.controlplane.replay import rendering
from relume.engine_shim.agent.engine_process.process_identity import (
    ProcessId,
    is_alive,
    marked_processes,
    stat_of,
)
from relume.engine_shim.agent.host_daemon import coverage_events
from relume.engine_shim.agent.host_daemon.checkpoint_options import kernel_boot
from relume.engine_shim.checkpoints.link.block_stream import BlockOut, scatter
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.wire.kv import kv_messages as m
from relume.policies.state.coverage import covered_tokens
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group
from tests.agent.host import Host, left, until
from tests.agent.stage import ENGINE, Stage, staged
from tests.etcd_server import EtcdServer
from tests.signals import stop
from tests.state_daemon.daemon import BLOCK, Cache, hello, local, peer_of, tokens_of

CHECKPOINTS: dict[str, Any] = {
    "checkpoint_mb": 8,
    "checkpoint_reserve_mb": 0,
    "checkpoint_allow_unlocked": True,
}


def write(socket: Path, request: str, blocks: int = 3) -> None:
    """Another worker's engine checkpoints a request here."""
    outs = [
        BlockOut(
            request=request, child=0, rank=0, index=i, attempt=1, block_id=i, tokens=tokens_of(i)
        )
        for i in range(blocks)
    ]
    with peer_of(local(str(socket))) as writer:
        assert scatter(Cache(blocks), outs, writer) == blocks and writer.drained(5)


def drop(socket: Path, request: str) -> None:
    with peer_of(local(str(socket))) as writer:
        writer.ask(m.Drop(0, (request,), 1), 5.0)


def held(socket: Path) -> set[str]:
    with peer_of(local(str(socket)), hello=hello("control")) as control:
        answer, _ = control.ask(m.Changes(0, 0), 5.0)
        return {change.request for change in answer.changes if not change.reason}


def recorded(run: Path) -> ProcessId | None:
    record = json.loads((run / "state.json").read_text())["daemon"]
    return ProcessId(*record["process"]) if record else None


def fold(stage: Stage) -> Fleet:
    fleet = Fleet()
    for group in stage.log.groups:
        apply_group(fleet, group)
    return fleet


@pytest.fixture(autouse=True)
def _none_left(tmp_path: Path) -> Iterator[None]:
    """What a failed test leaves is ended; what a sound one leaves fails it."""
    yield
    daemons = [*marked_processes(f"RELUME_STATE_SOCKET={tmp_path / 'run' / 'state.sock'}")]
    for process in daemons:
        os.kill(process.pid, signal.SIGKILL)
    assert not daemons


@pytest.mark.full
async def test_it_is_started_told_of_and_ended_with_its_worker(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with staged(run, **CHECKPOINTS) as stage:
        started = await stage.nth(v.StateDaemonStarted, 1)
        assert (started.worker, started.local) == ("w0", f"unix:{run / 'state.sock'}")
        assert started.budget_bytes == 8 << 20 and started.address == ""
        process = recorded(run)
        assert process is not None and is_alive(process)
        await asyncio.to_thread(write, run / "state.sock", "q")
        ack = await stage.nth(v.CheckpointAcknowledged, 1)
        assert (ack.holder, ack.boot, ack.request) == ("w0", started.boot, "q")
        assert covered_tokens(fold(stage), "w0", "q") == 3 * BLOCK
        await asyncio.to_thread(drop, run / "state.sock", "q")
        assert (await stage.nth(v.CheckpointDropped, 1)).reason == "finished"
        reported = await stage.nth(v.StateDaemonReported, 1)
        assert dict(reported.figures)["memory_budget"] == 8 << 20
        state = stage.agent.describe()["state_daemon"]
        assert (state["pid"], state["boot"]) == (process.pid, started.boot)
    assert not is_alive(process) and recorded(run) is None
    kinds = [type(e) for e in stage.events(v.StateDaemonLost, v.WorkerDeregistered)]
    assert kinds == [v.StateDaemonLost, v.WorkerDeregistered]


async def test_an_engine_that_failed_its_restore_takes_no_part_and_the_log_says_why(
    tmp_path: Path,
) -> None:
    """Its host's daemon holds for others as ever."""
    async with staged(tmp_path / "run", "--inexact", "restore=it differs", **CHECKPOINTS) as stage:
        ready = await stage.nth(v.EngineReady, 1)
        assert (ready.family, ready.block_bytes) == ("", 0)
        assert (ready.exact, ready.inexact) == (("greedy",), (("restore", "it differs"),))
        await stage.nth(v.StateDaemonStarted, 1)
        assert fold(stage).holders["w0"].alive
        assert "not exact: restore (it differs)" in rendering.brief(ready)


@pytest.mark.full
async def test_a_killed_daemon_covers_nothing_and_another_one_says_so(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with staged(run, **CHECKPOINTS) as stage:
        first = await stage.nth(v.StateDaemonStarted, 1)
        ready = await stage.nth(v.EngineReady, 1)
        assert (ready.family, ready.block_bytes) == ("f", 4096)
        assert fold(stage).holders["w0"].family == "f"
        await asyncio.to_thread(write, run / "state.sock", "q")
        await stage.nth(v.CheckpointAcknowledged, 1)
        process = recorded(run)
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        lost = await stage.nth(v.StateDaemonLost, 1)
        assert (lost.boot, lost.reason) == (first.boot, "killed SIGKILL")
        assert covered_tokens(fold(stage), "w0", "q") == 0
        second = await stage.nth(v.StateDaemonStarted, 2)
        assert second.boot != first.boot and recorded(run) != process
        assert fold(stage).holders["w0"].family == "f", "its engine is what it was"
        assert covered_tokens(fold(stage), "w0", "q") == 0
        await asyncio.to_thread(write, run / "state.sock", "q", 2)
        await stage.until(lambda: covered_tokens(fold(stage), "w0", "q") == 2 * BLOCK)
        assert not stage.events(v.EngineDied), "the engine has nothing to do with it"


@pytest.mark.full
async def test_what_the_leader_releases_is_dropped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with staged(run, **CHECKPOINTS) as stage, stage.log.writer("fleet") as leader:
        await stage.nth(v.StateDaemonStarted, 1)
        for request in ("a", "b"):
            await asyncio.to_thread(write, run / "state.sock", request)
        await stage.until(lambda: set(fold(stage).holders["w0"].covered) == {"a", "b"})
        leader.append(v.CheckpointsReleased(("a", "unknown")))
        dropped = await stage.nth(v.CheckpointDropped, 1)
        assert dropped.request == "a"
        assert await asyncio.to_thread(held, run / "state.sock") == {"b"}


@pytest.mark.full
async def test_what_the_leader_voids_is_dropped(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with staged(run, **CHECKPOINTS) as stage, stage.log.writer("fleet") as leader:
        await stage.nth(v.StateDaemonStarted, 1)
        for request in ("a", "b"):
            await asyncio.to_thread(write, run / "state.sock", request)
        await stage.until(lambda: set(fold(stage).holders["w0"].covered) == {"a", "b"})
        leader.append(v.CheckpointsVoided("w1", 1, (("a", 1), ("unknown", 3))))
        dropped = await stage.nth(v.CheckpointDropped, 1)
        assert dropped.request == "a"
        assert await asyncio.to_thread(held, run / "state.sock") == {"b"}


class OldDaemon:
    """It does not know `Void`: a link to it."""

    daemon_epoch = 1

    def __init__(self, **figures: int) -> None:
        self.figures = figures
        self.asked: list[Any] = []

    def ask(self, message: Any, wait_s: float) -> tuple[Any, memoryview]:
        self.asked.append(message)
        stats = SimpleNamespace(boot="b1", figures={"memory_budget": 1, **self.figures})
        answers = {
            m.StatsAsk: stats,
            m.Changes: m.ChangesAnswer(seq=0, cursor=0, boot="b1", changes=()),
        }
        return answers.get(type(message)), memoryview(b"")


@pytest.mark.parametrize("is_old", [True, False])
async def test_a_daemon_that_cannot_void_drops_instead(is_old: bool) -> None:
    """It may be older than its agent. What it does not know closes the connection."""
    anything: Any = SimpleNamespace(
        worker="w0", backoff_s=(1.0,), stable_after_s=1.0, address="", local="", machine="",
        record=lambda *events: None, on_epoch=lambda call: None, info=lambda *told, **more: None,
        named=lambda boot: None,
    )  # fmt: skip
    keeper = coverage_events.StateDaemonKeeper(anything, anything, anything, anything, anything)
    daemon: Any = OldDaemon(**({} if is_old else {"voided": 0}))
    await keeper._introduce(daemon, coverage_events.CoverageReports("w0"), 1.0)
    del daemon.asked[:]
    keeper.void((("a", 1), ("b", 2), ("c", 1)))
    await keeper._drop_voided(daemon)
    await keeper._drop_voided(daemon)
    void = m.Void(0, (("a", 1), ("b", 2), ("c", 1)))
    drops = [m.Drop(0, ("a", "c"), 1), m.Drop(0, ("b",), 2)]
    assert daemon.asked == (drops if is_old else [void])


@pytest.mark.full
async def test_one_that_answers_no_more_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coverage_events, "ANSWER_S", 1.0)
    run = tmp_path / "run"
    async with staged(run, **CHECKPOINTS) as stage:
        await stage.nth(v.StateDaemonStarted, 1)
        process = recorded(run)
        assert process is not None
        stop(process.pid)
        await stage.nth(v.StateDaemonLost, 1)
        assert not is_alive(process)
        await stage.nth(v.StateDaemonStarted, 2)


@pytest.mark.full
async def test_a_budget_the_host_has_not_costs_the_checkpoints_only(tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = {**CHECKPOINTS, "checkpoint_mb": 1 << 30}
    async with staged(run, **settings) as stage:
        await stage.nth(v.EngineReady, 1)
        await stage.until(lambda: stage.agent.describe()["state_daemon"]["restarts"] >= 2)
        assert "can be spared" in (run / "daemon.log").read_text()
        assert not stage.events(v.StateDaemonStarted, v.StateDaemonLost, v.EngineDied)


@pytest.mark.full
async def test_a_resumed_stream_gets_all_reports_again(tmp_path: Path) -> None:
    run = tmp_path / "run"
    async with staged(run, **CHECKPOINTS) as stage:
        await stage.nth(v.StateDaemonStarted, 1)
        await asyncio.to_thread(write, run / "state.sock", "q")
        await stage.nth(v.CheckpointAcknowledged, 1)
        daemon = stage.agent._daemon
        assert daemon is not None
        daemon.renew()
        first, second = await stage.until(
            lambda: found if len(found := stage.events(v.StateDaemonStarted)) == 2 else None
        )
        assert first == second
        await stage.nth(v.CheckpointAcknowledged, 2)
        assert covered_tokens(fold(stage), "w0", "q") == 3 * BLOCK


async def test_a_process_that_only_has_its_pid_is_left_alone(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    innocent = subprocess.Popen(["sleep", "60"])
    try:
        stat = stat_of(innocent.pid)
        assert stat is not None
        process = [innocent.pid, stat.id.start_ticks - 1]
        record = {"kernel_boot": kernel_boot(), "process": process, "settings": ""}
        (run / "state.json").write_text(json.dumps({"daemon": record}))
        async with staged(run, **CHECKPOINTS) as stage:
            await stage.nth(v.StateDaemonStarted, 1)
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


# --- over the agent's death, on a real etcd ------------------------------------------------


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    with EtcdServer() as etcd:
        config = EtcdConfig(endpoints=(etcd.url.removeprefix("http://"),))
        async with EtcdLog(config) as log:
            settings = {k: str(v).lower() for k, v in CHECKPOINTS.items()}
            found = Host(tmp_path, etcd, log, **settings)
            found.spawn("zygote", *ENGINE, "--as", "zygote", str(tmp_path / "z.sock"))
            try:
                yield found
            finally:
                await found.stop()


async def covered(host: Host) -> dict[str, int]:
    fleet = Fleet()
    for group in await host.log.reader().read():
        apply_group(fleet, group)
    return {
        request: covered_tokens(fleet, "w0", request) for request in fleet.holders["w0"].covered
    }


async def cover(host: Host, expected: dict[str, int]) -> None:
    """Wait until the log says that this is what is covered."""
    deadline = time.monotonic() + 60
    while (found := await covered(host)) != expected:
        assert time.monotonic() < deadline, (found, host.words())
        await asyncio.sleep(0.05)


@pytest.mark.etcd
async def test_it_outlives_agent_and_engine_and_the_next_agent_takes_it_over(host: Host) -> None:
    run = host.path / "run"
    agent = host.agent()
    first = await host.nth(v.StateDaemonStarted, 1)
    await host.nth(v.EngineReady, 1)
    for request in ("kept", "ended"):
        await asyncio.to_thread(write, run / "state.sock", request)
    await cover(host, {"kept": 3 * BLOCK, "ended": 3 * BLOCK})
    process, engine = recorded(run), host.engine
    assert process is not None
    os.kill(engine.pid, signal.SIGKILL)
    await host.nth(v.EngineReady, 2)
    assert is_alive(process)
    agent.kill()
    agent.wait()
    await until(lambda: not host.left_over())
    assert is_alive(process) and await asyncio.to_thread(held, run / "state.sock") == {
        "kept",
        "ended",
    }
    await asyncio.to_thread(drop, run / "state.sock", "ended")
    agent = host.agent()
    second = await host.nth(v.StateDaemonStarted, 2)
    assert second.boot == first.boot and recorded(run) == process
    assert await covered(host) == {"kept": 3 * BLOCK}, "what ended meanwhile covers nothing"
    agent.terminate()
    assert await left(agent) == 0, host.words()
    assert not is_alive(process)
    assert await covered(host) == {}


@pytest.mark.etcd
async def test_one_asked_to_leave_while_it_waits_takes_the_daemon_along(host: Host) -> None:
    agent = host.agent()
    await host.nth(v.StateDaemonStarted, 1)
    process = recorded(host.path / "run")
    assert process is not None
    agent.kill()
    agent.wait()
    await until(lambda: not host.left_over())
    host.etcd.stop()
    try:
        agent = host.agent()
        await until(lambda: "waiting for the worker's stream" in host.words())
        assert is_alive(process)
        agent.terminate()
        assert await left(agent) == 0, host.words()
        assert not is_alive(process)
    finally:
        host.etcd.cont()


@pytest.mark.etcd
async def test_other_settings_are_another_daemon(host: Host) -> None:
    run = host.path / "run"
    agent = host.agent()
    first = await host.nth(v.StateDaemonStarted, 1)
    process = recorded(run)
    assert process is not None
    agent.kill()
    agent.wait()
    await until(lambda: not host.left_over())
    host.settings["checkpoint_mb"] = "4"
    agent = host.agent()
    second = await host.nth(v.StateDaemonStarted, 2)
    assert second.boot != first.boot and second.budget_bytes == 4 << 20
    assert not is_alive(process)
    process = recorded(run)
    assert process is not None
    agent.kill()
    agent.wait()
    await until(lambda: not host.left_over())
    host.settings["checkpoint_mb"] = "0"
    agent = host.agent()
    assert (await host.nth(v.StateDaemonLost, 1)).boot == second.boot
    await until(lambda: not is_alive(process))
    agent.terminate()
    assert await left(agent) == 0, host.words()


@pytest.mark.etcd
async def test_coverage_waits_out_an_etcd_that_is_away(host: Host) -> None:
    run = host.path / "run"
    agent = host.agent()
    await host.nth(v.StateDaemonStarted, 1)
    host.etcd.stop()
    try:
        await asyncio.to_thread(write, run / "state.sock", "q")
        await until(lambda: _positions(host) >= 1)
    finally:
        host.etcd.cont()
    await cover(host, {"q": 3 * BLOCK})
    agent.terminate()
    assert await left(agent) == 0, host.words()


def _positions(host: Host) -> int:
    """Bytes of the log that wait on the agent's disk."""
    return int(host.status()["log"]["spooled_bytes"])
