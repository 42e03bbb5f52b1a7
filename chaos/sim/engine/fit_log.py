"""Fit the formula of `step_cost` to the steps that real engines recorded in a stored log.

    python -m relume.chaos.sim.engine.fit_log LOG --name tiny_cpu

It serves models without profiles of their kernels. It leaves out steps beyond ten times the median
of their kind (compilation, other load on the host). The fit cannot separate attention and dense
layers: the formula has one layer and no knots beyond 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

import msgspec

from relume.chaos.sim.engine.fit import least_squares
from relume.chaos.sim.engine.step_cost import FOLDER, Formula
from relume.controlplane.replay.store import StoredLog
from relume.events import vocabulary as v
from relume.events.log.entries import entries

OUTLIER = 10.0
Points = tuple[list[tuple[float, ...]], list[float]]


def steps_of(path: Path) -> list[v.EngineStep]:
    """Steps with a duration, from the log at `path`."""
    with StoredLog(path) as log:
        told = (entry.event for entry in entries(log.groups(), "w."))
        return [event for event in told if type(event) is v.EngineStep and event.duration_us > 0]


def fitted(steps: Sequence[v.EngineStep], source: str) -> Formula:
    """The formula of recorded steps. Raises ValueError if a kind of step is missing."""
    decode = [s for s in steps if s.batch and not s.prefill_tokens]
    prefill = [s for s in steps if s.prefill_tokens]
    if not decode or not prefill:
        raise ValueError("no steps of both kinds: with prompts, and decode-only")
    base = least_squares(*_points(decode, lambda s: (1.0, float(s.batch))))
    a, b = max(base[0], 0.0), max(base[1], 0.0)
    more = least_squares(*_points(prefill, lambda s: (1.0, float(s.prefill_tokens))))
    first, each = max(more[0], 0.0), max(more[1], 0.0)
    return Formula(
        source=source, layers=1, knots=((1, 0.0), (2048, 0.0)), decode=(a, b, 0.0), prefill=(first, each, 0.0, 0.0),
        mixed=(first, each, 0.0, 0.0, b, 0.0, 0.0), floor=1, bend=1 << 30, base=0.0, collective=0.0,
    )  # fmt: skip


def _points(
    steps: Sequence[v.EngineStep], point: Callable[[v.EngineStep], tuple[float, ...]]
) -> Points:
    usual = median(s.duration_us for s in steps)
    kept = [s for s in steps if s.duration_us <= OUTLIER * usual]
    return [point(s) for s in kept], [float(s.duration_us) for s in kept]


def main(argv: Sequence[str] | None = None) -> int:
    """Write data/NAME.json and print it."""
    parser = argparse.ArgumentParser(
        prog="python -m relume.chaos.sim.engine.fit_log", description=__doc__
    )
    parser.add_argument("log", type=Path, help="a log as `relume replay --export` writes it")
    parser.add_argument("--name", required=True, help="<model>_<hardware>")
    given = parser.parse_args(argv)
    steps = steps_of(given.log)
    source = f"{len(steps)} steps of real engines in {given.log}"
    text = msgspec.json.format(msgspec.json.encode(fitted(steps, source)), indent=1)
    (FOLDER / f"{given.name}.json").write_bytes(text + b"\n")
    print(text.decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
