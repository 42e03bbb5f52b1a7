"""Detects a death before the process is gone: a robust mutex in shared memory.

Theory of operation. A killed process closes its sockets, and its pidfd fires, only after
the kernel has taken its memory apart: tens of milliseconds for an engine without a GPU,
longer with one. But the first thing a dying thread does is give up its robust mutexes.
So a thread of the engine holds one, in a file both sides map, and a thread of the agent
waits for it: the wait ends with EOWNERDEAD as soon as the holder begins to die.

The mutex is glibc's (`PTHREAD_MUTEX_ROBUST`, process-shared); the kernel's part is
robust futexes. Where it cannot be had, `hold` and `DeathWatch` say so and the pidfd
remains, which is slower but sees everything.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import Any

SIZE = 4096
_MUTEX_AT, _HELD_AT = 0, 256
_ROBUST, _SHARED = 1, 1
_WAIT_S = 0.5

_libc = ctypes.CDLL(None, use_errno=True)


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


def path_of(agent_socket: str, pid: int) -> str:
    """Where process `pid` of the engine keeps its mutex."""
    return f"{agent_socket}.{pid}.alive"


def hold(path: str) -> mmap.mmap | None:
    """Create the mutex at `path` and lock it in this thread, which must never end before the
    process. Returns the mapping, which the caller must hold; None if this system has no robust
    mutexes, or the disk is full.
    """
    try:
        page = _map(path, create=True)
    except OSError:
        return None
    mutex = _mutex(page)
    attributes = ctypes.create_string_buffer(64)
    steps = (
        lambda: _libc.pthread_mutexattr_init(attributes),
        lambda: _libc.pthread_mutexattr_setpshared(attributes, _SHARED),
        lambda: _libc.pthread_mutexattr_setrobust(attributes, _ROBUST),
        lambda: _libc.pthread_mutex_init(mutex, attributes),
        lambda: _libc.pthread_mutex_lock(mutex),
    )
    if any(step() for step in steps):
        return None
    page[_HELD_AT] = 1
    return page


def _map(path: str, create: bool) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
    try:
        if create:
            os.posix_fallocate(fd, 0, SIZE)  # a page the disk has no room for would be fatal
        return mmap.mmap(fd, SIZE)
    finally:
        os.close(fd)


def _mutex(page: mmap.mmap) -> Any:
    return ctypes.byref(ctypes.c_char.from_buffer(page, _MUTEX_AT))


class DeathWatch:
    """Waits, in its own thread, for the holder at `path` to die.

    `dead()` is called once, in that thread. `armed`: whether the watch works; False if the engine's
    process offers no mutex. The file is removed when it is mapped.
    """

    def __init__(self, path: str, dead: Callable[[], None]) -> None:
        self._stop = threading.Event()
        self._dead = dead
        self.armed = False
        try:
            self._page = _map(path, create=False)
            os.unlink(path)
        except (OSError, ValueError):
            return
        if self._page[_HELD_AT] != 1:
            return
        self.armed = True
        threading.Thread(target=self._wait, name="relume-deathwatch", daemon=True).start()

    def stop(self) -> None:
        """Give the watch up; its thread ends within half a second."""
        self._stop.set()

    def _wait(self) -> None:
        mutex = _mutex(self._page)
        while not self._stop.is_set():
            until = time.time() + _WAIT_S
            spec = _Timespec(int(until), int(until % 1 * 1e9))
            result = _libc.pthread_mutex_timedlock(mutex, ctypes.byref(spec))
            if result == errno.ETIMEDOUT:
                continue
            if not self._stop.is_set():
                self._dead()
            return
