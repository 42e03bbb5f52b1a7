"""LUMEN at 4 to 64 workers, a quarter lost: its rules, the two before it, and ours."""

from __future__ import annotations

from relume.chaos.papers.lumen.parts.lumen_tables import (
    COMPARED,
    INPUTS,
    QUEUE,
    RuleComparison,
)
from relume.chaos.papers.lumen.parts.study_runs import title
from relume.chaos.papers.result import Found, PublishedFigure, Result
from relume.chaos.papers.sampling import Sampling

SIZES = (4, 8, 16, 32, 64)
RULES = (*COMPARED, "ours-ttft")


def run(sampling: Sampling) -> Found:
    """Means over the requested sizes."""
    over: dict[str, list[float]] = {rule: [] for rule in RULES}
    lines = []
    for size in sampling.sizes(SIZES):
        compared = RuleComparison(sampling, size, RULES)
        lines += [f"{size} workers, {sampling.count} seeds", *compared.table()]
        for rule in RULES:
            over[rule].append(compared.ratio("ttft", rule, "none").value)
        for rule in ("ours", "ours-ttft"):
            for figure in ("ttft", "p99", "plain", "lost"):
                found = compared.ratio(figure, rule, "lumen")
                lines.append(f"  {title(rule)} / LUMEN, {figure}: {found}")
        lines.append("")
    figures = {rule: sum(values) / len(values) for rule, values in over.items()}
    return Found(figures, tuple(lines[:-1]))


SHAPE = "the paper prints these as about 4, 3 and 1.5 to 2. "
LITTLE = (
    "restoring from a host's memory is fast here, even if one holder does all of it; engines "
    "recompute the blocks of a dead holder."
)

RESULT = Result(
    name="lumen-scale",
    about="mean TTFT over no failure, a quarter of 4 to 64 workers lost",
    source="LUMEN, scalability",
    published=(
        PublishedFigure(
            key="restart",
            what="stop and restart",
            value=4.0,
            unit="x",
            within=0.15,
            because=SHAPE + QUEUE,
            recorded=3.16,
            recorded_within=0.2,
        ),
        PublishedFigure(
            key="neighbour",
            what="fixed neighbour",
            value=3.0,
            unit="x",
            within=0.15,
            because=SHAPE + LITTLE,
            recorded=1.62,
            recorded_within=0.15,
        ),
        PublishedFigure(
            key="lumen",
            what="LUMEN",
            value=1.75,
            unit="x",
            within=0.15,
            because=SHAPE + QUEUE,
            recorded=1.47,
            recorded_within=0.15,
        ),
    ),
    run=run,
    sample=True,
    inputs=INPUTS,
)
