"""The published results there are. A new one is a module with a `RESULT`, named here."""

from __future__ import annotations

import importlib

from relume.chaos.papers.result import Result

NAMES = (
    "anchortp-figure3",
    "anchortp-table1",
    "anchortp-table2",
    "dejavu-early-stops",
    "dejavu-failures",
    "dejavu-makespan",
    "dejavu-memory",
    "dejavu-planner",
    "dejavu-table6",
    "lumen-ablation",
    "lumen-context",
    "lumen-drafts",
    "lumen-holders",
    "lumen-motivation",
    "lumen-overhead",
    "lumen-prototype",
    "lumen-scale",
    "lumen-sizes",
    "lumen-storage",
    "lumen-table1",
    "lumen-thresholds",
)


def load(name: str) -> Result:
    """The result called `name`: RESULT of the module with its dashes as underscores."""
    if name not in NAMES:
        raise KeyError(name)
    found: Result = importlib.import_module(f"relume.chaos.papers.{name.replace('-', '_')}").RESULT
    return found


def matching(word: str) -> list[str]:
    """The result `word`, or all whose name begins with it: `dejavu` means all of that paper."""
    return [word] if word in NAMES else [name for name in NAMES if name.startswith(f"{word}-")]
