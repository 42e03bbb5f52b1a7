"""CPU time of threads and how long they waited for a CPU, by /proc.

They distinguish a long step, a starved one and a stopped one: computation uses the CPU, and a thread
that waits for a GPU polls it.
"""

from __future__ import annotations

import os
import time

READINGS = 3
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class ThreadClock:
    """CPU time of a thread and of the processes that its process started, and its waits for a CPU.

    Linux adds a wait to `schedstat` when it is over: a thread that got no CPU between two looks seems
    to have done nothing. Its state is R all the same, so the time since the first such look is added.
    """

    def __init__(self) -> None:
        self._seen = (0, 0, 0, 0)
        self._since_ns = 0

    def read(self, pid: int, thread: int) -> tuple[int, int]:
        """CPU time of the thread, of the processes its process started (workers that compute for it,
        compilers it waits for) and of theirs, and the time for which the thread waited for a CPU, in
        microseconds; -1 when they cannot be read. A child that ends moves its time to its parent, so
        the sum never falls."""
        for _ in range(READINGS):
            try:
                used, waited = self.own(pid, thread)
                return used + _ticks(pid, own=False) * 1_000_000 // _TICKS_PER_S, waited
            except (OSError, ValueError, IndexError):
                continue  # a child that was listed is gone: look again
        return -1, -1

    def own(self, pid: int, thread: int) -> tuple[int, int]:
        """The same of the thread alone. Raises OSError, ValueError, IndexError."""
        with open(f"/proc/{pid}/task/{thread}/stat") as stat:
            runnable = stat.read().rsplit(")", 1)[1].split()[0] == "R"
        with open(f"/proc/{pid}/task/{thread}/schedstat") as stat:
            used, waited = (int(value) // 1000 for value in stat.read().split()[:2])
        seen, now = (pid, thread, used, waited), time.monotonic_ns()
        if not runnable:
            self._since_ns = 0
        elif not self._since_ns or seen != self._seen:
            self._since_ns = now
        self._seen = seen
        return used, waited + ((now - self._since_ns) // 1000 if self._since_ns else 0)


class WaitForCpu:
    """How long the thread that calls it waits for a CPU; a look takes 1.5 microseconds."""

    def __init__(self) -> None:
        self._file: int | None = None
        self._waited_ns = 0

    def lap_us(self) -> int:
        """Microseconds since the last call, by the same thread; 0 if the system does not say."""
        try:
            if self._file is None:
                self._file = -1
                self._file = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
            before, self._waited_ns = self._waited_ns, int(os.pread(self._file, 64, 0).split()[1])
        except (OSError, IndexError):
            return 0
        return (self._waited_ns - before) // 1000


def _ticks(pid: int | str, own: bool = True) -> int:
    """Clock ticks used by the children of `pid`, dead and alive, and (`own`) by itself."""
    with open(f"/proc/{pid}/stat") as stat:
        user, system, dead_user, dead_system = stat.read().rsplit(")", 1)[1].split()[11:15]
    used = int(dead_user) + int(dead_system)
    if own:
        used += int(user) + int(system)
    for thread in os.listdir(f"/proc/{pid}/task"):
        with open(f"/proc/{pid}/task/{thread}/children") as children:
            used += sum(map(_ticks, children.read().split()))
    return used
