"""Studies of LUMEN's open questions: cases by name over the same seeds, and their table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from msgspec.structs import replace

from relume.chaos.columns import columns
from relume.chaos.papers.lumen.parts.lumen_tables import RELOAD, TRAFFIC
from relume.chaos.papers.lumen.parts.study_runs import Case
from relume.chaos.papers.sampling import Estimate, Sampling, average, ratio

SHORT = "The figures cover the 20 s after the failure, that is until the engine is back."
INPUTS = (TRAFFIC, RELOAD, SHORT)
ONE_LOST = Case(rules="lumen", workers=4, seed=0, fails=1, short=True)
"""The case that most of them vary: one of four is lost under LUMEN's rules."""


class Column(NamedTuple):
    """A figure of `study_runs.RunResult` in a table. `over` the first row's of the same seeds."""

    figure: str
    what: str
    over: bool = False


TTFT = Column("ttft", "mean TTFT, s")
P99 = Column("p99", "p99, s")
TPOT = Column("tpot", "TPOT, s")
LOST = Column("lost", "interrupted, s")
RESTORED = Column("restored", "restored, part")
TTFT_OVER = Column("ttft", "TTFT / first row", True)
RECOVERY = (TTFT, P99, LOST, RESTORED, TTFT_OVER)
"""Figures of most of them."""


class Study:
    """Cases run for every seed."""

    def __init__(self, sampling: Sampling, cases: Mapping[str, Case]) -> None:
        asked = {name: [replace(c, seed=s) for s in sampling.seeds] for name, c in cases.items()}
        found = sampling.run(case for of in zip(*asked.values(), strict=True) for case in of)
        self.runs = {name: [found[case] for case in of] for name, of in asked.items()}
        self.count = sampling.count

    def values(self, figure: str, *names: str) -> list[list[float]]:
        """The figure of each of `names`, for the seeds that have it for all."""
        rows = list(zip(*(self.runs[name] for name in names), strict=True))
        kept = [row for row in rows if all(figure in run.figures for run in row)]
        return [[row[at].figures[figure] for row in kept] for at in range(len(names))]

    def mean(self, figure: str, name: str) -> Estimate | None:
        """Its mean over the seeds; None: no seed has it."""
        values = self.values(figure, name)[0]
        return average(values) if values else None

    def ratio(self, figure: str, name: str, to: str) -> Estimate | None:
        """The figure of one case over that of another."""
        above, below = self.values(figure, name, to)
        return ratio(above, below) if above else None

    def over(
        self, said: str, name: str, to: str, figures: Sequence[str] = ("ttft", "tpot", "lost")
    ) -> str:
        """Figures of one case over those of another, a line for people."""
        return f"  {said}: " + "; ".join(f"{f} {self.ratio(f, name, to)}" for f in figures)

    def value(self, figure: str, name: str, to: str = "") -> float:
        """The same as a number; 0: no seed has it."""
        found = self.ratio(figure, name, to) if to else self.mean(figure, name)
        return found.value if found is not None else 0.0

    def table(self, figures: Iterable[Column], names: Iterable[str] = ()) -> list[str]:
        """Rows `names`, or all, with 95 % intervals."""
        rows, wanted = list(names) or list(self.runs), list(figures)
        shown = [(f"{self.count} seeds", *(column.what for column in wanted))]
        for name in rows:
            cells = []
            for figure, _, over in wanted:
                found = self.ratio(figure, name, rows[0]) if over else self.mean(figure, name)
                cells.append("" if found is None else str(found))
            shown.append((name, *cells))
        return list(columns(shown))
