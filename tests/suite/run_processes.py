"""Pytest plugin: the processes of one run, which pytest-xdist may share out.

Ctrl-C, SIGTERM or SIGHUP ends a run in order: every process is interrupted once, tears down its
fixtures, and has `PATIENCE_S` for it. A process whose run was killed ends by itself.

Tests that start engines or fleets get the mark `engine`, by their paths. They kill and cut in the
middle of something: one test of a fleet runs at a time, and at most one test of an engine beside it
(`tests/suite/tiers.py`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from types import FrameType
from typing import Any, NoReturn

import pytest

from tests.suite.tiers import CORE_IN

OF_ENGINES = {
    "tests/live/": "fleets",
    "tests/engine/": "engines",
    "tests/agent/engine_process/test_real_engines.py": "engines",
    "tests/deploy/test_model_diversity.py": "engines",
}
"""Groups by the beginning of a path. With `--dist loadgroup` one process runs all tests of a group."""
MAX_PROCESSES = 8
PATIENCE_S = 60.0
HEAVY: pytest.StashKey[set[str]] = pytest.StashKey()
"""What collecting imported that no process should import which does not run its tests."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _group_of(item.nodeid):
            item.add_marker("engine")
        if item.get_closest_marker("core") and not item.nodeid.startswith(CORE_IN):
            raise pytest.UsageError(
                f"{item.nodeid}: tests of the core stand in {CORE_IN}, or no run has them"
            )


def _group_of(nodeid: str) -> str:
    return next((group for path, group in OF_ENGINES.items() if nodeid.startswith(path)), "")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Groups by path. The mark `xdist_group` has no effect: pytest-xdist 3.8 notes it in a field of the
    test that pytest 9.2 does not read."""
    if config.getvalue("dist") != "loadgroup":
        return None
    from xdist.scheduler import LoadGroupScheduling

    class ByPath(LoadGroupScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return _group_of(nodeid) or nodeid

    return ByPath(config, log)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers() -> int:
    """`-n auto`: as many as processors that this process may use."""
    return min(len(os.sched_getaffinity(0)), MAX_PROCESSES)


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[HEAVY] = {"vllm"} & set(sys.modules)


def pytest_configure(config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):
        signal.signal(signal.SIGINT, _interrupt_once)
    else:
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, _interrupt)


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _interrupt_once(number: int, frame: FrameType | None) -> NoReturn:
    # A second one would break off the teardown. (Ignored by a function: SIG_IGN is inherited.)
    signal.signal(signal.SIGINT, lambda number, frame: None)
    raise KeyboardInterrupt


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Before xdist ends its processes, which it would do within seconds."""
    run: Any = session.config.pluginmanager.getplugin("dsession")
    nodes = getattr(getattr(run, "nodemanager", None), "group", None)
    if nodes is None or exitstatus != pytest.ExitCode.INTERRUPTED:
        return
    running = [node for node in run._active_nodes if not node.channel.isclosed()]
    for node in running:
        with contextlib.suppress(ProcessLookupError):
            node.gateway._io.popen.send_signal(signal.SIGINT)
    deadline = time.monotonic() + PATIENCE_S
    while any(not node.channel.isclosed() for node in running) and time.monotonic() < deadline:
        time.sleep(0.05)
