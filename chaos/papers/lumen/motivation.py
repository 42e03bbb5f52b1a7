"""LUMEN, motivation: one worker of four is lost, and its requests start from scratch."""

from __future__ import annotations

from relume.chaos.papers.lumen.parts.lumen_tables import INPUTS, RuleComparison
from relume.chaos.papers.result import Found, PublishedFigure, Result
from relume.chaos.papers.sampling import Sampling

TTFT, TPOT = (1.16, 4.69), (138.9, 224.6)


def run(sampling: Sampling) -> Found:
    """No failure, and stop-and-restart."""
    compared = RuleComparison(sampling, 4, ("restart",), 1)
    ttft = compared.ratio("ttft", "restart", "none")
    tpot = compared.ratio("tpot", "restart", "none")
    plain = compared.ratio("plain", "restart", "none")
    queue = compared.mean("plain_queue", "restart")
    runs = compared.runs["restart"]
    lost = [run.figures["lost"] / run.figures["plain"] for run in runs]
    share = compared.mean("lost_share", "restart")
    figures = {
        "ttft": ttft.value,
        "tpot": tpot.value,
        "plain": plain.value,
        "queue": queue.value,
        "lost": sum(lost) / len(lost),
        "share": share.value,
    }
    lines = [
        *compared.table(),
        f"{sampling.count} seeds; 95 % intervals: TTFT {ttft}, TPOT {tpot}, "
        f"uninterrupted {plain}, queued {queue}",
    ]
    return Found(figures, tuple(lines))


QUEUE = (
    "here, survivors run at their capacity for 20 s; a queue grows while their load exceeds it, for "
    "a time that the paper does not give. Engines here have places left (up to 128 sequences), so "
    "part of the load shows as longer steps."
)
REPLAY = (
    "a replayed request waits for the queue of prompts and its own, 2 to 4 s at 11,000 prompt "
    "tokens per second. 24 to 29 s is the paper's whole recovery time, as if they waited for the "
    "restarted worker."
)
SHARE = "interrupted requests over those of the 40 s window; the paper's are of a longer run."

RESULT = Result(
    name="lumen-motivation",
    about="one worker of four lost under stop-and-restart, over no failure",
    source="LUMEN, motivation",
    published=(
        PublishedFigure(
            key="ttft",
            what="mean TTFT",
            value=TTFT[1] / TTFT[0],
            unit="x",
            within=0.15,
            because=QUEUE,
        ),
        PublishedFigure(
            key="tpot",
            what="mean TPOT",
            value=TPOT[1] / TPOT[0],
            unit="x",
            within=0.15,
            because=QUEUE,
        ),
        PublishedFigure(
            key="plain",
            what="uninterrupted TTFT",
            value=4.1 / 1.16,
            unit="x",
            within=0.15,
            because=QUEUE,
        ),
        PublishedFigure(
            key="queue", what="  of it queueing", value=0.79, within=0.15, because=QUEUE
        ),
        PublishedFigure(
            key="lost",
            what="interrupted / uninterrupted TTFT",
            value=7.15,
            unit="x",
            within=0.18,
            because=REPLAY,
        ),
        PublishedFigure(
            key="share",
            what="interrupted requests",
            value=0.027,
            within=0.1,
            because=SHARE,
        ),
    ),
    run=run,
    sample=True,
    inputs=INPUTS,
)
