"""The list of published results. A new one is a module with a `RESULT`, named here."""

from __future__ import annotations

import importlib

from relume.chaos.papers.result import Result

MODULES = {
    "dejavu-makespan": "dejavu.makespan",
    "dejavu-table6": "dejavu.table6",
    "lumen-ablation": "lumen.ablation",
    "lumen-scale": "lumen.scale_study",
    "lumen-table1": "lumen.lumen_table1",
}
NAMES = tuple(MODULES)


def load(name: str) -> Result:
    """The result called `name`. Raises KeyError if there is none."""
    found: Result = importlib.import_module(f"relume.chaos.papers.{MODULES[name]}").RESULT
    return found


def matching(word: str) -> list[str]:
    """The result `word`, or all whose name begins with it: `dejavu` means all of that paper."""
    return [word] if word in NAMES else [name for name in NAMES if name.startswith(f"{word}-")]
