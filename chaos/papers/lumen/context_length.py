"""Long contexts against the hosts' memory for checkpoints: Mooncake's prompts."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product

from relume.chaos.papers.lumen.parts.lumen_study import RECOVERY, Study
from relume.chaos.papers.lumen.parts.lumen_tables import RELOAD
from relume.chaos.papers.lumen.parts.study_runs import HARDWARE, MODEL, Case
from relume.chaos.papers.result import Found, PublishedFigure, Result
from relume.chaos.papers.sampling import Sampling
from relume.chaos.sim.engine import host_types as hosts

BUDGETS = (1, 4, 16, 64)
PER_S = 0.15
"""Requests per second and worker: about half of a worker's capacity for these prompts."""
GIB = 1 << 30


def case(rule: str, budget_gib: int = 64) -> Case:
    """One of four lost."""
    return Case(
        rules=rule, workers=4, seed=0, fails=1, per_s=PER_S, lengths="mooncake-conversation", budget_mb=budget_gib << 10
    )  # fmt: skip


def cases() -> Mapping[str, Case]:
    """Checkpoint budgets of a host, and no checkpoints."""
    found = {"stop and restart": case("restart")}
    for rule, budget in product(("lumen", "ours"), BUDGETS):
        found[f"{rule}, {budget} GiB a host"] = case(rule, budget)
    return found


def run(sampling: Sampling) -> Found:
    """Every budget."""
    study = Study(sampling, cases())
    lines = study.table(RECOVERY)
    spec = hosts.spec(MODEL, HARDWARE)
    figures = {
        "kv": spec.kv_bytes_per_token * 32768 / GIB,
        "ample": study.value("restored", "ours, 64 GiB a host"),
        "scarce": study.value("restored", "ours, 1 GiB a host"),
    }
    return Found(figures, tuple(lines))


TWICE = "Table A is twice what Eq. 1 gives, in every row."
LATE = (
    "ours recomputes tokens that are sooner computed than moved, even if holders have them (LUMEN's "
    "rules restore more, and wait longer). No holder has tokens that were in computation when the "
    "engine died."
)

RESULT = Result(
    name="lumen-context",
    about="Mooncake's prompts against the memory of holders, 4 workers, one lost",
    source="LUMEN Eq. 5, Table A; question of the review",
    published=(
        PublishedFigure(
            key="kv",
            what="KV cache of 32K tokens (Table A)",
            value=16.0,
            unit="GiB",
            because=TWICE,
        ),
        PublishedFigure(
            key="ample",
            what="restored with 64 GiB a host",
            value=1.0,
            within=0.1,
            because=LATE,
        ),
        PublishedFigure(
            key="scarce",
            what="restored with 1 GiB a host",
            value=0.0,
            within=0.0,
            because="part of the requests is short.",
        ),
    ),
    run=run,
    sample=True,
    inputs=(
        "Lengths: 512 of Mooncake's 12,031 conversation requests, prompts of 12,100 tokens on "
        "average, cut at 100,000 (one of them). Arrivals are Poisson, 0.15 per second and "
        "worker (the trace's 3.4 would need about 24 such workers). Its shared prefixes are left "
        "out: every prompt is computed and held whole. Qwen3-32B on two RTX PRO 6000, 131,072 "
        "tokens at most.",
        RELOAD,
        "The review names no figures of coverage: 'published' is all of it, and none.",
    ),
)
