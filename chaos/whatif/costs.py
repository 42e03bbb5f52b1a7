"""What steps cost in a log: the simulator's own formula of its model, or one fitted to it; and
how each worker keeps to it, where the log has its steps one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from relume.chaos.sim.engine.fit_log import fitted
from relume.chaos.sim.engine.step_cost import StepCost, load, names
from relume.events import vocabulary as v
from relume.events.log.entries import Entry

OFF = 0.25
"""A known formula that is off by more in the median step is another machine's."""


SINGLE = 0.8
"""Where fewer of a worker's records tell one step each, its pace is not known."""
FEW = 3
"""Fewer steps of a kind tell nothing."""


class NoCost(ValueError):
    """Nothing tells what steps cost."""


def cost_of(steps: Sequence[v.EngineStep], model: str, wanted: str = "") -> tuple[StepCost, str]:
    """The formula, and where it is from. `wanted`: `log`, or a name of `cost.names()`; empty:
    the one there is for the model if it fits the log's steps. Raises NoCost."""
    if wanted and wanted != "log":
        if wanted not in names():
            raise NoCost(f"no cost formula {wanted!r}; there are log, {', '.join(names())}")
        return load(wanted), wanted
    timed = [s for s in steps if s.duration_us > 0 and (s.batch or s.prefill_tokens)]
    try:
        own = StepCost(fitted(timed, "the log"))
    except (ValueError, ZeroDivisionError) as error:
        alike = "its steps are all alike"
        own, why = None, str(error) if isinstance(error, ValueError) else alike
    known = [n for n in names() if n.rpartition("_")[0] == model] if not wanted else []
    best = min(known, key=lambda n: off_by(load(n), timed), default="")
    if best:
        off = off_by(load(best), timed)
        if own is None or off <= max(OFF, off_by(own, timed)):
            return load(best), f"{best}, off by {off:.0%} in the log's median step"
    if own is None:
        raise NoCost(f"the log does not tell what steps cost ({why}); name a formula with --cost")
    off = off_by(own, timed)
    return own, f"fitted to {len(timed)} steps of the log, off by {off:.0%} in the median step"


def off_by(cost: StepCost, steps: Sequence[v.EngineStep]) -> float:
    """By how much the median step differs from the formula, as a share."""
    if not steps:
        return 0.0
    ratios = [
        abs(math.log(max(_foretold_us(cost, step), 0.001) / step.duration_us)) for step in steps
    ]
    return math.expm1(median(ratios))


class Paced(StepCost):
    """As `cost` says, but decoding `decodes` times and prompts `prompts` times as long, and
    `gap_us` between two steps."""

    def __init__(self, cost: StepCost, decodes: float, prompts: float, gap_us: float) -> None:
        super().__init__(cost.formula)
        self.pace = decodes, prompts, gap_us
        self._cost = cost

    def decode(self, sequences: int, context: int) -> tuple[int, int]:
        """See StepCost.decode."""
        first, more = self._cost.decode(sequences, context)
        decodes, _, gap_us = self.pace
        return round(first * decodes + gap_us * 1000), round(more * decodes)

    def step(self, chunks: Sequence[tuple[int, int]], sequences: int, context: int) -> int:
        """See StepCost.step."""
        _, prompts, gap_us = self.pace
        return round(self._cost.step(chunks, sequences, context) * prompts + gap_us * 1000)


def paces(events: Sequence[Entry], cost: StepCost) -> dict[str, Paced]:
    """How each worker kept to `cost`, by the sums of its steps and of the time between them
    while it had work. Workers whose steps the log has merged are left out."""
    records: dict[str, list[tuple[int, v.EngineStep]]] = {}
    for at in events:
        if type(at.event) is v.EngineStep:
            records.setdefault(at.stream[2:], []).append((at.at_ms, at.event))
    found = {}
    for worker, rows in records.items():
        paced = _paced(rows, cost)
        if paced is not None:
            found[worker] = paced
    return found


def _paced(rows: Sequence[tuple[int, v.EngineStep]], cost: StepCost) -> Paced | None:
    told = {False: [0.0, 0.0, 0.0], True: [0.0, 0.0, 0.0]}  # of prompts: taken, foretold, steps
    timed = single = spent_us = wall_ms = 0
    last: tuple[int, v.EngineStep] | None = None
    for at_ms, step in rows:
        if not step.duration_us:
            continue
        timed += 1
        if last is not None and (step.incarnation, step.step) == (
            last[1].incarnation, last[1].step + 1,
        ):  # fmt: skip
            single += 1
            if last[1].waiting or last[1].batch > _ended(last[1]):
                wall_ms += max(at_ms - last[0], 0)
                spent_us += step.duration_us
        sums = told[step.prefill_tokens > 0]
        for index, value in enumerate((step.duration_us, _foretold_us(cost, step), 1.0)):
            sums[index] += value
        last = at_ms, step
    if timed < FEW or single < SINGLE * timed:
        return None
    decodes, prompts = (
        taken / foretold if steps >= FEW and foretold else 1.0
        for taken, foretold, steps in (told[False], told[True])
    )
    return Paced(cost, decodes, prompts, gap_us=max(wall_ms * 1000 - spent_us, 0) / max(single, 1))


def _ended(step: v.EngineStep) -> int:
    return sum(type(change) is v.EngineFinished for change in step.changes)


def _foretold_us(cost: StepCost, step: v.EngineStep) -> float:
    if step.prefill_tokens:
        return cost.step([(step.prefill_tokens, 0)], step.batch, step.sum_context) / 1000
    return cost.decode(step.batch, step.sum_context)[0] / 1000
