"""The processes of one `vllm serve`, and what processor time processes get."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

TITLES = {"core": "VLLM::EngineCore", "worker": "VLLM::Worker"}


def family(pid: int) -> dict[str, int]:
    """Processes of one `vllm serve` by role: api, core, worker; others by their pid."""
    found = {"api": pid}
    parents = [pid]
    while parents:
        for child in _children(parents.pop()):
            parents.append(child)
            title = Path(f"/proc/{child}/cmdline").read_bytes().decode()
            role = next((r for r, t in TITLES.items() if title.startswith(t)), str(child))
            found[role] = child
    return found


def ranks(pid: int) -> dict[int, int]:
    """The ranks of one tensor-parallel `vllm serve`: process by number."""
    found, parents = {}, [pid]
    while parents:
        for child in _children(parents.pop()):
            parents.append(child)
            title = Path(f"/proc/{child}/cmdline").read_bytes().decode()
            name, _, number = title.partition("_TP")
            if name == TITLES["worker"]:
                found[int(number.split("\0")[0].split("_")[0])] = child
    return found


class CpuTime(NamedTuple):
    """Nanoseconds for which threads ran, and for which they were ready to and waited."""

    ran: int = 0
    waited: int = 0


def cpu_time(pids: Iterable[int]) -> CpuTime:
    """Of all threads of those processes that live now (proc(5), schedstat)."""
    ran = waited = 0
    for pid in pids:
        for path in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with suppress(OSError):
                fields = path.read_text().split()
                ran, waited = ran + int(fields[0]), waited + int(fields[1])
    return CpuTime(ran, waited)


def starved(since: CpuTime, now: CpuTime) -> bool:
    """Whether processes got less than half of the processor time they were ready to use: a bound
    on what they do in real time says nothing then."""
    return now.waited - since.waited > now.ran - since.ran


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(c) for task in tasks for c in (task / "children").read_text().split()]
