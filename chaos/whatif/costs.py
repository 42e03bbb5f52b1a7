"""Costs of steps in a log: the simulator's formula for its model, or one fitted to the log; and each
worker's pace relative to it, if the log has its steps one by one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from relume.chaos.sim.engine.fit_log import fitted
from relume.chaos.sim.engine.step_cost import StepCost, load, names
from relume.events import vocabulary as v
from relume.events.log.entries import Entry

OFF = 0.25
"""Maximum error of a known formula in the median step; beyond it, it is another machine's."""


SINGLE = 0.8
"""Minimum share of a worker's records with a single step; below it, its pace is unknown."""
FEW = 3
"""Minimum number of steps of a kind."""


class NoCost(ValueError):
    """The cost of steps is unknown."""


def cost_of(steps: Sequence[v.EngineStep], model: str, wanted: str = "") -> tuple[StepCost, str]:
    """The formula, and its source. `wanted`: `log`, or a name of `step_cost.names()`; empty: the
    model's formula if it fits the log's steps, else one fitted to the log. Raises NoCost."""
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
        raise NoCost(
            f"the cost of steps does not follow from the log ({why}); give a formula with --cost"
        )
    off = off_by(own, timed)
    return own, f"fitted to {len(timed)} steps of the log, off by {off:.0%} in the median step"


def off_by(cost: StepCost, steps: Sequence[v.EngineStep]) -> float:
    """Relative error of the formula in the median step."""
    if not steps:
        return 0.0
    ratios = [
        abs(math.log(max(_foretold_us(cost, step), 0.001) / step.duration_us)) for step in steps
    ]
    return math.expm1(median(ratios))


class PacedStepCost(StepCost):
    """`cost` with decode steps `decodes` times and prompt steps `prompts` times as long, and
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


def paces(events: Sequence[Entry], cost: StepCost) -> dict[str, PacedStepCost]:
    """Pace of each worker relative to `cost`, from the sums of its steps and of the time between
    them while it had work. Leaves out workers whose steps the log has merged."""
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


def _paced(rows: Sequence[tuple[int, v.EngineStep]], cost: StepCost) -> PacedStepCost | None:
    sums_of = {False: [0.0, 0.0, 0.0], True: [0.0, 0.0, 0.0]}  # has prompts: real, foretold, count
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
        sums = sums_of[step.prefill_tokens > 0]
        for index, value in enumerate((step.duration_us, _foretold_us(cost, step), 1.0)):
            sums[index] += value
        last = at_ms, step
    if timed < FEW or single < SINGLE * timed:
        return None
    decodes, prompts = (
        real / foretold if steps >= FEW and foretold else 1.0
        for real, foretold, steps in (sums_of[False], sums_of[True])
    )
    return PacedStepCost(
        cost, decodes, prompts, gap_us=max(wall_ms * 1000 - spent_us, 0) / max(single, 1)
    )


def _ended(step: v.EngineStep) -> int:
    return sum(type(change) is v.EngineFinished for change in step.changes)


def _foretold_us(cost: StepCost, step: v.EngineStep) -> float:
    if step.prefill_tokens:
        return cost.step([(step.prefill_tokens, 0)], step.batch, step.sum_context) / 1000
    return cost.decode(step.batch, step.sum_context)[0] / 1000
