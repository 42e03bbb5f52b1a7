"""Lets a process run for a part of the time only: MOMENT_S, then it is stopped for so long that all takes
TIMES times as long.

    python -I -S throttle.py PID TIMES

A separate process does this, with real-time priority where that is allowed: on a busy host the loop of
the runner wakes late, and the process would run for longer than intended. It ends with its input, which
the runner has open, and lets the process run then.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys

MOMENT_S = 0.005


def throttle(pid: int, times: float) -> None:
    """Until the end of stdin, or of the process."""
    with contextlib.suppress(OSError):  # not allowed
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    with contextlib.suppress(ProcessLookupError):
        target = os.pidfd_open(pid)
        try:
            while True:
                signal.pidfd_send_signal(target, signal.SIGSTOP)
                if select.select([0, target], [], [], MOMENT_S * (times - 1))[0]:
                    return
                signal.pidfd_send_signal(target, signal.SIGCONT)
                if select.select([0, target], [], [], MOMENT_S)[0]:
                    return
        finally:
            signal.pidfd_send_signal(target, signal.SIGCONT)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    throttle(int(sys.argv[1]), float(sys.argv[2]))
