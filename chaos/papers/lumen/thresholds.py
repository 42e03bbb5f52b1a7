"""Eq. 6's thresholds: which pairs redirect requests, and the cost of a bad pair."""

from __future__ import annotations

from itertools import product

from msgspec.structs import replace

from relume.chaos.papers.lumen.parts.lumen_study import INPUTS, ONE_LOST, RECOVERY, Study
from relume.chaos.papers.result import Found, PublishedFigure, Result
from relume.chaos.papers.sampling import Sampling

THETAS, TAUS = (50, 100, 200), (0, 512, 2048, 1_000_000)
"""Per cent of the mean load; tokens. With tau 0 the holder always restores; with the last tau it
never restores while its load is above theta."""
OURS = "ours, least total"


def named(theta: int, tau: int) -> str:
    """A pair, for people."""
    return f"theta {theta:3} % of the mean load, tau {tau}"


def run(sampling: Sampling) -> Found:
    """The grid, and our recovery."""
    cases = {
        named(theta, tau): replace(ONE_LOST, theta_percent=theta, tau=tau)
        for theta, tau in product(THETAS, TAUS)
    }
    study = Study(sampling, {**cases, OURS: replace(ONE_LOST, rules="ours")})
    lost = {name: study.value("lost", name) for name in cases}
    best, worst = min(lost, key=lost.__getitem__), max(lost, key=lost.__getitem__)
    lines = study.table(RECOVERY)
    for figure in ("ttft", "lost"):
        lines.append(f"worst / best, {figure}: {study.ratio(figure, worst, best)}")
        lines.append(f"ours / best, {figure}: {study.ratio(figure, OURS, best)}")
    lines.append(f"worst: {worst}; best: {best}")
    figures = {
        "worst": study.value("lost", worst, best),
        "redirected": 1 - study.value("restored", named(200, 512), named(200, 0)),
    }
    return Found(figures, tuple(lines))


COST = "recomputation costs depend on the survivors' load, which is unknown for that simulation."

RESULT = Result(
    name="lumen-thresholds",
    about="Eq. 6's theta and tau, 4 workers, one lost",
    source="LUMEN Eq. 6; question of the review, figures of our own first simulation (DESIGN)",
    published=(
        PublishedFigure(
            key="worst",
            what="interrupted TTFT, worst / best pair",
            value=1.5,
            unit="x",
            within=0.1,
            because=COST,
        ),
        PublishedFigure(
            key="redirected",
            what="restored less at 200 %, 512 tokens",
            value=0.0,
            within=0.0,
            because=COST,
        ),
    ),
    run=run,
    sample=True,
    inputs=INPUTS,
)
