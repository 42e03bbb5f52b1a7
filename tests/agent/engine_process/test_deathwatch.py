"""A killed process is shown dead by its robust mutex, before its sockets close."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from relume.engine_shim.engine.hosts import deathwatch

HOLDER = """
import sys, threading, time
from relume.engine_shim.engine.hosts import deathwatch
held = threading.Event()
def hold():
    global page
    page = deathwatch.hold(sys.argv[1])
    held.set()
    time.sleep(60)
threading.Thread(target=hold, daemon=True).start()
held.wait()
print("held" if page else "none", flush=True)
time.sleep(60)
"""


def start_holder(path: Path) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and process.stdout.readline() == "held\n"
    return process


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    """A watch looks ten times as often whether it was given up."""
    monkeypatch.setattr(deathwatch, "_WAIT_S", 0.05)


def test_kill_of_the_holder_is_detected(tmp_path: Path, often: None) -> None:
    process = start_holder(tmp_path / "alive")
    try:
        noticed = threading.Event()
        watch = deathwatch.DeathWatch(str(tmp_path / "alive"), noticed.set)
        assert watch.armed
        assert not (tmp_path / "alive").exists(), "the file goes when it is mapped"
        assert not noticed.wait(0.15), "a living holder is not dead"
        os.kill(process.pid, signal.SIGSTOP)
        assert not noticed.wait(0.15), "nor a stopped one"
        process.kill()
        assert noticed.wait(5)
    finally:
        process.kill()
        process.wait()


def test_given_up_watch_says_nothing(tmp_path: Path, often: None) -> None:
    process = start_holder(tmp_path / "alive")
    try:
        noticed = threading.Event()
        watch = deathwatch.DeathWatch(str(tmp_path / "alive"), noticed.set)
        watch.stop()
        process.kill()
        assert not noticed.wait(0.3)
    finally:
        process.kill()
        process.wait()


def test_process_without_a_mutex_is_not_watched(tmp_path: Path) -> None:
    assert not deathwatch.DeathWatch(str(tmp_path / "none"), lambda: None).armed
    (tmp_path / "empty").write_bytes(b"")
    assert not deathwatch.DeathWatch(str(tmp_path / "empty"), lambda: None).armed
