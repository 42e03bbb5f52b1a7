"""`python -m chaos.bench NAME [options]`: run one bench; `--list` names them all.

A bench is a module of this package with `run(argv) -> {"bench", "met", "figures"}`, its
name with dashes for underscores; a figure is {"value", "goal", "unit"}. Printed are a
table and, as the last line, that result as one JSON object. Exit status 0: its goals
were met; 1: not; 2: there is no such bench.
"""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType
from typing import Any

BENCHES = (
    "startup", "failover-gap", "relay", "log", "log-scale", "replay", "replay-open",
    "shim-overhead", "checkpoint-overhead", "restore", "recovery-ablation", "sim-speed",
    "validators", "routing-cost", "routing-quality", "routing-simulated", "load-accuracy",
    "ttft-prediction", "tokenize", "waiting-room",
)  # fmt: skip


def load(name: str) -> ModuleType:
    """The module of bench `name`."""
    return importlib.import_module(f"relume.chaos.bench.{name.replace('-', '_')}")


def describe(module: ModuleType) -> str:
    """One line about a bench."""
    said = getattr(module, "DESCRIPTION", "") or (module.__doc__ or "").partition("\n")[0]
    return said.rstrip(".")


def table(result: dict[str, Any]) -> str:
    """The figures for people: name, value, unit, goal."""
    rows = [("figure", "value", "unit", "goal")]
    for name, figure in result["figures"].items():
        goal = figure.get("goal")
        shown = "" if goal is None else str(goal)
        rows.append((name, str(figure["value"]), figure.get("unit", ""), shown))
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for name, value, unit, goal in rows:
        line = f"{name:{widths[0]}}  {value:>{widths[1]}}  {unit:{widths[2]}}  {goal:>{widths[3]}}"
        lines.append(line.rstrip())
    lines.append(f"{result['bench']}: {'goals met' if result['met'] else 'GOALS NOT MET'}")
    return "\n".join(lines)


def main(argv: list[str]) -> int:
    """The command line of the docstring above."""
    if argv[:1] == ["--list"]:
        for name in BENCHES:
            print(f"{name:19} {describe(load(name))}")
        return 0
    if not argv or argv[0] in ("-h", "--help"):
        print(__doc__)
        print("benches:", ", ".join(BENCHES))
        return 0 if argv else 2
    if argv[0] not in BENCHES:
        print(f"no bench {argv[0]!r}; there are: {', '.join(BENCHES)}", file=sys.stderr)
        return 2
    result = load(argv[0]).run(argv[1:])
    print(table(result))
    print(json.dumps(result), flush=True)
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
