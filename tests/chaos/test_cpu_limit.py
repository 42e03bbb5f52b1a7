"""A process is held to a share of a core; nobody stays stopped whatever becomes of the runner."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from relume.chaos.live.faults.cpu_limit import Limit
from relume.chaos.live.processes.signals import state_of

BUSY = "while True: pass"
RUNNER = """
import asyncio, sys
from relume.chaos.live.faults.cpu_limit import Limit

async def main():
    print(*await Limit(0.01, lambda: [int(sys.argv[1])]).begin(), flush=True)
    await asyncio.sleep(600)

asyncio.run(main())
"""


@contextlib.contextmanager
def busy() -> Iterator[int]:
    """A process that takes all it can get."""
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", BUSY])
    try:
        yield process.pid
    finally:
        process.kill()
        process.wait()


def used_s(pid: int) -> float:
    return time.clock_gettime(~pid << 3 | 2)


def stopped(pid: int) -> bool:
    return state_of(Path(f"/proc/{pid}")) == "T"


async def until(found: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not found():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


@pytest.mark.full
async def test_a_process_gets_its_share_of_a_core_and_then_all_of_it() -> None:
    with busy() as pid:
        limit = Limit(0.2, lambda: [pid])
        assert await limit.begin() == [pid]
        began, used = time.monotonic(), used_s(pid)
        for _ in range(5):
            await until(lambda: stopped(pid))
            await until(lambda: not stopped(pid))
        await until(lambda: used_s(pid) - used > 0.2)
        assert used_s(pid) - used < 0.5 * (time.monotonic() - began)
        await limit.end()
        used = used_s(pid)
        await until(lambda: used_s(pid) - used > 0.5)
        assert not stopped(pid)


async def test_who_comes_later_is_held_and_who_is_gone_is_forgotten() -> None:
    with busy() as pid:
        with busy() as other:
            pids = [other]
            limit = Limit(0.05, lambda: pids)
            assert await limit.begin() == [other]
        pids = [pid]
        await until(lambda: stopped(pid))
        await limit.end()
        await until(lambda: not stopped(pid))


@pytest.mark.full
async def test_no_process_stays_stopped_when_the_runner_is_killed() -> None:
    with busy() as pid:
        runner = subprocess.Popen(
            [sys.executable, "-c", RUNNER, str(pid)], stdout=subprocess.PIPE, start_new_session=True
        )
        try:
            assert runner.stdout is not None
            assert runner.stdout.readline().split() == [str(pid).encode()]
            await until(lambda: stopped(pid))
        finally:
            os.kill(runner.pid, signal.SIGKILL)
            runner.wait()
        used = used_s(pid)
        # At a hundredth of a core this would take longer than is waited.
        await until(lambda: used_s(pid) - used > 1.0)
        assert not stopped(pid)


async def test_a_limit_without_processes_starts_at_once() -> None:
    limit = Limit(0.2, list)
    assert await limit.begin() == []
    await limit.end()
