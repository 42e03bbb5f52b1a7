"""Runs of `relume-chaos fuzz` in a copy of the tree, of chosen seeds alone.

python -m tests.bugs.sweep SEED,SEED,...          to the first that fails
python -m tests.bugs.sweep SEED,SEED,... --all    all of them
python -m tests.bugs.sweep SEED,SEED,... NAME     with this scenario

Each prints one line of JSON. Seed N runs with the scenario that it has in `fuzz --seeds`, unless one is
named.
"""

from __future__ import annotations

import json
import sys

from relume.chaos.runner import fuzz
from tests.bugs.probes import take_met

LIMIT_S = 300.0
"""Real time of a run: on a busy machine it must not decide."""


def main(argv: list[str]) -> int:
    """Exit status 0, whether a run failed or not."""
    names, _ = fuzz.usable([name for name in argv[1:] if name != "--all"])
    for seed in map(int, argv[0].split(",")):
        take_met()
        name = names[seed % len(names)]
        (planned,) = fuzz.planned_runs([name], seed, 1, LIMIT_S, None)
        ran = fuzz.one(planned)
        told = {
            "seed": seed,
            "scenario": name,
            "result": ran.result,
            "noticed": list(ran.signature or ran.why[:1]),
            "why": ran.why[0] if ran.why else "",
            "met": list(take_met()),
        }
        print(json.dumps(told), flush=True)
        if ran.result == "failed" and "--all" not in argv:
            break
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
