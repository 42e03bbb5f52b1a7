"""DéjàVu Figures 20 and 21: BLOOM-176B in one pipeline with and without early stops, by number
of machines and by microbatch."""

from __future__ import annotations

from itertools import pairwise

from relume.chaos.papers.dejavu.dejavu_study import one_pipeline
from relume.chaos.papers.dejavu.inputs import BLOOM_176B, a100, fits, lengths
from relume.chaos.papers.result import Found, PublishedFigure, Result
from relume.chaos.papers.sampling import Sampling

BATCH = 16
MACHINES = tuple(range(2, 17, 2))
SIZES = (4, 8, 16, 32)
MACHINE = a100(4)


def level(given: list[int]) -> list[int]:
    """As many microbatches, each of the mean length: none stops before another."""
    return [round(sum(given) / len(given))] * len(given)


def run(sampling: Sampling) -> Found:
    given = lengths(BATCH, sampling.seed)
    stops = [one_pipeline(BLOOM_176B, MACHINE, d, BATCH, given) for d in MACHINES]
    steady = [one_pipeline(BLOOM_176B, MACHINE, d, BATCH, level(given)) for d in MACHINES]
    falls = sum(b < a for a, b in pairwise(steady))
    rises = [d for (a, b), d in zip(pairwise(stops), MACHINES[1:], strict=True) if b > a]
    lines = [
        f"{d:2} machines: {a:6.0f} s, {b:6.0f} s without early stops, {a / b:.2f}"
        for d, a, b in zip(MACHINES, stops, steady, strict=True)
    ]
    by_size: dict[int, float] = {}
    for b in (b for b in SIZES if fits(BLOOM_176B, MACHINE, 8, b)):
        asked = lengths(b, sampling.seed)
        by_size[b] = one_pipeline(BLOOM_176B, MACHINE, 8, b, asked)
        without = one_pipeline(BLOOM_176B, MACHINE, 8, b, level(asked))
        lines.append(f"8 machines, {b:2} a microbatch: {by_size[b]:.0f} s, {without:.0f} s without")
    lines.append(
        "the rises come from the workload: each length stands for 64 / 16 = 4 neighbours that "
        "stop together, which hides stops at depths that 4 divides and at no other"
    )
    figures = {
        "falls": falls,
        "longer": sum(a > b for a, b in zip(stops, steady, strict=True)),
        "rises": sum(d in (6, 10, 14) for d in rises),
        "others": sum(d not in (6, 10, 14) for d in rises),
        "not_largest": float(min(by_size, key=lambda b: by_size[b]) < max(by_size)),
    }
    return Found(figures, tuple(lines))


RESULT = Result(
    name="dejavu-early-stops",
    about="what early stops cost one pipeline",
    source="DéjàVu Fig. 20 and 21",
    published=(
        PublishedFigure(
            key="falls",
            what="steps of two machines more that help, without stops",
            value=7,
            within=0,
        ),
        PublishedFigure(
            key="longer", what="depths at which stops make it longer", value=len(MACHINES), within=0
        ),
        PublishedFigure(
            key="rises", what="depths (6, 10, 14) at which it rises with stops", value=3, within=0
        ),
        PublishedFigure(key="others", what="other depths at which it rises", value=0, within=0),
        PublishedFigure(
            key="not_largest", what="the largest microbatch is not best (1: yes)", value=1, within=0
        ),
    ),
    run=run,
    inputs=("As of dejavu-makespan; the figures' curves are not in the text, only their shape.",),
)
