"""The state file and the facts of /proc that everything about orphans stands on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relume.engine_shim.agent.agent_errors import RunDirectoryBusy, StateUnreadable
from relume.engine_shim.agent.engine_process.process_identity import (
    ProcessId,
    describe_exit,
    exit_status,
    free_port,
    is_alive,
    marked_processes,
    open_pidfd,
    session_members,
    signal_process,
    stat_of,
)
from relume.engine_shim.agent.run_directory import MAX_APPLIED, EngineRecord, RunDirectory
from relume.events.settings.config_error import ConfigError


def test_incarnations_are_never_given_twice(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        assert [run.next_incarnation() for _ in range(3)] == [1, 2, 3]
    with RunDirectory(tmp_path) as run:
        assert run.next_incarnation() == 4


def test_what_is_remembered_comes_back(tmp_path: Path) -> None:
    record = EngineRecord(2, ProcessId(10, 20), (ProcessId(11, 21),))
    with RunDirectory(tmp_path) as run:
        run.remember_engine(record)
        run.remember_epoch(77)
        for index in range(MAX_APPLIED + 5):
            run.remember_applied(("d", index), held=True, draining=False)
    with RunDirectory(tmp_path) as run:
        assert run.state.engine == record
        assert (run.state.epoch, run.state.held, run.state.draining) == (77, True, False)
        assert len(run.state.applied) == MAX_APPLIED
        assert run.state.applied[-1] == ("d", MAX_APPLIED + 4)


def test_two_agents_do_not_share_a_directory(tmp_path: Path) -> None:
    with RunDirectory(tmp_path), pytest.raises(RunDirectoryBusy), RunDirectory(tmp_path):
        pass


@pytest.mark.parametrize("content", [b"", b"{", b'{"incarnation": "x"}', b"\xff\xff"])
def test_a_damaged_state_file_is_refused_not_forgotten(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "state.json").write_bytes(content)
    with pytest.raises(StateUnreadable), RunDirectory(tmp_path):
        pass
    assert (tmp_path / "state.json").read_bytes() == content


def test_a_crash_while_writing_leaves_the_old_state(tmp_path: Path) -> None:
    with RunDirectory(tmp_path) as run:
        run.next_incarnation()
    (tmp_path / "state.tmp").write_bytes(b"{half")
    with RunDirectory(tmp_path) as run:
        assert run.state.incarnation == 1


def test_a_directory_too_deep_for_a_socket_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError), RunDirectory(tmp_path / ("x" * 120)):
        pass


def test_a_process_is_known_by_pid_and_start_time() -> None:
    child = subprocess.Popen(["sleep", "60"], start_new_session=True)
    process = stat_of(child.pid).id
    other = ProcessId(process.pid, process.start_ticks + 1)
    assert is_alive(process) and not is_alive(other)
    assert open_pidfd(other) is None
    assert not signal_process(other, signal.SIGKILL)
    assert child.poll() is None
    assert [s.id for s in session_members(child.pid)] == [process]
    pidfd = open_pidfd(process)
    assert signal_process(process, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while is_alive(process):
        assert time.monotonic() < deadline
    assert describe_exit(exit_status(pidfd, process.pid)) == ("killed", "SIGKILL")
    child.wait()
    # Reaped: /proc is silent now, the pidfd tells it where the kernel can.
    assert describe_exit(exit_status(pidfd, process.pid))[0] in ("killed", "unknown")
    os.close(pidfd)
    assert not signal_process(process, signal.SIGKILL)


def test_exits_are_recorded_in_the_words_of_the_log() -> None:
    assert describe_exit(3 << 8) == ("exit", "status 3")
    assert describe_exit(signal.SIGSEGV) == ("killed", "SIGSEGV")
    assert describe_exit(None)[0] == "unknown"


def test_what_an_engine_spawned_is_found_in_any_session(tmp_path: Path) -> None:
    marker = f"RELUME_AGENT_SOCKET={tmp_path}"
    child = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)"],
        env={"RELUME_AGENT_SOCKET": str(tmp_path)},
        start_new_session=True,
    )
    try:
        deadline = time.monotonic() + 5
        while [p.pid for p in marked_processes(marker)] != [child.pid]:
            assert time.monotonic() < deadline
        assert list(marked_processes(marker + "x")) == []
    finally:
        child.kill()
        child.wait()


def test_ports_lie_outside_the_ephemeral_range() -> None:
    low = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    ports = {free_port("127.0.0.1") for _ in range(20)}
    assert max(ports) < low and len(ports) > 10
