"""Faults of a state daemon's memory and files, from outside, as the daemon's user or root.

The daemon has no hook. Faults reach its memory through /proc, as a failing memory module would, and
make it reload its settings by SIGHUP, as an operator would. A full disk is a limit on its files
(RLIMIT_FSIZE): the daemon can read them, but write nothing more. It gets EFBIG, where a full
copy-on-write disk would give ENOSPC.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import resource
import signal
from pathlib import Path
from random import Random

from relume.chaos.live.processes.signals import send

ARENA = "relume-checkpoints"
FILE = "relume-cold-"


def flip(pid: int, pages: int, rng: Random) -> int:
    """Flip a bit in each quarter of `pages` non-empty pages of a daemon's arena; return the number
    of pages changed."""
    arena = _open_file(pid, ARENA)
    if arena is None:
        return 0
    with open(arena, "r+b", buffering=0) as file:
        return _flip(file.fileno(), pages, rng)


def _open_file(pid: int, name: str) -> Path | None:
    """The first open file of a process whose path contains `name`."""
    files = Path(f"/proc/{pid}/fd").iterdir()
    return next((entry for entry in files if name in os.readlink(entry)), None)


def _flip(fd: int, pages: int, rng: Random) -> int:
    filled = _filled_pages(fd)
    chosen = rng.sample(filled, min(pages, len(filled)))
    for offset in chosen:
        for quarter in range(4):
            at = offset + quarter * mmap.PAGESIZE // 4 + rng.randrange(mmap.PAGESIZE // 4)
            old = os.pread(fd, 1, at)
            os.pwrite(fd, bytes([old[0] ^ 1 << rng.randrange(8)]), at)
    return len(chosen)


def _filled_pages(fd: int) -> list[int]:
    """Offsets of pages that are not all zero."""
    size, at = os.fstat(fd).st_size, 0
    found: list[int] = []
    while at < size:
        try:
            start = os.lseek(fd, at, os.SEEK_DATA)
        except OSError:
            break
        at = os.lseek(fd, start, os.SEEK_HOLE)
        pages = range(start, at, mmap.PAGESIZE)
        found.extend(offset for offset in pages if any(os.pread(fd, mmap.PAGESIZE, offset)))
    return found


def shrink(settings: Path, pid: int, share: float) -> None:
    """Have daemon `pid` shrink its budget to `share` of the one it was started with."""
    config = json.loads(settings.read_bytes())
    config["budget_share"] = share
    settings.write_text(json.dumps(config))
    send(pid, signal.SIGHUP)


def filed(pid: int) -> int:
    """Maximum size so far of a daemon's file of cold blocks; 0: it has no file."""
    file = _open_file(pid, FILE)
    return file.stat().st_size if file is not None else 0


def fill(pid: int) -> None:
    """Keep daemon `pid` from writing to files until `allow_writes`."""
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))


def allow_writes(pid: int) -> None:
    """Let it write again; no effect if the daemon is gone."""
    with contextlib.suppress(ProcessLookupError):
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
