"""DéjàVu Eq. 1 and 4 to 7: the planner's divisions against the search of `dejavu-makespan`, and the
accuracy of its equations."""

from __future__ import annotations

from fractions import Fraction

from relume.chaos.papers.dejavu.dejavu_memory import footprint
from relume.chaos.papers.dejavu.dejavu_tables import SETTINGS
from relume.chaos.papers.dejavu.inputs import MEAN_TOKENS, Machine, Model, prompt_ns, token_ns
from relume.chaos.papers.result import Found, PublishedFigure, Result
from relume.chaos.papers.sampling import Sampling
from relume.policies.disaggregation.machine_split import (
    Work,
    choose,
    pays,
    prompt_machines_at_least,
    together_us,
    token_machines_at_least,
    token_share,
)

ROWS = [(setting, row) for setting in SETTINGS for row in setting.rows if row.apart]


def work(model: Model, machine: Machine, machines: int, batch: int) -> Work:
    """The planner's inputs: a stage's times when all machines share the model."""
    prompt = prompt_ns(model, machine, batch) // (1000 * machines)
    token = token_ns(model, machine, batch) // (1000 * machines)
    return Work(prompt, token, round(MEAN_TOKENS))


def overhead_limit(machines: int) -> Fraction:
    """m up to which two pipelines can pay, for any Y / t: by trying Eq. 5."""
    for percent in range(300, 99, -1):
        m = Fraction(percent, 100)
        if pays(machines, Work(10**12, 1, 1, m)):
            return m
    return Fraction(0)


def run(_: Sampling) -> Found:
    exact = near = 0
    gains: list[float] = []
    lines = ["figure  machines  published  planned  Eq. 1"]
    for setting, row in ROWS:
        assert row.apart is not None
        prompt, _limit, token, batch = row.apart
        asked = work(setting.model, setting.machine, row.machines, batch)
        size = footprint(setting.model, setting.machine, batch)
        least = prompt_machines_at_least(size), token_machines_at_least(size)
        split = choose(row.machines, asked, *least)
        share = float(row.machines - token_share(row.machines, asked))
        exact += split.prompt == prompt
        near += abs(split.prompt - prompt) <= 1
        if split.prompt:
            gains.append(float(together_us(row.machines, asked) / split.inverse_us))
        shown = f"{split.prompt} + {split.token}" if split.prompt else "together"
        given = f"{setting.figure:6}  {row.machines:8}  {prompt:4} + {token:<2}"
        lines.append(f"{given}  {shown:>8}  {share:5.1f}")
    limit = {machines: float(overhead_limit(machines)) for machines in (4, 16)}
    lines += [
        f"two pipelines can pay up to m = {limit[4]:.2f} with 4 machines, {limit[16]:.2f} with 16",
        f"Eq. 4 promises at most {max(gains):.2f} times one pipeline's throughput here, and always "
        "less than 2; a larger gain in the makespans comes from stops that do not overlap",
    ]
    figures = {"exact": exact, "near": near, "limit_4": limit[4], "limit_16": limit[16]}
    return Found(figures, tuple(lines))


LIMIT = (
    "Eq. 5 as printed is only an inequality for a positive denominator D (2 - m) - 1, so it needs "
    "m < 2 - 1 / D; m < 2 is its limit for many machines."
)
SPLITS = (
    "most of those that differ are BLOOM's, whose token steps must be shorter than the "
    "roofline's (see dejavu-makespan). With 2 and 4 machines Eq. 4 prefers one pipeline where "
    "the table names the best division; for 4 machines of Table 2 the planner gets microbatches "
    "of 2."
)

RESULT = Result(
    name="dejavu-planner",
    about="the planner's divisions of machines, and the bounds of its equations",
    source="DéjàVu Eq. 1 to 7, Tables 2 to 5",
    published=(
        PublishedFigure(
            key="exact",
            what="planned divisions as published",
            value=len(ROWS),
            within=0,
            because=SPLITS,
        ),
        PublishedFigure(
            key="near",
            what="  at most one machine off",
            value=len(ROWS),
            within=0.1,
            because=SPLITS,
        ),
        PublishedFigure(
            key="limit_16",
            what="largest overhead m that pays, 16 machines",
            value=2,
            because=LIMIT,
        ),
        PublishedFigure(
            key="limit_4",
            what="largest overhead m that pays, 4 machines",
            value=2,
            because=LIMIT,
        ),
    ),
    run=run,
    inputs=("Times and the mean number of tokens as of dejavu-makespan; m = 1.",),
)
