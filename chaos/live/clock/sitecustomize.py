"""A wrong wall clock for one process. The file that RELUME_CLOCK names has the error in seconds.

Python imports this module by itself if its directory is on PYTHONPATH. Only agents of a chaos run
with a clock fault have it there. gRPC gets the true time: it computes deadlines by this clock, but
its core compares them with a clock that this module cannot change."""

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
