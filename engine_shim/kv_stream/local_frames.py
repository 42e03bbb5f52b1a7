"""Frames of the Unix socket between an engine and its host's state daemon.

A frame is `<header length, chunk length, place, offset>`, the header, and the chunk:
behind the header (place INLINE), or at `offset` of the sender's shared staging memory
(STAGED), where the sender leaves it until it is answered.

A connection opens with file descriptors (SCM_RIGHTS): the daemon sends the arena,
readable only; the engine its staging memory, sealed against resizing, since a mapping of
a file that shrinks would kill the daemon.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct

from relume.engine_shim.kv_stream.errors import MalformedMessage
from relume.engine_shim.kv_stream.messages import MAX_CHUNK_BYTES, MAX_HEADER_BYTES

FRAME = struct.Struct("<IIBQ")
INLINE = 0
STAGED = 1
MAX_STAGING_BYTES = 256 << 20
SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def pack(header: bytes, chunk_bytes: int = 0, place: int = INLINE, offset: int = 0) -> bytes:
    """The frame up to an inline chunk."""
    return FRAME.pack(len(header), chunk_bytes, place, offset) + header


def unpack(head: bytes) -> tuple[int, int, int, int]:
    """(header length, chunk length, place, offset). Raises MalformedMessage."""
    header_bytes, chunk_bytes, place, offset = FRAME.unpack(head)
    if header_bytes > MAX_HEADER_BYTES or chunk_bytes > MAX_CHUNK_BYTES or place > STAGED:
        raise MalformedMessage(f"frame of {header_bytes} and {chunk_bytes} bytes")
    return header_bytes, chunk_bytes, place, offset


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
