"""Signals to processes that a run started, by pid."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from relume.chaos.live.processes import throttle

STOP_S = 10.0


def there(pid: int) -> bool:
    """Whether process `pid` exists and is no zombie."""
    return state_of(Path(f"/proc/{pid}")) not in ("", "Z", "X")


def state_of(task: Path) -> str:
    """State letter of a process or thread (proc(5)); empty: it is gone."""
    try:
        return (task / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return ""


def kill(pid: int) -> bool:
    """Send SIGKILL; False if the process is gone."""
    return send(pid, signal.SIGKILL)


def terminate(pid: int) -> bool:
    """Send SIGTERM; False if the process is gone."""
    return send(pid, signal.SIGTERM)


def send(pid: int, number: int) -> bool:
    """Send a signal; False if the process is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


async def stop(pid: int) -> bool:
    """Send SIGSTOP, and wait until each of its threads is stopped; False if it is gone."""
    if not send(pid, signal.SIGSTOP):
        return False
    deadline = time.monotonic() + STOP_S
    while time.monotonic() < deadline:
        try:
            threads = list(Path(f"/proc/{pid}/task").iterdir())
        except FileNotFoundError:
            return False
        if all(state_of(thread) in ("T", "t", "", "Z", "X") for thread in threads):
            return True
        await asyncio.sleep(0.001)
    return there(pid)


def go_on(pid: int) -> None:
    """SIGCONT."""
    send(pid, signal.SIGCONT)


async def slow(pid: int, times: float) -> None:
    """Have it run for a part of the time, so that all takes `times` as long, until cancelled."""
    # The script imports no module of Relume, so it is small and up at once.
    throttling = await asyncio.create_subprocess_exec(
        sys.executable, "-I", "-S", throttle.__file__, str(pid), str(times),
        stdin=subprocess.PIPE, start_new_session=True,
    )  # fmt: skip
    assert throttling.stdin is not None
    try:
        await throttling.wait()
    finally:
        throttling.stdin.close()
        await throttling.wait()
        go_on(pid)
