"""The list of published results. A new one is a module with a `RESULT`, named here."""

from __future__ import annotations

import importlib

from relume.chaos.papers.result import Result

MODULES = {
    "anchortp-figure3": "anchortp.figure3",
    "anchortp-table1": "anchortp.anchortp_table1",
    "anchortp-table2": "anchortp.table2",
    "dejavu-early-stops": "dejavu.early_stops",
    "dejavu-failures": "dejavu.dejavu_failures",
    "dejavu-makespan": "dejavu.makespan",
    "dejavu-memory": "dejavu.dejavu_memory",
    "dejavu-planner": "dejavu.planner",
    "dejavu-table6": "dejavu.table6",
    "lumen-ablation": "lumen.ablation",
    "lumen-context": "lumen.context_length",
    "lumen-drafts": "lumen.drafts",
    "lumen-holders": "lumen.holder_count",
    "lumen-motivation": "lumen.motivation",
    "lumen-overhead": "lumen.overhead",
    "lumen-prototype": "lumen.prototype",
    "lumen-scale": "lumen.scale_study",
    "lumen-sizes": "lumen.checkpoint_sizes",
    "lumen-storage": "lumen.storage",
    "lumen-table1": "lumen.lumen_table1",
    "lumen-thresholds": "lumen.thresholds",
}
NAMES = tuple(MODULES)


def load(name: str) -> Result:
    """The result called `name`. Raises KeyError if there is none."""
    found: Result = importlib.import_module(f"relume.chaos.papers.{MODULES[name]}").RESULT
    return found


def matching(word: str) -> list[str]:
    """The result `word`, or all whose name begins with it: `dejavu` means all of that paper."""
    return [word] if word in NAMES else [name for name in NAMES if name.startswith(f"{word}-")]
