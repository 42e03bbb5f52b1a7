"""Duration of one engine step, by a formula fitted to profiles of its kernels.

A step of d decoding sequences with s tokens of context in all, and of prompt chunks of c_i
tokens after p_i computed ones, takes

    base + collective * T + dense(T) + layers * attention        with T = d + sum(c_i)

dense: the layers' operators without attention, linear between knots. attention, a layer:
  decoding only:   k0 + k1 d + k2 s
  chunks only:     k0 + k1 sum(c) + k2 sum(max(c, floor) p) + k3 sum(c^2)
  both:            the sum of the terms of both with one constant, with coefficients of their
                   own, and k6 max(0, s - bend): a kernel with both reads such large contexts
                   badly.
base and collective stand for the parts that profiles lack: the host, sampling, all-reduce.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from msgspec import Struct

FOLDER = Path(__file__).parents[1] / "data"


class Formula(Struct, frozen=True, kw_only=True):
    """Coefficients of one model on one hardware class, microseconds and tokens. `source` says
    the data they were fitted to."""

    source: str
    layers: int
    knots: tuple[tuple[int, float], ...]
    decode: tuple[float, float, float]
    prefill: tuple[float, float, float, float]
    mixed: tuple[float, float, float, float, float, float, float]
    floor: int
    bend: int
    base: float
    collective: float


def names() -> list[str]:
    """Names of all formulas: `<model>_<hardware>`."""
    return sorted(path.stem for path in FOLDER.glob("*.json"))


def load(name: str) -> StepCost:
    """The cost of `<model>_<hardware>`. Raises FileNotFoundError."""
    text = (FOLDER / f"{name}.json").read_bytes()
    return StepCost(msgspec.json.decode(text, type=Formula))


def between(knots: Sequence[tuple[int, float]], tokens: int) -> float:
    """The value at `tokens` of the line through `knots`, continued at both ends."""
    upper = next((i for i, (at, _) in enumerate(knots) if at >= tokens), len(knots) - 1)
    (x0, y0), (x1, y1) = knots[max(upper, 1) - 1], knots[max(upper, 1)]
    return y0 + (y1 - y0) * (tokens - x0) / (x1 - x0)


class StepCost:
    """The formula in whole nanoseconds. A decoding sequence uses `width` tokens of a step's budget,
    and on average gets `given` tokens in a step with prompts; more than one with drafts. Before
    each step, the engine does nothing for `pause_ns`."""

    width = 1
    given = 1.0
    pause_ns = 0

    def __init__(self, formula: Formula) -> None:
        self.formula = formula
        self._flat: list[int] = []

    def _without_attention(self, tokens: int) -> int:
        """ns of everything but attention; cached per number of tokens."""
        known = self._flat
        while len(known) <= tokens:
            f = self.formula
            us = f.base + f.collective * len(known) + between(f.knots, len(known))
            known.append(round(us * 1000))
        return known[tokens]

    def decode(self, sequences: int, context: int) -> tuple[int, int]:
        """ns of a decode-only step, and the increase per next step of the same sequences.
        `context`: tokens of all sequences, with those being computed."""
        f = self.formula
        k0, k1, k2 = f.decode
        us = f.layers * (k0 + k1 * sequences + k2 * context)
        first = self._without_attention(sequences) + round(us * 1000)
        return first, round(f.layers * k2 * sequences * 1000)

    def step(self, chunks: Sequence[tuple[int, int]], sequences: int, context: int) -> int:
        """ns of a step with prompt `chunks` (tokens, tokens computed before them)."""
        f = self.formula
        tokens = reads = squares = 0
        for chunk, before in chunks:
            tokens += chunk
            reads += max(chunk, f.floor) * before
            squares += chunk * chunk
        if sequences:
            k = f.mixed
            us = k[0] + k[1] * tokens + k[2] * reads + k[3] * squares + k[4] * sequences
            us += k[5] * context + k[6] * max(0, context - f.bend)
        else:
            k0, k1, k2, k3 = f.prefill
            us = k0 + k1 * tokens + k2 * reads + k3 * squares
        return self._without_attention(tokens + sequences) + round(f.layers * us * 1000)
