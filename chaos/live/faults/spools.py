"""The spools of a process: which files they are, and what is in them."""

from __future__ import annotations

from pathlib import Path

from relume.chaos.damaged_bytes import last_frame


def spools_of(pid: int) -> list[Path]:
    """Spool files that the process has open, with at least one record after the head."""
    found = []
    for descriptor in Path(f"/proc/{pid}/fd").glob("*"):
        try:
            path = descriptor.readlink()
            if path.suffix == ".spool" and last_frame(path.read_bytes()):
                found.append(path)
        except OSError:
            continue
    return sorted(set(found))


def last_record(spool: Path) -> bytes:
    """The record of its last whole frame."""
    data = spool.read_bytes()
    return data[last_frame(data) + 8 :]
