"""`relume-chaos bench NAME [options]`: run one bench; `--list` names them all.

A bench is a module with `run(argv) -> {"bench", "met", "figures"}`, named here; a figure is
{"value", "goal", "unit"}. The command prints a table and, as the last line, that result as one
JSON object. Exit status 0: its goals were met; 1: not; 2: there is no such bench.

`relume-chaos bench NAME --against CHECKOUT [--rounds N] [options]` compares it with the same bench
in another checkout (`relume.chaos.bench.against`).
"""

from __future__ import annotations

import importlib
import json
import sys
from types import ModuleType
from typing import Any

from relume.chaos.bench import against
from relume.chaos.columns import columns

BENCHES = {
    "startup": "failover.startup",
    "failover-gap": "failover.failover_gap",
    "detection": "failover.detection",
    "rollout": "failover.rolling_restart",
    "false-verdicts": "failover.false_verdicts",
    "canaries": "failover.canaries",
    "cross-checks": "failover.cross_checks",
    "relay": "gateway.relay_cost",
    "log": "eventlog.log_appends",
    "replay": "eventlog.replay_speed",
    "shim-overhead": "engine.shim_overhead",
    "checkpoint-overhead": "engine.checkpoint_overhead",
    "restore": "engine.restore_speed",
    "sim-speed": "sim_speed",
    "routing-cost": "scheduling.routing_cost",
    "routing-quality": "scheduling.routing_quality",
    "routing-simulated": "scheduling.routing_simulated",
    "load-accuracy": "scheduling.load_accuracy",
    "ttft-prediction": "scheduling.ttft_prediction",
}


def load(name: str) -> ModuleType:
    """The module of bench `name`."""
    return importlib.import_module(f"relume.chaos.bench.{BENCHES[name]}")


def describe(module: ModuleType) -> str:
    """One line about a bench."""
    description = getattr(module, "DESCRIPTION", "") or (module.__doc__ or "").partition("\n")[0]
    return description.rstrip(".")


def table(result: dict[str, Any]) -> str:
    """The figures for people: name, value, unit, goal."""
    rows = [("figure", "value", "unit", "goal")]
    for name, figure in result["figures"].items():
        goal = figure.get("goal")
        shown = "" if goal is None else str(goal)
        rows.append((name, str(figure["value"]), figure.get("unit", ""), shown))
    verdict = f"{result['bench']}: {'goals met' if result['met'] else 'GOALS NOT MET'}"
    return "\n".join([*columns(rows, right=(1, 3)), verdict])


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
    if any(given.partition("=")[0] == "--against" for given in argv[1:]):
        result = against.run(argv[0], argv[1:])
    else:
        result = load(argv[0]).run(argv[1:])
    print(table(result))
    print(json.dumps(result), flush=True)
    return 0 if result["met"] else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
