"""What a state daemon holds, struck from outside by a user with the permission: the one it runs as,
or root.

No hook in the daemon: what is in its memory is reached through /proc, as a failing module of
memory would reach it, and its settings are read again on SIGHUP, as an operator would have it.
A full disk is a limit on its files (RLIMIT_FSIZE): what is there can be read, and nothing more
can be written, with EFBIG where a disk that copies on writing says ENOSPC.
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
    """Flip a bit in each quarter of `count` pages that a daemon's arena holds something in;
    how many there were to flip."""
    arena = _open_file(pid, ARENA)
    if arena is None:
        return 0
    with open(arena, "r+b", buffering=0) as file:
        return _flip(file.fileno(), pages, rng)


def _open_file(pid: int, name: str) -> Path | None:
    """The first open file of a process that is called so."""
    files = Path(f"/proc/{pid}/fd").iterdir()
    return next((entry for entry in files if name in os.readlink(entry)), None)


def _flip(fd: int, pages: int, rng: Random) -> int:
    taken = _taken(fd)
    chosen = rng.sample(taken, min(pages, len(taken)))
    for offset in chosen:
        for quarter in range(4):
            at = offset + quarter * mmap.PAGESIZE // 4 + rng.randrange(mmap.PAGESIZE // 4)
            old = os.pread(fd, 1, at)
            os.pwrite(fd, bytes([old[0] ^ 1 << rng.randrange(8)]), at)
    return len(chosen)


def _taken(fd: int) -> list[int]:
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
    """Tell daemon `pid` to keep to `share` of the budget it was started with."""
    told = json.loads(settings.read_bytes())
    told["budget_share"] = share
    settings.write_text(json.dumps(told))
    send(pid, signal.SIGHUP)


def filed(pid: int) -> int:
    """The most bytes a daemon's file of cold blocks has had so far; 0 without one."""
    file = _open_file(pid, FILE)
    return file.stat().st_size if file is not None else 0


def fill(pid: int) -> None:
    """Daemon `pid` writes to no file any more, until `make_room`."""
    _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, most))


def make_room(pid: int) -> None:
    """It may write again; nothing where the daemon is gone."""
    with contextlib.suppress(ProcessLookupError):
        _, most = resource.prlimit(pid, resource.RLIMIT_FSIZE)
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))
