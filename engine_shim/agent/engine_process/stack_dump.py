"""The stacks of an engine's threads in one file of the run directory, for whoever has to find out
why it hung.

Each process of the engine writes its Python stacks on a signal (`relume.engine_shim.engine.stacks`).
One that is stopped cannot; of it there is what the kernel shows.
"""

from __future__ import annotations

import asyncio
import os
import time
from pathlib import Path

from relume.engine_shim.agent.engine_process.child import EngineProcesses
from relume.engine_shim.agent.engine_process.process_identity import (
    ProcessId,
    signal_process,
    stat_of,
)
from relume.engine_shim.agent.run_directory import RunDirectory
from relume.engine_shim.engine.stacks import SIGNAL, path_of

WRITING_S = 0.2
_POLL_S = 0.02
MAX_FILES = 8
MOST_THREADS = 64
"""Threads of a process that are listed."""
STOPPED = "Tt"
"""States of a process that a signal or a debugger stopped."""


async def dump(engine: EngineProcesses, run: RunDirectory, incarnation: int) -> str:
    """Path of the new file; empty if it could not be written."""
    processes = {engine.leader: "engine", **engine.members}
    files = {p: Path(path_of(str(run.socket_path), p.pid)) for p in processes}
    begun = {p: _size(file) for p, file in files.items()}
    signalled = [p for p, size in begun.items() if size >= 0 and _has_signal(p)]
    deadline = time.monotonic() + WRITING_S
    while signalled and time.monotonic() < deadline:
        sizes = [_size(files[p]) for p in signalled]
        await asyncio.sleep(_POLL_S)
        now = [_size(files[p]) for p in signalled]
        if now == sizes and all(size > begun[p] for p, size in zip(signalled, now, strict=True)):
            break
    parts = [_about(p, role, files[p], begun[p]) for p, role in processes.items()]
    return _keep(run.path / "stacks", f"engine-{incarnation}", "\n\n".join(parts))


def tidy(run: RunDirectory) -> None:
    """Removes the files into which the processes of an ended engine would have written."""
    for file in run.path.glob(f"{run.socket_path.name}.*.stacks"):
        file.unlink(missing_ok=True)


def _has_signal(process: ProcessId) -> bool:
    stat = stat_of(process.pid)
    return stat is not None and stat.state not in STOPPED and signal_process(process, SIGNAL)


def _size(file: Path) -> int:
    """-1 without such a file: its process would die of the signal."""
    try:
        return file.stat().st_size
    except OSError:
        return -1


def _about(process: ProcessId, role: str, file: Path, begun: int) -> str:
    """All that is known of one process."""
    stat = stat_of(process.pid)
    state = stat.state if stat is not None else "gone"
    lines = [f"== {role}, pid {process.pid}, state {state}", "-- threads of the kernel"]
    lines += _threads(process.pid)
    lines.append("-- Python stacks")
    try:
        with open(file, "rb") as stacks:
            stacks.seek(max(begun, 0))
            written = stacks.read().decode(errors="replace").rstrip()
    except OSError:
        written = ""
    stopped = "none: the process is stopped" if state in STOPPED else "none written in time"
    lines.append(written or stopped)
    return "\n".join(lines)


def _threads(pid: int) -> list[str]:
    """A line for each: id, name, state, what it waits for in the kernel, CPU time."""
    found = []
    try:
        names = sorted(os.listdir(f"/proc/{pid}/task"), key=int)
    except OSError:
        return ["none: the process is gone"]
    for thread in names[:MOST_THREADS]:
        place = Path(f"/proc/{pid}/task/{thread}")
        try:
            name = (place / "comm").read_text().strip()
            state = (place / "stat").read_text().rsplit(")", 1)[1].split()[0]
            waits = (place / "wchan").read_text() or "0"
            cpu_ms = int((place / "schedstat").read_text().split()[0]) // 1_000_000
        except (OSError, ValueError, IndexError):
            continue
        found.append(f"{thread:>8}  {name:<16} {state}  {waits:<24} {cpu_ms} ms of CPU time")
    if len(names) > MOST_THREADS:
        found.append(f"and {len(names) - MOST_THREADS} more")
    return found


def _keep(directory: Path, name: str, text: str) -> str:
    """Writes a file and removes the oldest beyond KEPT_FILES."""
    try:
        directory.mkdir(mode=0o700, exist_ok=True)
        number = 1
        while (path := directory / f"{name}-{number}.txt").exists():
            number += 1
        path.write_text(text + "\n")
        files = sorted(directory.glob("engine-*.txt"), key=lambda file: file.stat().st_mtime_ns)
        for old in files[:-MAX_FILES]:
            old.unlink()
    except OSError:
        return ""
    return str(path)
