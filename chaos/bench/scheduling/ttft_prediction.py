"""How well the time to first token is predicted when a request is dispatched.

Real workers run at moderate load, with requests at random times. The predicted value is the
dispatch's record (`RouteDecided.ttft_us`), the actual one the gateway's (`RequestEnded.ttft_us`).
Requests before the load, from which replicas learn step times, do not count. The goal applies to
the median of |predicted - actual| / actual; the bias shows the direction of errors.
`results/ttft-parts.json` has a single measurement of the parts of the error. The gateway has the
model's tokenizer, so it knows prefix hits. Engines have a core of their own unless `--together`,
since a prediction leaves out other load on the core.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from pathlib import Path
from typing import Any

from msgspec import Struct

from relume.chaos.bench.bench_figures import figure, percentile
from relume.chaos.bench.failover.failover_parts import wide_model
from relume.chaos.bench.scheduling.load_run import Load, Run, folded, record
from relume.events import vocabulary as v
from relume.events.log.entries import entries_of

DESCRIPTION = "predicted against actual time to first token, request by request"
GOAL = 0.15


class Pair(Struct, frozen=True):
    """One request, microseconds."""

    predicted: int
    actual: int

    @property
    def error(self) -> float:
        """Relative error; below 0 if the token came later than predicted."""
        return (self.predicted - self.actual) / self.actual


def pairs_of(run: Run) -> list[Pair]:
    """Requests of the load that got an answer on their first attempt."""
    routes: dict[str, v.RouteDecided] = {}
    found = []
    for at, group in run.groups:
        for event in (entry.event for entry in entries_of(group, "r.r0")):
            if type(event) is v.RouteDecided and event.attempt == 1 and at >= run.began_us:
                routes[event.request] = event
            elif type(event) is v.RequestEnded and event.attempts == 1 and event.ttft_us > 0:
                sent = routes.pop(event.request, None)
                if sent is not None and sent.ttft_us >= 0:
                    found.append(Pair(sent.ttft_us, event.ttft_us))
    return found


def figures_of(run: Run) -> tuple[dict[str, Any], bool]:
    """Figures, and whether the goal is met."""
    pairs = pairs_of(run)
    errors = [abs(p.error) for p in pairs]
    median = statistics.median(errors)
    actual = [p.actual / 1000 for p in pairs]
    fleet = folded(run)
    figures = {
        "requests": figure(len(pairs), "requests"),
        "failed": figure(run.failed, "requests", 0),
        "error_p50": figure(median, "ratio", GOAL),
        "error_p90": figure(percentile(errors, 0.9), "ratio"),
        "error_p99": figure(percentile(errors, 0.99), "ratio"),
        "bias_p50": figure(statistics.median(p.error for p in pairs), "ratio"),
        "ttft_p50": figure(percentile(actual, 0.5), "ms", digits=1),
        "ttft_p99": figure(percentile(actual, 0.99), "ms", digits=1),
    }
    for name, worker in fleet.workers.items():
        figures[f"{name}_overhead"] = figure(worker.overhead_us / 1000, "ms", digits=2)
    for number, steps in enumerate(fleet.steptimes.values()):
        figures[f"class_{number}_step_error"] = figure(steps.spread, "ratio")
    return figures, median < GOAL and not run.failed


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(
        prog="relume-chaos bench ttft-prediction", description=DESCRIPTION
    )
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument(
        "--every-s", type=float, default=0.6, help="mean seconds between two requests"
    )
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--model", type=Path, default=Path(".relume/models/wide"))
    parser.add_argument("--together", action="store_true", help="all processes on all cores")
    args = parser.parse_args(argv)
    load = Load(seconds=args.seconds, every_s=args.every_s, each=0.3)
    model, apart = wide_model(args.model), not args.together
    recorded = asyncio.run(record(model, args.workers, load, args.seed, apart, tokenizer=True))
    figures, met = figures_of(recorded)
    return {"bench": "ttft-prediction", "met": met, "figures": figures}
