"""CPU time and waits by which long, starved and stopped steps differ."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from relume.engine_shim.engine.cpu_clocks import ThreadClock, WaitForCpu

APART_S, LOOKS = 0.25, 12
PATIENT = 240
"""Maximum number of looks until one finds no wait: other processes may use the core, too."""
BURN = "import time; end = time.process_time() + 0.15\nwhile time.process_time() < end: pass"


def here() -> int:
    found, _ = ThreadClock().read(threading.main_thread().native_id, threading.get_native_id())
    assert found >= 0
    return found


def test_a_compiler_it_waits_for_counts_while_it_runs_and_after_it_ended() -> None:
    """Also one that its child started: the sum rises and never falls."""
    command = [sys.executable, "-c", f"import subprocess, sys\n"
               f"subprocess.run([sys.executable, '-c', {BURN!r}])"]  # fmt: skip
    before, seen = here(), []
    with subprocess.Popen(command) as child:
        while child.poll() is None:
            seen.append(here())
            time.sleep(0.005)
    seen.append(here())
    assert seen == sorted(seen)
    assert seen[-1] - before > 150_000


def test_who_waits_uses_none() -> None:
    """Measured in a process of its own: threads that other tests left here may use some."""
    code = (
        "import os, time; from relume.engine_shim.engine.cpu_clocks import ThreadClock; here = lambda: "
        "ThreadClock().read(os.getpid(), os.getpid())[0]; before = here(); time.sleep(0.2); print(here() - before)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert 0 <= int(found.stdout) < 20_000


BUSY = """import os
os.sched_setaffinity(0, {{{core}}})
os.sched_setscheduler(0, {policy}, os.sched_param(0))
while True: pass
"""


def test_a_thread_that_gets_no_cpu_between_two_looks_waits() -> None:
    """Linux says so only when the wait is over: here after more than a second."""
    core = max(os.sched_getaffinity(0))
    with busy(core, os.SCHED_IDLE) as starved, busy(core, os.SCHED_OTHER) as burner:
        assert sum(waits(starved)) > LOOKS // 2, "beside a busy process"
        assert not all(waits(burner, PATIENT))
        os.kill(burner.pid, signal.SIGSTOP)
        assert not all(waits(starved, PATIENT)), "it spins, and has a core for itself"
        os.kill(starved.pid, signal.SIGSTOP)
        assert not all(waits(starved, PATIENT)), "it is stopped, not starved"


def test_a_thread_knows_how_long_it_waited_for_a_cpu() -> None:
    """Beside a busy process it waits about as long as it computes."""
    core = max(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{core}}})\n"
        "from relume.engine_shim.engine.cpu_clocks import WaitForCpu\n"
        f"clock = WaitForCpu(); clock.lap_us()\n{BURN}\nprint(clock.lap_us(), clock.lap_us())"
    )
    with busy(core, os.SCHED_OTHER):
        found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    waited_us, since_us = map(int, found.stdout.split())
    assert waited_us > 40_000
    assert 0 <= since_us < waited_us


def test_a_system_that_does_not_say_how_long_threads_waited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> int:
        raise FileNotFoundError

    monkeypatch.setattr(os, "open", refused)
    clock = WaitForCpu()
    assert (clock.lap_us(), clock.lap_us()) == (0, 0)


@contextmanager
def busy(core: int, policy: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that computes for ever on that core."""
    code = BUSY.format(core=core, policy=policy)
    with subprocess.Popen([sys.executable, "-c", code]) as child:
        try:
            yield child
        finally:
            child.kill()


def waits(process: subprocess.Popen[bytes], looks: int = LOOKS) -> Iterator[bool]:
    """Whether it waits for a CPU for most of the time between two looks, and uses it less."""
    clock = ThreadClock()
    used, waited = clock.read(process.pid, process.pid)
    for _ in range(looks):
        time.sleep(APART_S)
        before = used, waited
        used, waited = clock.read(process.pid, process.pid)
        yield waited - before[1] > max(APART_S * 5e5, used - before[0])


def test_no_process_there_is_unknown() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert ThreadClock().read(child.pid, child.pid) == (-1, -1)
