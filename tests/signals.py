"""Signals whose effect has been seen."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HANG_S = 120.0
"""A wait that takes longer hangs: this bounds waits and measures nothing."""


def stop(pid: int) -> None:
    """SIGSTOP, and wait until every thread of the process is stopped.

    The signal is delivered to one thread, and the others run on until that one has been
    scheduled: on a busy machine long enough to see and answer what the test does next.
    """
    with _at_once():
        os.kill(pid, signal.SIGSTOP)
        deadline, tasks = time.monotonic() + HANG_S, Path(f"/proc/{pid}/task")
        while running := [task for task in tasks.iterdir() if _state(task) not in "TZX"]:
            assert time.monotonic() < deadline, f"threads of {pid} still run: {running}"
            time.sleep(0.001)


def let_run(pid: int) -> None:
    """Let a stopped process run for 8 ms of processor time. In a thread: a busy event loop must
    not let the process run on."""
    _let(pid, 0.008, 0.1)


def let_work(pid: int, work_s: float = 0.02) -> None:
    """Let a stopped process run for so much processor time."""
    _let(pid, work_s, 15 * work_s)


def _let(pid: int, work_s: float, longest_s: float) -> None:
    """On a busy machine a process may be given no processor time for a while; one that waits for
    others needs none."""
    enough, until = worked_s(pid) + work_s, time.monotonic() + longest_s
    with _at_once():
        os.kill(pid, signal.SIGCONT)
        while worked_s(pid) < enough and time.monotonic() < until:
            time.sleep(0.002)
        stop(pid)


@contextmanager
def _at_once() -> Iterator[None]:
    """This thread runs as soon as it may: the processes of an engine that wait for each other spin,
    and on two cores kept a stop from coming for two seconds. Without the right to it (CAP_SYS_NICE)
    nothing changes."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        yield
        return
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


def worked_s(pid: int) -> float:
    """Processor time of a process so far. Raises ProcessLookupError if it is gone."""
    try:
        return time.clock_gettime((~pid << 3) | 2)  # its CPU clock, as clock_getcpuclockid(3)
    except OSError:
        raise ProcessLookupError(pid) from None


@contextmanager
def stepped(pid: int) -> Iterator[Callable[[Callable[[], object], str], None]]:
    """The process stands, but for the moments that `until(condition, what)` gives it until the
    condition holds: what the test does in between costs it nothing, however long that takes.
    It runs on afterwards.

    What it did has to reach others, who run on. The pauses for that grow: on a busy machine
    others are late, and the process shall not come far in the meantime.
    """

    def until(condition: Callable[[], object], what: str) -> None:
        deadline, pause_s = time.monotonic() + HANG_S, 0.03
        while not condition():
            assert time.monotonic() < deadline, f"timed out: {what}"
            let_work(pid)
            time.sleep(pause_s)
            pause_s = min(2.0, pause_s * 1.1)

    stop(pid)
    try:
        yield until
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


@contextmanager
def slowed(pid: int, runs_s: float = 0.01, stands_s: float = 0.04) -> Iterator[None]:
    """The process runs a moment at a time; it runs on afterwards, if it is still there.

    It is seen to stand before it goes on: SIGCONT takes back a SIGSTOP that was not delivered
    yet, so on a busy machine it would never stand.
    """
    over = threading.Event()

    def pace() -> None:
        with suppress(ProcessLookupError, FileNotFoundError), _at_once():
            while not over.wait(runs_s):
                stop(pid)
                over.wait(stands_s)
                os.kill(pid, signal.SIGCONT)

    thread = threading.Thread(target=pace)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _state(task: Path) -> str:
    """Its state letter (proc(5)); a thread that is gone counts as stopped."""
    try:
        return (task / "stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "T"
