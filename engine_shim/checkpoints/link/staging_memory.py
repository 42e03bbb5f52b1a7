"""Shared memory that an engine stages chunks in for its host's state daemon.

The engine sends its descriptor (SCM_RIGHTS) when it connects. The memory is sealed against
resizing: a mapping of a file that shrinks would kill the daemon.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from relume.events.wire.kv.kv_errors import MalformedMessage

MAX_STAGING_BYTES = 256 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def make_staging(size: int) -> tuple[int, mmap.mmap]:
    """Shared memory of `size` bytes to stage chunks in: descriptor and mapping."""
    fd = os.memfd_create("relume-staging", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    return fd, mmap.mmap(fd, size)


def open_staging(fd: int) -> mmap.mmap:
    """The daemon's mapping of a client's staging memory. Raises MalformedMessage when it
    could be resized under us, or is too large."""
    size = os.fstat(fd).st_size
    try:
        sealed = fcntl.fcntl(fd, fcntl.F_GET_SEALS) & SEALS == SEALS
    except OSError:
        sealed = False
    if not sealed or not 0 < size <= MAX_STAGING_BYTES:
        raise MalformedMessage("staging memory is not sealed, or of a wrong size")
    return mmap.mmap(fd, size, prot=mmap.PROT_READ)
