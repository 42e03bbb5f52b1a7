"""Fit the formula of `step_cost` to profiles, and the parts that profiles lack to the start of a
real run.

    python -m relume.chaos.sim.engine.fit            write data/qwen3-32b_rtxpro6000x2.json again

Attention and the dense layers are fitted by least squares of the relative error to kernel
profiles. No profile has `base` and `collective`. They are chosen so that a simulated run reaches two
points of the real run's first `CALIBRATION_S` seconds at the same time. These are the first tokens
of the prompts (steps full of prompt) and the tokens generated afterwards (decode-only steps). The
fit ignores the rest of the run, which `compare` uses.
"""

from __future__ import annotations

import csv
import gzip
import itertools
import sys
from collections.abc import Callable, Sequence

import msgspec

from relume.chaos.sim.engine import compare
from relume.chaos.sim.engine.step_cost import FOLDER, Formula, StepCost

Three = tuple[float, float, float]
Four = tuple[float, float, float, float]
Seven = tuple[float, float, float, float, float, float, float]

NAME = "qwen3-32b_rtxpro6000x2"
LAYERS = 64
KNOTS = (1, 64, 128, 256, 384, 512, 1024, 1536, 2048)
FLOOR = 320
BEND = 224_000
CALIBRATION_S = 40.0
ALIKE = 1e-13
"""Relative pivot below which a column counts as linearly dependent on the others."""
ONCE = ("embedding", "final_layernorm")
TWICE = ("layernorm",)
SOURCE = "LLMServingSim profiles of Qwen3-32B on two RTX PRO 6000, vLLM 0.19.0 (see LICENCES.md)"


def rows(name: str) -> list[dict[str, str]]:
    """A data file's rows."""
    with gzip.open(FOLDER / f"{name}.csv.gz", "rt", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def least_squares(points: Sequence[Sequence[float]], values: Sequence[float]) -> tuple[float, ...]:
    """Coefficients that minimise the squares of relative errors, by normal equations. A column that
    depends linearly on the ones before it (all steps alike) gets 0."""
    size = len(points[0])
    matrix = [[0.0] * (size + 1) for _ in range(size)]
    # Columns of similar size keep the equations well conditioned.
    scale = [max(abs(point[i]) for point in points) or 1.0 for i in range(size)]
    for point, value in zip(points, values, strict=True):
        scaled = [x / s / value for x, s in zip(point, scale, strict=True)]
        for i, x in enumerate(scaled):
            row = matrix[i]
            for j in range(size):
                row[j] += x * scaled[j]
            row[size] += x
    return tuple(x / s for x, s in zip(_solved(matrix), scale, strict=True))


def _solved(matrix: list[list[float]]) -> list[float]:
    size, rank = len(matrix), 0
    least = ALIKE * max((matrix[i][i] for i in range(size)), default=0.0)
    found = [0.0] * size
    pivot_columns: list[int] = []
    for i in range(size):
        pivot = max(range(rank, size), key=lambda k: abs(matrix[k][i]))
        if abs(matrix[pivot][i]) <= least:
            continue
        matrix[rank], matrix[pivot] = matrix[pivot], matrix[rank]
        for k in range(size):
            if k != rank:
                factor = matrix[k][i] / matrix[rank][i]
                matrix[k] = [x - factor * y for x, y in zip(matrix[k], matrix[rank], strict=True)]
        pivot_columns.append(i)
        rank += 1
    for row, i in enumerate(pivot_columns):
        found[i] = matrix[row][size] / matrix[row][i]
    return found


def profiled() -> Formula:
    """The formula from profiles alone: base and collective are 0."""
    tokens: dict[int, float] = {}
    for row in rows("dense_tp2"):
        layers = 1 if row["layer"] in ONCE else LAYERS * (2 if row["layer"] in TWICE else 1)
        tokens[int(row["tokens"])] = tokens.get(int(row["tokens"]), 0.0) + layers * float(
            row["time_us"]
        )
    knots = least_squares([_hats(at) for at in tokens], list(tokens.values()))
    attention = [tuple(float(x) for x in row.values()) for row in rows("attention_tp2")]
    kinds: dict[str, tuple[list[tuple[float, ...]], list[float]]] = {}
    for chunk, before, sequences, each, us in attention:
        context = sequences * each
        point: tuple[float, ...]
        prompt = (chunk, max(chunk, FLOOR) * before, chunk * chunk)
        if not chunk:
            kind, point = "decode", (1.0, sequences, context)
        elif not sequences:
            kind, point = "prefill", (1.0, *prompt)
        else:
            beyond = max(0.0, context - BEND)
            kind, point = "mixed", (1.0, *prompt, sequences, context, beyond)
        points, values = kinds.setdefault(kind, ([], []))
        points.append(point)
        values.append(us)
    found = {kind: least_squares(*data) for kind, data in kinds.items()}
    return Formula(
        source=SOURCE,
        layers=LAYERS,
        knots=tuple(zip(KNOTS, knots, strict=True)),
        decode=msgspec.convert(found["decode"], Three),
        prefill=msgspec.convert(found["prefill"], Four),
        mixed=msgspec.convert(found["mixed"], Seven),
        floor=FLOOR,
        bend=BEND,
        base=0.0,
        collective=0.0,
    )


def _hats(tokens: int) -> list[float]:
    """Weights of the knots in the value at `tokens`."""
    found = [0.0] * len(KNOTS)
    for i, (low, high) in enumerate(itertools.pairwise(KNOTS)):
        if low <= tokens <= high:
            share = (tokens - low) / (high - low)
            found[i], found[i + 1] = 1 - share, share
            break
    return found


def calibrated(formula: Formula) -> Formula:
    """`formula` with base and collective, microseconds and microseconds per token."""
    real = compare.real_run()
    early = [r.first_s for r in real if r.first_s < CALIBRATION_S / 2]
    series = {float(row["t"]): float(row["gen_throughput"]) for row in rows("vllm_timeseries")}
    decoding = [series[float(second)] for second in range(30, int(CALIBRATION_S) + 1)]
    batch, context = _there(real, 35.0)
    wanted_us = batch * 1e6 / (sum(decoding) / len(decoding))

    def prompts(collective: float) -> float:
        found = compare.simulate(_with(formula, base, collective), real)
        return sum(sorted(r.first_s for r in found)[: len(early)]) - sum(early)

    def decodes(trial: float) -> float:
        step_ns, _ = StepCost(_with(formula, trial, collective)).decode(batch, context)
        return step_ns / 1000 - wanted_us

    base, collective = 0.0, 0.0
    for _ in range(6):
        collective = _root(prompts, 0.0, 400.0)
        base = _root(decodes, 0.0, 60_000.0)
    return _with(formula, round(base, 1), round(collective, 3))


def _there(real: Sequence[compare.ServedRequest], at_s: float) -> tuple[int, int]:
    """Sequences that decode at a time, and their tokens of context."""
    there = [r for r in real if r.first_s <= at_s < r.last_s]
    shares = [(at_s - r.first_s) / (r.last_s - r.first_s) for r in there]
    grown = sum(r.output * share for r, share in zip(there, shares, strict=True))
    return len(there), round(sum(r.prompt for r in there) + grown)


def _with(formula: Formula, base: float, collective: float) -> Formula:
    return msgspec.structs.replace(formula, base=base, collective=collective)


def _root(function: Callable[[float], float], low: float, high: float) -> float:
    """Zero of an increasing function, by bisection."""
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (middle, high) if function(middle) < 0 else (low, middle)
    return (low + high) / 2


def main() -> int:
    """Write the formula and print its error."""
    formula = calibrated(profiled())
    text = msgspec.json.format(msgspec.json.encode(formula), indent=1)
    (FOLDER / f"{NAME}.json").write_bytes(text + b"\n")
    print(text.decode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
