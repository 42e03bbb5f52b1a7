"""Checkpoints in storage that all hosts share, against checkpoints in other hosts' memory."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from relume.chaos.papers.lumen.context_length import case as long_case
from relume.chaos.papers.lumen.parts.lumen_study import INPUTS, ONE_LOST, RECOVERY, Column, Study
from relume.chaos.papers.lumen.parts.study_runs import Case
from relume.chaos.papers.result import Found, PublishedFigure, Result
from relume.chaos.papers.sampling import Sampling

MOVING = Column("moving_s", "moving, s")
LINKS = {"100 Gbit/s a host": 0.0, "25 Gbit/s a host": 3.125e9}
STORES = {
    "400 Gbit/s, 0.1 ms": (50e9, 1e-4),
    "100 Gbit/s, 1 ms": (12.5e9, 1e-3),
    "25 Gbit/s, 10 ms": (3.125e9, 1e-2),
    "10 Gbit/s, 10 ms": (1.25e9, 1e-2),
}
"""Storage bandwidth of all hosts together, each way, and latency."""
SPACIOUS_MB = 1 << 20


def cases() -> Mapping[str, Case]:
    """Memory and storage, for the trace and for long prompts."""
    found = {}
    for name, rate in LINKS.items():
        found[f"memory, {name}"] = replace(ONE_LOST, link_bytes_s=rate)
    for name, storage in STORES.items():
        case = replace(ONE_LOST, storage=storage, budget_mb=SPACIOUS_MB)
        found[f"storage, {name}"] = case
    return found


def run(sampling: Sampling) -> Found:
    """Both."""
    study = Study(sampling, cases())
    columns = (*RECOVERY, MOVING)
    lines = study.table(columns)
    long = {f"long prompts, memory, {gib} GiB a host": long_case("ours", gib) for gib in (8, 64)}
    for name in ("400 Gbit/s, 0.1 ms", "25 Gbit/s, 10 ms"):
        case = long_case("ours", SPACIOUS_MB >> 10)
        long[f"long prompts, storage, {name}"] = replace(case, storage=STORES[name])
    of_long = Study(sampling, long)
    figures = {
        "memory": study.value("moving_s", "memory, 100 Gbit/s a host"),
        "storage": study.value("moving_s", "storage, 10 Gbit/s, 10 ms"),
    }
    return Found(figures, (*lines, "", *of_long.table(columns)))


MEMORY = (
    "most continue at their holder, from its own memory (25 GB/s): half a GB is 20 ms, and about ten "
    "of them move one after the other."
)
STORED = (
    "the shared storage serves all restores of a failure at once, one request after the other, "
    "while blocks of others continue to arrive."
)

RESULT = Result(
    name="lumen-storage",
    about="checkpoints in shared storage against other hosts' memory, 4 workers, one lost",
    source="LUMEN, its judgement of QinServe; question of the review",
    published=(
        PublishedFigure(
            key="memory",
            what="moving a request's blocks out of memory",
            value=0.3,
            unit="s",
            within=0.5,
            because=MEMORY,
        ),
        PublishedFigure(
            key="storage",
            what="out of storage ('seconds')",
            value=1.0,
            unit="s",
            within=0.5,
            because=STORED,
        ),
    ),
    run=run,
    sample=True,
    inputs=(
        *INPUTS,
        "LUMEN's rules; long prompts: ours. Storage: one queue each way for all hosts, at the "
        "rate named, and a wait before the first byte of a request; its capacity has no limit; "
        "it does not fail. Engines look blocks up as with memory. Long prompts: as "
        "in lumen-context.",
        "'Published': the review's 'a few hundred ms' for 2,000 tokens, and 'seconds'.",
    ),
)
