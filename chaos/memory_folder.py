"""Where temporary files of runs go: into memory, because a disk that others write to holds up etcd for seconds."""

from __future__ import annotations

from pathlib import Path

_MEMORY = Path("/dev/shm")


def memory_folder() -> str | None:
    """A folder in memory; None: there is none, and the default of `tempfile` serves."""
    return str(_MEMORY) if _MEMORY.is_dir() else None
