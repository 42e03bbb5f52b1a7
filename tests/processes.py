"""The processes of one `vllm serve`."""

from __future__ import annotations

from pathlib import Path

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


def _children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(c) for task in tasks for c in (task / "children").read_text().split()]
