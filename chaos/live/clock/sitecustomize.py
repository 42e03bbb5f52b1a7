"""A wrong wall clock for one process: what stands in the file RELUME_CLOCK names, in seconds,
is added to it. Python reads this module by itself where its directory is on PYTHONPATH, which
is so for agents of a chaos run with a fault of clocks, and nowhere else. gRPC gets the true time:
its core, which has the deadlines it computes, reads a clock we do not reach."""

import os
import sys
import time

_FILE = os.environ.get("RELUME_CLOCK", "")
_real_s, _real_ns = time.time, time.time_ns


def _wrong_ns() -> int:
    if sys._getframe(2).f_globals.get("__name__", "").startswith("grpc."):
        return 0
    try:
        with open(_FILE, encoding="ascii") as file:
            return int(float(file.read() or 0) * 1e9)
    except (OSError, ValueError):
        return 0


if _FILE:
    time.time = lambda: _real_s() + _wrong_ns() / 1e9
    time.time_ns = lambda: _real_ns() + _wrong_ns()
