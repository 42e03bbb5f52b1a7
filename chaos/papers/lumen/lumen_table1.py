"""LUMEN Table 1: a quarter of 4 to 64 workers is lost under stop-and-restart."""

from __future__ import annotations

from relume.chaos.papers.lumen.parts.lumen_tables import INPUTS, REPLAY, RuleComparison
from relume.chaos.papers.result import Found, PublishedFigure, Result
from relume.chaos.papers.sampling import Sampling

PRINTED = {4: (4.1, 25.6), 8: (3.8, 24.0), 16: (3.5, 27.1), 32: (3.5, 29.4), 64: (3.6, 27.8)}
"""By workers: uninterrupted and replay TTFT, s."""


def run(sampling: Sampling) -> Found:
    """Compare the requested sizes, at least two; the paper's only statement by size is that the
    size does not matter."""
    lines = ["workers  uninterrupted TTFT, s       over no failure             interrupted TTFT, s"]
    whole: list[str] = []
    plain, lost = {}, {}
    for size in sorted({4, 8, *sampling.sizes(PRINTED)}):
        compared = RuleComparison(sampling, size, ("restart",))
        plain[size] = compared.mean("plain", "restart")
        lost[size] = compared.mean("lost", "restart")
        over = compared.ratio("plain", "restart", "none")
        lines.append(f"{size:7}  {plain[size]!s:26}  {over!s:26}  {lost[size]}")
        whole += ["", f"{size} workers", *compared.table()]
    lines += [f"{sampling.count} seeds, 95 % intervals", *whole]
    uninterrupted = [one.value for one in plain.values()]
    figures = {
        "flat": max(uninterrupted) / min(uninterrupted),
        "replay_flat": max(o.value for o in lost.values()) / min(o.value for o in lost.values()),
        "lost": sum(lost[s].value / plain[s].value for s in plain) / len(plain),
    }
    return Found(figures, tuple(lines))


SHORT = (
    "fleets of 32 and 64 workers have short runs, whose queues have less time to grow; up to 16 "
    "workers the figure is reproduced."
)

RESULT = Result(
    name="lumen-table1",
    about="a quarter of 4 to 64 workers lost under stop-and-restart",
    source="LUMEN Table 1",
    published=(
        PublishedFigure(
            key="flat",
            what="uninterrupted TTFT, most / least by size",
            value=4.1 / 3.5,
            unit="x",
            within=0.2,
            because=SHORT,
            recorded=1.39,
            recorded_within=0.1,
        ),
        PublishedFigure(
            key="replay_flat",
            what="replay TTFT, most / least by size",
            value=29.4 / 24.0,
            unit="x",
            within=0.2,
            because=SHORT,
            recorded=1.49,
            recorded_within=0.1,
        ),
        PublishedFigure(
            key="lost",
            what="replay / uninterrupted, mean of sizes",
            value=7.24,
            unit="x",
            within=0.18,
            because=REPLAY,
            recorded=2.9,
            recorded_within=0.2,
        ),
    ),
    run=run,
    sample=True,
    inputs=INPUTS,
)
