"""State daemons that outlived their agent, ended by the record in its run directory.

An agent that leaves ends its daemon. One that was killed leaves it for the next agent of
that directory; when the whole fleet stops there is none.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import time
from pathlib import Path

PATIENCE_S = 5.0


def daemons(run: Path) -> list[int]:
    """Living state daemons recorded below `run`, by pid and start time."""
    found = []
    for file in sorted(run.glob("*/state.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            record = json.loads(file.read_bytes())["daemon"]
            boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
            pid, start_ticks = record["process"]
            if record["kernel_boot"] == boot and _start_ticks(pid) == start_ticks:
                found.append(pid)
    return found


def _start_ticks(pid: int) -> int:
    """-1 for a process that is gone or a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return -1
    fields = text[text.rindex(")") + 2 :].split()
    return -1 if fields[0] in "ZX" else int(fields[19])


async def end_daemons(run: Path) -> int:
    """End them all: SIGTERM, after a while SIGKILL; how many there were."""
    left = daemons(run)
    count = len(left)
    deadline = time.monotonic() + PATIENCE_S
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                os.kill(pid, signal.SIGCONT)
        while (left := daemons(run)) and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        deadline += PATIENCE_S
    return count
