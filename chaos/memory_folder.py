"""Folder for temporary files of runs, in memory: other writers on a disk can delay etcd for seconds."""

from __future__ import annotations

from pathlib import Path

_MEMORY = Path("/dev/shm")


def memory_folder() -> str | None:
    """A folder in memory; None: there is none, use the default of `tempfile`."""
    return str(_MEMORY) if _MEMORY.is_dir() else None
