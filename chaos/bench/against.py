"""Compare a bench in this checkout with the same bench in another one, in one run.

`relume-chaos bench NAME --against CHECKOUT` runs the bench in child processes of both checkouts.
The order alternates (here, there, there, here), so that other load on the machine affects both.
Per figure, each pair of neighbours gives one ratio; the figure `NAME_speed` is their median:
above 1, this checkout is faster. `NAME_speed_low` and `_high` are the quartiles of the ratios, and
`NAME_speed_best` compares the best run of each, which other load disturbs least.

The bench compares figures whose unit is a rate (".../s") or a time ("us", "ms", "s",
"s/1k requests").
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from relume.chaos.bench.bench_figures import figure

GOAL = 0.95
RUN_S = 3600.0
"""Maximum duration of one run of a bench."""
_TIME = re.compile(r"(ns|us|ms|s)\b")

Figures = dict[str, dict[str, Any]]


class BenchFailed(RuntimeError):
    """A child made no result, so the bench compares nothing."""


def command(checkout: Path | None, name: str, options: list[str]) -> list[str]:
    """Command that runs the bench in a checkout (None: this one). It uses the checkout's own
    interpreter, if there is an environment, and the import name that the checkout has."""
    if checkout is None:
        return [sys.executable, "-m", "relume.chaos.bench", name, *options]
    own = checkout / ".venv" / "bin" / "python"
    python = str(own) if own.exists() else sys.executable
    package = "relume.chaos" if (checkout / "relume").is_dir() else "chaos"
    return [python, "-m", f"{package}.bench", name, *options]


def measure(checkout: Path | None, name: str, options: list[str]) -> Figures:
    """The figures of one run. Missed goals do not fail it."""
    argv = command(checkout, name, options)
    try:
        ran = subprocess.run(
            argv, cwd=checkout, capture_output=True, text=True, check=False, timeout=RUN_S
        )
    except subprocess.TimeoutExpired as error:
        raise BenchFailed(f"{' '.join(argv)} ran for more than {RUN_S:.0f} s") from error
    try:
        found: Figures = json.loads(ran.stdout.splitlines()[-1])["figures"]
    except (ValueError, IndexError, KeyError, TypeError) as error:
        text = f"{' '.join(argv)} made no result ({ran.returncode}):\n{ran.stderr[-2000:]}"
        raise BenchFailed(text) from error
    return found


def speed(unit: str, here: float, there: float) -> float | None:
    """Speed of this checkout relative to the other; None: the figure is neither a rate nor a time."""
    if here <= 0 or there <= 0:
        return None
    if _TIME.match(unit):
        return there / here
    return here / there if unit.endswith("/s") else None


def compare(pairs: list[tuple[Figures, Figures]], only: str, goal: float) -> Figures:
    """The ratios of all figures that both have and whose name `only` matches."""
    found: Figures = {}
    first_here, first_there = pairs[0]
    for name, about in first_here.items():
        if name not in first_there or not re.search(only, name):
            continue
        unit = about["unit"]
        ours = [here[name]["value"] for here, _ in pairs]
        theirs = [there[name]["value"] for _, there in pairs]
        each = [speed(unit, a, b) for a, b in zip(ours, theirs, strict=True)]
        ratios = [ratio for ratio in each if ratio is not None]
        if not ratios:
            continue
        low, _, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        best = min if _TIME.match(unit) else max
        found[f"{name}_speed"] = figure(statistics.median(ratios), "x", goal, 3)
        found[f"{name}_speed_low"] = figure(low, "x", digits=3)
        found[f"{name}_speed_high"] = figure(high, "x", digits=3)
        found[f"{name}_speed_best"] = figure(
            speed(unit, best(ours), best(theirs)) or 0, "x", digits=3
        )
        found[f"{name}_here"] = figure(statistics.median(ours), unit)
        found[f"{name}_there"] = figure(statistics.median(theirs), unit)
    return found


def parser(name: str) -> argparse.ArgumentParser:
    """The flags of a comparison; all other flags go to the bench."""
    made = argparse.ArgumentParser(
        prog=f"relume-chaos bench {name}", description=__doc__.partition("\n\n")[2], add_help=False
    )
    made.add_argument("--against", type=Path, required=True, metavar="CHECKOUT")
    made.add_argument("--rounds", type=int, default=8, help="pairs of runs (default 8)")
    made.add_argument("--figures", default="", help="compare only figures that match this regex")
    made.add_argument("--at-least", type=float, default=GOAL, help=f"goal (default {GOAL})")
    return made


def run(name: str, argv: list[str]) -> dict[str, Any]:
    """Compare; see the docstring above. Raises `BenchFailed` when a run makes no result."""
    args, options = parser(name).parse_known_args(argv)
    there = args.against.absolute()
    if not (there / "chaos" / "bench").is_dir():  # else this checkout would be compared with itself
        raise BenchFailed(f"{there} is no checkout of Relume: it has no chaos/bench")
    pairs: list[tuple[Figures, Figures]] = []
    for number in range(args.rounds):
        if number % 2 == 0:
            ours = measure(None, name, options)
            theirs = measure(there, name, options)
        else:
            theirs = measure(there, name, options)
            ours = measure(None, name, options)
        pairs.append((ours, theirs))
        print(_progress(number + 1, args.rounds, pairs, args.figures), file=sys.stderr, flush=True)
    figures = compare(pairs, args.figures, args.at_least)
    if not figures:
        raise BenchFailed(f"bench {name}: the two have no rate and no time in common")
    met = all(one["goal"] is None or one["value"] >= one["goal"] for one in figures.values())
    return {"bench": f"{name}-against", "met": met, "figures": figures}


def _progress(number: int, rounds: int, pairs: list[tuple[Figures, Figures]], only: str) -> str:
    now = compare(pairs[-1:], only, GOAL)
    speeds = [
        f"{k.removesuffix('_speed')} {v['value']}" for k, v in now.items() if k.endswith("_speed")
    ]
    return f"pair {number}/{rounds}: {', '.join(speeds)}"
