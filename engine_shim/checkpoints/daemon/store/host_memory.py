"""What the host has left, and how the arena stays in DRAM."""

from __future__ import annotations

import ctypes
import mmap
import os

_libc = ctypes.CDLL(None, use_errno=True)
_MLOCK_ONFAULT = 1
_UNLIMITED = 1 << 62
_PUNCH_HOLE_KEEP_SIZE = 0x02 | 0x01


def meminfo(path: str = "/proc/meminfo") -> dict[str, int]:
    """/proc/meminfo in bytes."""
    figures = {}
    with open(path, encoding="ascii") as lines:
        for line in lines:
            name, _, rest = line.partition(":")
            value = rest.split()
            figures[name] = int(value[0]) * (1024 if len(value) > 1 else 1)
    return figures


def total(root: str = "/sys/fs/cgroup") -> int:
    """Bytes of DRAM that are the host's, or this process's control group's."""
    return min(meminfo()["MemTotal"], _limit(root))


def available() -> int:
    """Bytes the host can give without swapping (MemAvailable), or the control group can."""
    return min(meminfo()["MemAvailable"], _cgroup_left())


def _cgroup_left(root: str = "/sys/fs/cgroup") -> int:
    """Bytes left below memory.max of this process's group; huge when there is no limit."""
    try:
        with open(f"{root}/memory.current", encoding="ascii") as current:
            return max(0, _limit(root) - int(current.read()))
    except (OSError, ValueError):
        return _UNLIMITED


def _limit(root: str) -> int:
    """memory.max of this process's group; huge when there is none."""
    try:
        with open(f"{root}/memory.max", encoding="ascii") as limit:
            text = limit.read().strip()
        return _UNLIMITED if text == "max" else int(text)
    except (OSError, ValueError):
        return _UNLIMITED


def swap_bytes() -> int:
    """Swap space of the host; without it nothing of ours can be swapped."""
    return meminfo().get("SwapTotal", 0)


def lock_on_fault(mapping: mmap.mmap, length: int) -> str:
    """Locks pages as they are touched. Empty when it worked, else why not."""
    address = ctypes.addressof(ctypes.c_char.from_buffer(mapping))
    if _libc.mlock2(ctypes.c_void_p(address), ctypes.c_size_t(length), _MLOCK_ONFAULT) == 0:
        return ""
    return os.strerror(ctypes.get_errno())


def punch(fd: int, start: int, length: int) -> None:
    """Gives the pages of a file's range back to the host. Raises OSError."""
    result = _libc.fallocate(
        fd, _PUNCH_HOLE_KEEP_SIZE, ctypes.c_int64(start), ctypes.c_int64(length)
    )
    if result != 0:
        raise OSError(ctypes.get_errno(), "fallocate")
