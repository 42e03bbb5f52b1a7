"""Draft assistance by acceptance, drafts and the survivors' bottleneck: tokens or prompts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from msgspec.structs import replace

from relume.chaos.papers.lumen.parts.lumen_study import INPUTS, ONE_LOST, Study
from relume.chaos.papers.lumen.parts.lumen_tables import WITHOUT_DRAFTS
from relume.chaos.papers.lumen.parts.study_runs import (
    DRAFT_SHARE,
    EXCHANGE_US,
    HARDWARE,
    MODEL,
    Case,
)
from relume.chaos.papers.result import Found, PublishedFigure, Result
from relume.chaos.papers.sampling import Sampling
from relume.chaos.sim.engine import step_cost as cost
from relume.chaos.sim.engine.speed import AssistedStepCost, Drafts

ACCEPTED, DRAFTED, BATCHES = (0.3, 0.6, 0.9), (2, 4, 8), (1, 16, 64, 128)
RUN = (2, 6)
"""Numbers of drafts in runs of whole fleets."""
CONTEXT = 1200
BOTTLENECKS = {
    "decoding": replace(ONE_LOST, per_s=3.5, prompts=(50, 200), outputs=(300, 500)),
    "both (the trace)": ONE_LOST,
    "prompts": replace(ONE_LOST, per_s=1.4, prompts=(2000, 4000), outputs=(20, 60)),
}
"""Loads, each about three quarters of four workers' capacity."""
PLAIN = "no drafts"
SPARING = "0.6, 6 drafts, where they pay"


def cases(bottleneck: str) -> Mapping[str, Case]:
    """All cases of one bottleneck."""
    plain = BOTTLENECKS[bottleneck]
    found = {f"{bottleneck}: {PLAIN}": plain}
    for accepted, drafts in product(ACCEPTED, RUN):
        case = replace(plain, assist=(accepted, drafts))
        found[f"{bottleneck}: {accepted}, {drafts} drafts"] = case
    found[f"{bottleneck}: {SPARING}"] = replace(plain, assist=(0.6, RUN[-1]), sparing=True)
    return found


def decoding() -> list[str]:
    """Speed-up of tokens of an engine that only decodes and has a drafter."""
    plain = cost.load(f"{MODEL}_{HARDWARE}")
    lines = ["a token with drafts, times as fast: by acceptance, drafts, sequences"]
    lines.append(f"{'':18}" + "".join(f"{batch:>8}" for batch in BATCHES))
    for accepted, count in product(ACCEPTED, DRAFTED):
        drafted = AssistedStepCost(
            plain,
            Drafts(acceptance=accepted, count=count, share=DRAFT_SHARE, exchange_us=EXCHANGE_US),
        )
        ratios = [
            plain.decode(batch, batch * CONTEXT)[0] / drafted.decode(batch, batch * CONTEXT)[0]
            for batch in BATCHES
        ]
        lines.append(f"  {accepted:.1f}, {count} drafts   " + "".join(f"{r:8.2f}" for r in ratios))
    return lines


def run(sampling: Sampling) -> Found:
    """Every bottleneck, each over the same runs without drafts."""
    lines = [f"over no drafts, {sampling.count} seeds: TTFT, TPOT, interrupted, uninterrupted TTFT"]
    changes = []
    for bottleneck in BOTTLENECKS:
        study = Study(sampling, cases(bottleneck))
        base = f"{bottleneck}: {PLAIN}"
        shown = [f"{f} {study.mean(f, base)}" for f in ("ttft", "tpot", "lost", "plain_queue")]
        lines.append(f"  {base:44} " + "; ".join(shown))
        for name in study.runs:
            if name != base:
                over = [study.ratio(f, name, base) for f in ("ttft", "tpot", "lost", "plain")]
                lines.append(f"  {name:44} " + "  ".join(map(str, over)))
                if SPARING not in name:
                    changes.append(study.value("ttft", name, base) - 1)
    gain = AssistedStepCost(cost.load(f"{MODEL}_{HARDWARE}"), Drafts(acceptance=0.8, count=4)).gain
    figures = {"gain": gain, "worst": max(changes), "best": min(changes)}
    return Found(figures, (*lines, "", *decoding()))


LOAD = (
    "how much an earlier token or prompt shortens the queue depends on the survivors' spare "
    "capacity."
)

RESULT = Result(
    name="lumen-drafts",
    about="draft assistance by acceptance, drafts and bottleneck, 4 workers, one lost",
    source="LUMEN Eq. 3, mechanism 3; question of the review; DESIGN, our first simulation",
    published=(
        PublishedFigure(
            key="gain",
            what="tokens a step, acceptance 0.8, 4 drafts (Eq. 3)",
            value=3.4,
            within=0.02,
        ),
        PublishedFigure(
            key="worst",
            what="most by which drafts change mean TTFT",
            value=0.16,
            within=0.2,
            because=LOAD,
        ),
        PublishedFigure(key="best", what="least", value=-0.04, within=0.2, because=LOAD),
    ),
    run=run,
    sample=True,
    inputs=(*INPUTS, WITHOUT_DRAFTS),
)
