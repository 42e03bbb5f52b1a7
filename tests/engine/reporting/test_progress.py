"""CPU time by which a long step is told from a stopped one."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

from relume.engine_shim.engine.progress import usage_us

BURN = "import time; end = time.process_time() + 0.15\nwhile time.process_time() < end: pass"


def here() -> int:
    found, _ = usage_us(threading.main_thread().native_id, threading.get_native_id())
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
        "import os, time; from relume.engine_shim.engine.progress import usage_us; here = lambda: "
        "usage_us(os.getpid(), os.getpid())[0]; before = here(); time.sleep(0.2); print(here() - before)"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert 0 <= int(found.stdout) < 20_000


def test_no_process_there_is_unknown() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    assert usage_us(child.pid, child.pid) == (-1, -1)
