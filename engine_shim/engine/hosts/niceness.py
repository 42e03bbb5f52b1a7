"""Niceness of engines that share their host's cores with agents, etcd or the control plane."""

from __future__ import annotations

import os
import time
from pathlib import Path

MOST = 19


def give_way() -> None:
    """The calling process, and those that it will start, become as nice again as they are. For the
    processes of an engine that compute, beside its HTTP server: they poll for each other, and on cores
    that all share an answer waited for up to 0.6 s. Without niceness nothing changes."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    os.setpriority(os.PRIO_PROCESS, 0, min(2 * niceness, MOST) if niceness > 0 else niceness)


def keep_niceness() -> None:
    """The niceness inherited from the parent shall weigh in the new session too: where the kernel
    groups tasks by session (autogroups, sched(7)), a niceness weighs within its session only."""
    niceness = os.getpriority(os.PRIO_PROCESS, 0)
    for _ in range(5 * (niceness != 0)):
        try:
            Path("/proc/self/autogroup").write_text(str(niceness))
        except BlockingIOError:  # the kernel's rate limit
            time.sleep(0.12)
            continue
        except OSError:
            pass  # no autogroups, or not ours to weigh: niceness itself is inherited all the same
        return
