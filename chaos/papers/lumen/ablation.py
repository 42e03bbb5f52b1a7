"""LUMEN's three mechanisms, each with and without the others."""

from __future__ import annotations

from relume.chaos.papers.lumen.parts.lumen_tables import INPUTS, RuleComparison
from relume.chaos.papers.result import Found, PublishedFigure, Result
from relume.chaos.papers.sampling import Sampling

MECHANISMS = (
    "neighbour", "spread", "neighbour-eq6", "lumen",
    "neighbour+drafts", "spread+drafts", "neighbour-eq6+drafts", "lumen+drafts",
)  # fmt: skip
"""Placement of checkpoints, whether Eq. 6 redirects, whether the loading host drafts."""
STEPS = {
    "placement": ("spread", "neighbour"),
    "Eq. 6 after a fixed neighbour": ("neighbour-eq6", "neighbour"),
    "Eq. 6 after load-aware placement": ("lumen", "spread"),
    "drafts alone": ("neighbour+drafts", "neighbour"),
    "drafts after both": ("lumen+drafts", "lumen"),
    "ours in place of Eq. 6": ("ours", "lumen"),
    "all three": ("lumen+drafts", "neighbour"),
}
FIGURES = {"ttft": "TTFT", "p99": "p99", "tpot": "TPOT", "lost": "interrupted"}


def run(sampling: Sampling) -> Found:
    """All eight, ours with and without drafts, and stop and restart."""
    compared = RuleComparison(sampling, 4, ("restart", *MECHANISMS, "ours"), 1)
    lines = [f"4 workers, one lost, {sampling.count} seeds", *compared.table(), ""]
    for what, (with_it, without) in STEPS.items():
        shown = [f"{label} {compared.ratio(f, with_it, without)}" for f, label in FIGURES.items()]
        for kind, label in (("ttft", "TTFT back"), ("itl", "ITL back")):
            shown.append(f"{label} {compared.back_ratio(kind, with_it, without)}")
        lines.append(f"  {what:34} " + "; ".join(shown))
    figures = {f: compared.ratio(f, "lumen+drafts", "neighbour").value for f in ("ttft", "tpot")}
    figures["back"] = compared.back_ratio("ttft", "lumen+drafts", "neighbour").value
    return Found(figures, tuple(lines))


ENGINE = (
    "drafts help one survivor of three, which also verifies drafts while it computes prompts; TTFT "
    "is back to normal only when the engine is back."
)

RESULT = Result(
    name="lumen-ablation",
    about="the three mechanisms, each with and without the others",
    source="LUMEN, prototype results; question of the review",
    published=(
        PublishedFigure(
            key="ttft",
            what="all three / fixed neighbour, mean TTFT",
            value=0.929,
            unit="x",
            within=0.1,
            because=ENGINE,
            recorded=1.03,
            recorded_within=0.08,
        ),
        PublishedFigure(
            key="tpot",
            what="all three / fixed neighbour, mean TPOT",
            value=0.930,
            unit="x",
            within=0.1,
            because=ENGINE,
            recorded=0.99,
            recorded_within=0.03,
        ),
        PublishedFigure(
            key="back",
            what="all three / fixed neighbour, recovery time",
            value=0.651,
            unit="x",
            within=0.1,
            because=ENGINE,
            recorded=0.97,
            recorded_within=0.35,
        ),
    ),
    run=run,
    sample=True,
    inputs=INPUTS,
)
