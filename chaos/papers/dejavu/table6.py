"""DéjàVu Table 6: the effect of slow networks on separate prompt and token pipelines. BLOOM-176B,
three machines for prompts, four for tokens, microbatches of 8."""

from __future__ import annotations

import random
from statistics import median

from relume.chaos.papers.dejavu.inputs import (
    BLOOM_176B,
    PROMPT_TOKENS,
    TABLE_6_PROMPT_S,
    a100,
    sampled,
    token_ns,
)
from relume.chaos.papers.dejavu.pipeline import apart
from relume.chaos.papers.result import Found, PublishedFigure, Result
from relume.chaos.papers.sampling import Sampling

BATCH, PROMPT_MACHINES, TOKEN_MACHINES = 8, 3, 4
KV_BYTES = BATCH * PROMPT_TOKENS * BLOOM_176B.kv_bytes / PROMPT_MACHINES
REQUESTS = 512
"""Microbatches, as in the authors' public simulator."""

TABLE = (
    # Gbit/s, transfer s, extra s, latency a token s
    (100, 0.856, 0.0, 1.29),
    (80, 1.07, 0.0, 1.29),
    (60, 1.43, 0.0, 1.29),
    (40, 2.14, 0.0, 1.29),
    (20, 4.28, 1.18, 1.35),
    (10, 8.56, 5.46, 1.5),
    (1, 85.6, 82.5, 3.65),
)


def transfer_s(gbit_s: float) -> float:
    """Time to send a stage's KV cache of one microbatch."""
    return KV_BYTES * 8 / (gbit_s * 1e9)


def extra_s(gbit_s: float) -> float:
    """The part of it that the next microbatch's prompt does not hide."""
    return max(0.0, transfer_s(gbit_s) - TABLE_6_PROMPT_S)


def latency_s(gap_s: float, extra: float, seed: int) -> float:
    """Median over microbatches of time in the system per token, with Poisson arrivals at a mean
    interval of `gap_s`."""
    drawn = random.Random(f"{seed}:table6")
    tokens = [drawn.choice(sampled(seed)) for _ in range(REQUESTS)]
    at, arrivals = 0.0, []
    for _ in tokens:
        at += drawn.expovariate(1.0)
        arrivals.append(round(at * gap_s * 1e9))
    step = token_ns(BLOOM_176B, a100(2), BATCH) // TOKEN_MACHINES
    prompt = round(TABLE_6_PROMPT_S * 1e9)
    done = apart(
        tokens, PROMPT_MACHINES, TOKEN_MACHINES, prompt, step, arrivals, round(extra * 1e9)
    )
    each = zip(done, arrivals, tokens, strict=True)
    return median((end - begun) / count for end, begun, count in each) / 1e9


def calibrated_gap_s(goal_s: float, seed: int) -> float:
    """Mean time between arrivals at which the median latency per token is `goal_s`."""
    low, high = 0.1, 1000.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if latency_s(middle, 0.0, seed) > goal_s else (low, middle)
    return high


def run(sampling: Sampling) -> Found:
    gap_s = calibrated_gap_s(TABLE[0][3], sampling.seed)
    figures: dict[str, float] = {"kv": KV_BYTES / 1e9}
    for gbit_s, *_ in TABLE:
        figures[f"transfer_{gbit_s}"] = transfer_s(gbit_s)
        figures[f"extra_{gbit_s}"] = extra_s(gbit_s)
        figures[f"latency_{gbit_s}"] = latency_s(gap_s, extra_s(gbit_s), sampling.seed)
    alone = latency_s(1000.0, 0.0, sampling.seed)
    step_s = token_ns(BLOOM_176B, a100(2), BATCH) / 1e9
    served_s = sum(sampled(sampling.seed)) / len(sampled(sampling.seed)) * step_s / TOKEN_MACHINES
    lines = (
        f"arrivals fitted to {gap_s:.2f} s apart, the token pipeline ends one in {served_s:.2f} s;",
        f"most of 1.29 s is waiting (nearly alone {alone:.2f} s), growing over {REQUESTS} arrivals",
        f"10.7 GB are a third of a microbatch's {KV_BYTES * PROMPT_MACHINES / 1e9:.1f} GB: what "
        "one of the three prompt machines sends",
        f"m = transfer / prompt passes 2 - 1/7 (Eq. 5) at "
        f"{KV_BYTES * 8 / (TABLE_6_PROMPT_S * (2 - 1 / 7)) / 1e9:.1f} Gbit/s",
    )
    return Found(figures, lines)


def _published() -> tuple[PublishedFigure, ...]:
    rows = [
        PublishedFigure(
            key="kv", what="KV cache sent by a prompt machine", value=10.7, unit="GB", within=0.01
        )
    ]
    for gbit_s, transfer, extra, latency in TABLE:
        row = f"{gbit_s} Gbit/s, "
        fitted = gbit_s >= 40
        rows += [
            PublishedFigure(
                key=f"transfer_{gbit_s}",
                what=row + "transfer",
                value=transfer,
                unit="s",
                within=0.01,
            ),
            PublishedFigure(
                key=f"extra_{gbit_s}", what=row + "not hidden", value=extra, unit="s", within=0.01
            ),
            PublishedFigure(
                key=f"latency_{gbit_s}",
                what=row + "latency a token",
                value=latency,
                unit="s",
                within=0.1,
                calibrated=fitted,
            ),
        ]
    return tuple(rows)


RESULT = Result(
    name="dejavu-table6",
    about="latency with prompts and tokens apart, by network bandwidth",
    source="DéjàVu Table 6, Appendix H.4",
    published=_published(),
    run=run,
    inputs=(
        "The arrival rate is not given: fitted to 1.29 s at 100 Gbit/s. Lengths as of "
        "dejavu-makespan. A token step on four machines is the roofline's. The part of a transfer "
        "that is not hidden delays a microbatch at each prompt stage, but blocks no stage.",
    ),
)
