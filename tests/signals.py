"""Signals whose effect has been seen."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def stop(pid: int, timeout_s: float = 10.0) -> None:
    """SIGSTOP, and wait until every thread of the process is stopped.

    The signal is delivered to one thread, and the others run on until that one has been
    scheduled: on a busy machine long enough to see and answer what the test does next.
    """
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + timeout_s
    while running := [t for t in Path(f"/proc/{pid}/task").iterdir() if _state(t) not in "TZX"]:
        assert time.monotonic() < deadline, f"threads of {pid} still run: {running}"
        time.sleep(0.001)


def let_run(pid: int, seconds: float = 0.008) -> None:
    """In a thread: a busy event loop must not let the process run on."""
    os.kill(pid, signal.SIGCONT)
    time.sleep(seconds)
    stop(pid)


def let_work(pid: int) -> None:
    """Let a stopped process run until it has had 20 ms of processor time, and some 300 ms at
    most: on a busy machine it may not be given any for a while."""
    os.kill(pid, signal.SIGCONT)
    until, enough = time.monotonic() + 0.3, worked_ms(pid) + 20
    while worked_ms(pid) < enough and time.monotonic() < until:
        time.sleep(0.004)
    stop(pid)


def worked_ms(pid: int) -> int:
    """Processor time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1000 // os.sysconf("SC_CLK_TCK")


@contextmanager
def stepped(pid: int) -> Iterator[Callable[[Callable[[], object], str], None]]:
    """The process stands, but for the moments that `until(condition, what)` gives it until the
    condition holds: what the test does in between costs it nothing, however long that takes.
    It runs on afterwards."""

    def until(condition: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, f"timed out: {what}"
            let_work(pid)
            time.sleep(0.03)  # what it did reaches others, who run on

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
        with suppress(ProcessLookupError, FileNotFoundError):
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
