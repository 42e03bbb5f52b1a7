"""`relume-chaos papers [NAME ...]`: compute published results, and compare them with the paper.

A NAME is one result (`dejavu-table6`) or the first word of several (`dejavu`). Without a NAME,
the command computes all results that are not samples (some seconds). It prints each published
figure next to ours, with the ratio ours / published and a verdict:

  reproduced              within the tolerance of column "within"
  calibrated              an input that the paper leaves out was chosen to meet this figure
  differs, explained      outside the tolerance, but as PAPERS.md has it; the known reason is below
  CHANGED                 neither published nor as PAPERS.md has it: the exit status is 1
  DIFFERS, NOT EXPLAINED  outside the tolerance, reason unknown: the exit status is 1

Below the table, the command prints further observations of the run, the inputs that the paper
leaves out, and their substitutes. It computes everything in virtual time; the same seed gives the
same figures. A seed other than 0 draws other lengths and arrivals, which shows how far a figure
depends on them.

LUMEN's results are samples: fleets with the real control plane in virtual time, seconds to
minutes each. `--seeds` is the number of samples (for published figures: 30), paired between rules,
with 95 % intervals; `--workers` is the largest size. `--kept FILE` stores runs, which several
results share, so that an interrupted command can continue (for one state of the code only).

  relume-chaos papers --list
  relume-chaos papers dejavu-table6
  relume-chaos papers dejavu --json
  relume-chaos papers lumen --seeds 30 --workers 64 --jobs 2 --kept lumen.jsonl
"""

from __future__ import annotations

import argparse
import sys
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from relume.chaos.columns import columns
from relume.chaos.papers import registry
from relume.chaos.papers.lumen.scale_study import SIZES
from relume.chaos.papers.result import (
    CHANGED,
    OPEN,
    FigureComparison,
    Found,
    Result,
    compare,
)
from relume.chaos.papers.sampling import Sampling


def _arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="relume-chaos papers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "name",
        nargs="*",
        help="results, or the first word of several; default all but samples (lumen)",
    )
    parser.add_argument("--list", action="store_true", help="list the results, and exit")
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object per result, a line each"
    )
    parser.add_argument("--seed", type=int, default=0, help="a whole number (default 0)")
    parser.add_argument(
        "--seeds", type=int, default=3, help="number of samples per result (default 3)"
    )
    parser.add_argument(
        "--workers", type=int, default=8, help="largest fleet of samples (default 8)"
    )
    parser.add_argument(
        "--jobs", type=int, default=1, help="number of processes for samples (default 1)"
    )
    parser.add_argument("--kept", type=Path, help="file of sample runs, which is read and extended")
    given = parser.parse_args(argv)
    if given.seeds < 1 or given.jobs < 1 or given.workers < min(SIZES):
        parser.error(f"--seeds and --jobs are at least 1, --workers at least {min(SIZES)}")
    return given


def _progress(line: str) -> None:
    end = "\r" if sys.stderr.isatty() else "\n"
    print(line, end=end, file=sys.stderr, flush=True)


def number(value: float) -> str:
    """A figure for people: four significant digits, whole numbers as they are."""
    return f"{value:.0f}" if value == int(value) else f"{value:.4g}"


def table(compared: Sequence[FigureComparison]) -> list[str]:
    """Table of published figures and ours."""
    rows = [("", "published", "ours", "ratio", "within", "verdict")]
    for line in compared:
        ratio = "" if line.ratio is None else f"{line.ratio:.3f}"
        unit = f" {line.unit}" if line.unit else ""
        shown = (number(line.published) + unit, number(line.ours) + unit)
        rows.append((line.what, *shown, ratio, f"{line.within * 100:g} %", line.verdict))
    return list(columns(rows, right=range(1, 5)))


def printed(
    result: Result, found: Found, compared: Sequence[FigureComparison], took_s: float
) -> str:
    """One result for people."""
    lines = [f"{result.name}: {result.about}", f"  {result.source}; {took_s:.1f} s", ""]
    lines += table(compared)
    lines += ["", *found.lines] if found.lines else []
    for reason in dict.fromkeys(line.because for line in compared if line.because):
        lines += ["", *textwrap.wrap(f"difference: {reason}", 100)]
    for missing in result.inputs:
        lines += ["", *textwrap.wrap(f"input: {missing}", 100)]
    return "\n".join(lines)


def as_json(
    result: Result, found: Found, compared: Sequence[FigureComparison], seed: int, took_s: float
) -> str:
    """One result for programs."""
    document: dict[str, Any] = {
        "result": result.name,
        "about": result.about,
        "source": result.source,
        "seed": seed,
        "took_s": round(took_s, 3),
        "figures": compared,
        "ours": dict(found.figures),
        "lines": found.lines,
        "inputs": result.inputs,
    }
    return msgspec.json.encode(document).decode()


def listed() -> list[str]:
    """Every result with its subject and its source."""
    lines = []
    for name in registry.NAMES:
        result = registry.load(name)
        lines.append(f"{name:20} {result.about} ({result.source})")
    return lines


def main(argv: Sequence[str]) -> int:
    """Run results; 0: each figure is reproduced or explained, 1: one is not, 2: no such result."""
    given = _arguments(argv)
    if given.list:
        print("\n".join(listed()))
        return 0
    names: list[str] = []
    quick = [name for name in registry.NAMES if not registry.load(name).sample]
    sampling = Sampling(
        seed=given.seed,
        count=given.seeds,
        most=given.workers,
        jobs=given.jobs,
        stored_runs=given.kept,
        tell=_progress,
    )
    for word in given.name or quick:
        matching = registry.matching(word)
        if not matching:
            known = ", ".join(registry.NAMES)
            print(f"no result {word!r}; there are: {known}", file=sys.stderr)
            return 2
        names += [name for name in matching if name not in names]
    open_ = False
    for i, name in enumerate(names):
        result = registry.load(name)
        began = time.perf_counter()
        found = result.run(sampling)
        took_s = time.perf_counter() - began
        compared = compare(result, found)
        open_ = open_ or any(line.verdict in (OPEN, CHANGED) for line in compared)
        if given.json:
            print(as_json(result, found, compared, given.seed, took_s), flush=True)
        else:
            print(("\n\n" if i else "") + printed(result, found, compared, took_s), flush=True)
    return 1 if open_ else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
