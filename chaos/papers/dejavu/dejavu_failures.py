"""DéjàVu Figures 10 and 11: a stage of a pipeline dies, with and without a replicated KV cache.
OPT-66B, four machines, microbatches of 8, 500 prompt and 1,000 generated tokens.

Without replicas, all running microbatches start from their prompts again; with replicas, they
continue from the last replicated token. Both wait the same time until the stage is back. The text
does not give that time: it is the rest of Figure 10's 1.24.
"""

from __future__ import annotations

from relume.chaos.papers.dejavu.inputs import OPT_66B, a100, prompt_ns, token_ns
from relume.chaos.papers.dejavu.pipeline import Job, ends
from relume.chaos.papers.result import Found, PublishedFigure, Result
from relume.chaos.papers.sampling import Sampling

STAGES, BATCH, PROMPT, TOKENS = 4, 8, 500, 1000
FAILURE_STEP = 1200
KEPT, LOST = 1.24, 1.91
FAILURES_S = (600, 1200, 1800)
MACHINE = a100(2)


class Pipeline:
    """The study's pipeline; `slower` stretches every time."""

    def __init__(self, slower: float = 1.0) -> None:
        prompt = prompt_ns(OPT_66B, MACHINE, BATCH, PROMPT)
        token = token_ns(OPT_66B, MACHINE, BATCH, PROMPT + TOKENS // 2)
        self.prompt_ns = round(prompt * slower / STAGES)
        self.token_ns = round(token * slower / STAGES)

    def ends(self, count: int, tokens: int = TOKENS) -> list[float]:
        """End times in seconds of `count` microbatches that all wait from the start."""
        jobs = [Job(0, self.prompt_ns, tokens)] * count
        return [end / 1e9 for end in ends(jobs, STAGES, self.token_ns)]

    def latency_s(self, tokens: int = TOKENS) -> float:
        """Latency of the first of as many microbatches as there are stages."""
        return self.ends(STAGES, tokens)[0]

    @property
    def down_s(self) -> float:
        """Time until a failed stage is back, by Figure 10's ratio with replicas."""
        return (KEPT - 1) * self.latency_s()

    def runtime_s(self, count: int, failures: tuple[int, ...]) -> tuple[float, float]:
        """Seconds until all `count` end, despite `failures`: from scratch, with replicas."""
        begun, left = 0.0, count
        for failure in failures:
            done = sum(begun + end <= failure for end in self.ends(left)) if left else 0
            if done == left:
                break
            begun, left = failure + self.down_s, left - done
        scratch = begun + max(self.ends(left))
        whole = max(self.ends(count))
        for failure in failures:
            whole += self.down_s if whole > failure else 0.0
        return scratch, whole


def filled(pipeline: Pipeline) -> int:
    """Number of microbatches that keep the pipeline busy beyond the last failure."""
    groups = int(FAILURES_S[-1] / pipeline.latency_s()) + 1
    return STAGES * groups


def run(_: Sampling) -> Found:
    pipeline = Pipeline()
    whole = pipeline.latency_s()
    before = pipeline.latency_s(FAILURE_STEP - PROMPT)
    scratch = 1 + (before + pipeline.down_s) / whole
    lines = [
        f"a microbatch takes {whole:.1f} s; a stage is away for {pipeline.down_s:.1f} s",
        f"Fig. 4: 1.89 with half of the tokens lost leaves {1.89 - 1.5:.2f} of a latency for the "
        f"restart, Fig. 10's 1.24 leaves {KEPT - 1:.2f}",
        "Fig. 11: microbatch  runtime from scratch, with replicas, ratio",
    ]
    ratios = {}
    for slower in (1.0, 2.0, 3.0, 4.0):
        stretched = Pipeline(slower)
        took = stretched.runtime_s(filled(stretched), FAILURES_S)
        ratios[slower] = took[0] / took[1]
        shown = f"{took[0]:8.0f} s, {took[1]:6.0f} s, {ratios[slower]:.3f}"
        lines.append(f"  {stretched.latency_s():10.1f} s  {shown}")
    figures = {
        "kept": (whole + pipeline.down_s) / whole,
        "lost": scratch,
        "less": scratch / KEPT,
        "runtime": ratios[1.0],
    }
    return Found(figures, tuple(lines))


SHORT = (
    "a failure loses at most one microbatch's latency for each slot, and 1.16 needs about 100 s "
    "lost at each of the three: more than a microbatch needs by the roofline. Microbatches twice "
    "as long give the figure (lines above); the text does not give their latency."
)

RESULT = Result(
    name="dejavu-failures",
    about="cost of a failed pipeline stage with and without replicas",
    source="DéjàVu Section 5.2.3, Fig. 10 and 11",
    published=(
        PublishedFigure(
            key="kept", what="latency with replicas", value=KEPT, unit="x", calibrated=True
        ),
        PublishedFigure(key="lost", what="latency from scratch", value=LOST, unit="x"),
        PublishedFigure(key="less", what="  lower with replicas by", value=1.54, unit="x"),
        PublishedFigure(
            key="runtime",
            what="runtime, three failures",
            value=1.16,
            unit="x",
            because=SHORT,
        ),
    ),
    run=run,
    inputs=(
        "Time until a failed stage is back: from 1.24. Step 1,200 is read as position 1,200 of "
        "500 + 1,000. Times: the roofline. Fig. 11: as many microbatches as fill the pipeline "
        "until after the last failure.",
    ),
)
