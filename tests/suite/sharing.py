"""Pytest plugin: how the processes of one run (pytest-xdist) share the machine.

With `--dist loadgroup` all tests that start engines or whole fleets run one after the other in one
process, which imports vLLM once. They kill and cut in the middle of something: two at once on two
cores were late for it. All other tests fill the remaining processes, and help none: when they are
over the engines have the machine for themselves.

A test's group follows from its path: xdist 3.8 asks for marks, but pytest 9 does not let it pass
them on, and it ignores them without a word.

The niceness of a process only rises: engines have bounds on time, units have none.

Ctrl-C, SIGTERM or SIGHUP ends a run in order: every process is interrupted once, tears down its
fixtures, and has `PATIENCE_S` for it. A process whose run was killed ends by itself.
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
from xdist.scheduler import LoadScopeScheduling
from xdist.workermanage import WorkerController

ENGINES, REST = "engines", "rest"
NICENESS = {ENGINES: 0, REST: 10}
OF_ENGINES = (
    "tests/live/",
    "tests/engine/",
    "tests/agent/engine_process/test_real_engines.py",
    "tests/deploy/test_model_diversity.py",
)
MAX_PROCESSES = 8
PATIENCE_S = 60.0
HEAVY: pytest.StashKey[set[str]] = pytest.StashKey()
"""What collecting imported that no process should import which does not run its tests."""


def group_of(nodeid: str) -> str:
    """Where a test runs."""
    return ENGINES if nodeid.startswith(OF_ENGINES) else REST


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """`-n auto`: as many as processors, and two at least where tests run in groups."""
    cores = min(len(os.sched_getaffinity(0)), MAX_PROCESSES)
    return max(cores, 2) if config.getoption("dist") == "loadgroup" else cores


class GroupScheduling(LoadScopeScheduling):
    """Hands out the tests of engines as a whole and first, all others one by one."""

    def _split_scope(self, nodeid: str) -> str:
        group = group_of(nodeid)
        return nodeid if group == REST else group

    def remove_node(self, node: WorkerController) -> str | None:
        """A test that crashed its process does not run again in the next one."""
        for unit in self.assigned_work[node].values():
            for name, completed in unit.items():
                if not completed:
                    unit[name] = True
                    super().remove_node(node)
                    return name
        return super().remove_node(node)


@pytest.hookimpl(optionalhook=True, tryfirst=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> GroupScheduling | None:
    return GroupScheduling(config, log) if config.getoption("dist") == "loadgroup" else None


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


def pytest_collection_finish(session: pytest.Session) -> None:
    session.config.stash[HEAVY] = {"vllm"} & set(sys.modules)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if os.environ.get("PYTEST_XDIST_WORKER") and item.config.getoption("loadgroup", False):
        wanted = NICENESS[group_of(item.nodeid)]
        with contextlib.suppress(OSError):
            if os.getpriority(os.PRIO_PROCESS, 0) < wanted:
                os.setpriority(os.PRIO_PROCESS, 0, wanted)


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
