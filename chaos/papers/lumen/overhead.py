"""What LUMEN's coordinator costs: CPU time of decisions, and their bytes in the log."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from msgspec.structs import replace

from relume.chaos.papers.lumen.parts.lumen_study import TRAFFIC
from relume.chaos.papers.lumen.parts.study_runs import RULES, Case, Meter, scenario_of, settings_of
from relume.chaos.papers.result import Found, PublishedFigure, Result
from relume.chaos.papers.sampling import Sampling
from relume.chaos.scenario.language import When
from relume.chaos.sim import sim_fleet as simulated
from relume.policies.checkpoints import decisions as checkpoints
from relume.policies.routing import choose_worker as routing

SIZES = (4, 8, 16, 64)
FAILS_S, LASTS_S = 5.0, 8.0
BOUND_US = 1000.0
TIMED = {
    "a route": (routing, "decide"),
    "a holder": (checkpoints, "place"),
    "a plan": (checkpoints, "plan"),
}


@contextmanager
def timed() -> Iterator[dict[str, list[float]]]:
    """CPU time of this thread per decision inside, in us."""
    took: dict[str, list[float]] = defaultdict(list)
    former = {name: getattr(*where) for name, where in TIMED.items()}

    def around(name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        def measured(*args: Any, **more: Any) -> Any:
            began = time.thread_time_ns()
            found = work(*args, **more)
            took[name].append((time.thread_time_ns() - began) / 1000)
            return found

        return measured

    try:
        for name, (module, attribute) in TIMED.items():
            setattr(module, attribute, around(name, former[name]))
        yield took
    finally:
        for name, (module, attribute) in TIMED.items():
            setattr(module, attribute, former[name])


def observed(rule: str, workers: int, seed: int) -> tuple[dict[str, list[float]], float, float]:
    """us of decisions; bytes and records of control plane streams a request."""
    case = Case(rules=rule, workers=workers, seed=seed)
    whole = scenario_of(case)
    short = replace(
        whole,
        traffic=replace(whole.traffic, for_s=LASTS_S),
        faults=tuple(replace(fault, when=When(at_s=FAILS_S)) for fault in whole.faults),
    )
    with timed() as took:
        run = simulated.run(short, seed, settings=settings_of(case, Meter()))
    if run.error:
        raise RuntimeError(f"{rule}, {workers} workers: {run.error}")
    said = [s for group in run.groups for s in group.segments if s.stream.startswith("r.")]
    requests = len(run.schedule.requests)
    size = sum(len(record) for segment in said for record in segment.records)
    return took, size / requests, sum(len(segment.records) for segment in said) / requests


def run(sampling: Sampling) -> Found:
    """Every requested size, with a quarter lost."""
    lines = [
        f"{'':34}{'mean':>9}{'median':>9}{'99 %':>9}{'most':>9}  us; how many",
        "bytes and records: those of the control plane in the log",
    ]
    under, total = 0, 0
    figures: dict[str, float] = {}
    for workers in sampling.sizes(SIZES):
        sizes = {}
        for rule in ("restart", "lumen", "ours"):
            took, size, records = observed(rule, workers, sampling.seed)
            sizes[rule] = size, records
            for name, values in took.items():
                if (name != "a route") != (RULES[rule] is not None):
                    continue
                ordered = sorted(values)
                at = [ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))], ordered[-1]]
                shown = "".join(f"{value:9.0f}" for value in (sum(values) / len(values), *at))
                lines.append(f"{workers:3} workers, {rule:10} {name:10}{shown}  {len(values)}")
                if name != "a plan":
                    under += sum(value < BOUND_US for value in values)
                    total += len(values)
        for rule, (size, records) in sizes.items():
            lines.append(
                f"{workers:3} workers, {rule:10} {size:.0f} bytes, {records:.1f} records a request"
            )
    figures["under"] = under / total
    return Found(figures, tuple(lines))


RESULT = Result(
    name="lumen-overhead",
    about="CPU time of routes, holders and plans, and their bytes in the log",
    source="LUMEN; question of the review (below 1 ms a routing decision)",
    published=(
        PublishedFigure(
            key="under",
            what="choices of workers and holders below 1 ms",
            value=1.0,
            within=0.02,
        ),
    ),
    run=run,
    inputs=(
        TRAFFIC,
        "CPU time of the thread in the policies themselves, on the machine that runs this; a plan "
        "is of all requests that one engine's death interrupted. One replica decides everything.",
    ),
)
