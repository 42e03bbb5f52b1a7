"""Files that are whole or not there: written aside, fsynced, renamed, directory fsynced."""

from __future__ import annotations

import os
from pathlib import Path


def publish(aside: Path, path: Path) -> None:
    """Make the fsynced file `aside` appear as `path`, durably. Raises OSError."""
    os.replace(aside, path)
    sync_directory(path.parent)


def write_whole(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write `data` to `path` so that a crash leaves all of it or nothing. Raises OSError."""
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        fd = os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        try:
            write_all(fd, data)
            sync(fd)
        finally:
            os.close(fd)
    except OSError:
        aside.unlink(missing_ok=True)
        raise
    publish(aside, path)


def append_line(path: Path, line: bytes) -> None:
    """Add `line` to `path`, durably; a torn line before it stays a line of its own.

    Raises OSError; then `line` may be there in part.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(fd).st_size
        if size and os.pread(fd, 1, size - 1) != b"\n":
            line = b"\n" + line
        write_all(fd, line + b"\n")
        sync(fd)
    finally:
        os.close(fd)
    if not size:
        sync_directory(path.parent)


def write_all(fd: int, data: bytes) -> None:
    """Write all of `data`: where room ends within it, a write is short before one fails.

    Raises OSError.
    """
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]


def make_directory(path: Path) -> None:
    """Make `path` and what is above it, durably. Raises OSError."""
    if not path.exists():
        make_directory(path.parent)
        path.mkdir(exist_ok=True)
        sync_directory(path.parent)


def sync(fd: int) -> None:
    """Have the kernel put the file on the disk."""
    os.fsync(fd)


def sync_directory(path: Path) -> None:
    """Have the kernel put the directory's entries on the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
