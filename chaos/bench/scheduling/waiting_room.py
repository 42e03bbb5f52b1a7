"""What the admission queue costs: microseconds of CPU per operation, with many queued requests.

Requests of all tiers and of many tenants arrive, leave the queue for a worker, leave early and get
refused, first while the queue fills, then with `--waiting` requests in it all the time. Separately,
the bench measures the cost of an arrival that need not queue, because a worker has room for it
(`relume.policies.routing.saturation`), in a fleet that steps.
"""

from __future__ import annotations

import argparse
import random
import time
from collections.abc import Callable
from typing import Any

from relume.chaos.bench.bench_figures import figure, percentile
from relume.chaos.bench.eventlog.replay_log import MODEL
from relume.chaos.bench.scheduling.routing_cost import Plane
from relume.policies.admission.admission_queue import Room
from relume.policies.admission.admission_settings import WaitingConfig
from relume.policies.admission.fair_queue import Entry
from relume.policies.routing.routing_settings import TIERS
from relume.policies.routing.saturation import FREE, saturation

DESCRIPTION = "microseconds of CPU per operation of the admission queue"
GOAL_US = 100.0
"""Goal for the p99 of each operation with 10,000 queued requests."""
OPERATIONS = 5_000


class Crowd:
    """An admission queue, and requests that arrive at it."""

    def __init__(self, waiting: int, tenants: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.config = WaitingConfig(requests=waiting, mb=65_536, tenant_percent=100)
        self.room = Room()
        self.tenants = tenants
        self.now_us = self.number = 0
        self.took: dict[str, list[float]] = {}

    def timed(self, what: str, call: Callable[[], Any]) -> Any:
        """Call it, and record the CPU time."""
        begun = time.thread_time_ns()
        found = call()
        self.took.setdefault(what, []).append((time.thread_time_ns() - begun) / 1000)
        return found

    def entry(self) -> Entry:
        """A request of a random tier and tenant."""
        rng = self.rng
        self.number += 1
        self.now_us += 100
        return Entry(
            request=f"q{self.number}",
            model=MODEL,
            rank=rng.randrange(len(TIERS)),
            tenant=f"t{rng.randrange(self.tenants)}",
            tokens=rng.choice((100, 400, 900, 2000, 4000)),
            size=3000,
            entered_us=self.now_us,
            until_us=self.now_us + 30_000_000,
            deadline_us=self.now_us + 20_000_000 if rng.random() < 0.3 else 0,
        )

    def enter(self, what: str) -> None:
        """A request arrives."""
        entry = self.entry()
        self.timed(what, lambda: self.room.enter(entry, self.now_us, self.config))

    def call(self) -> None:
        """The next one goes to a worker."""
        room, config, now_us = self.room, self.config, self.now_us

        def called() -> None:
            entry = room.next(MODEL, now_us, config)
            if entry is not None:
                room.take(entry.request, now_us, 90_000, config)

        self.timed("called", called)

    def leave(self) -> None:
        """The client of a random request leaves."""
        name = f"q{self.rng.randrange(1, self.number + 1)}"
        if name in self.room.entries:
            self.timed("left", lambda: self.room.leave(name))


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(
        prog="relume-chaos bench waiting-room", description=DESCRIPTION
    )
    parser.add_argument("--waiting", type=int, default=10_000)
    parser.add_argument("--tenants", type=int, nargs="+", default=[1, 1000])
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    figures: dict[str, dict[str, Any]] = {}
    met = True
    for tenants in args.tenants:
        crowd = Crowd(args.waiting, tenants, args.seed)
        while len(crowd.room.entries) < args.waiting:
            crowd.enter("entered")
        for _ in range(OPERATIONS):
            crowd.enter("came_to_a_full_room")
            crowd.call()
            crowd.enter("entered")
            crowd.leave()
        for what, took in crowd.took.items():
            p99 = percentile(took, 0.99)
            met = met and p99 < GOAL_US
            figures[f"{what}_{tenants}_tenants_p50"] = figure(percentile(took, 0.5), "us", None, 1)
            figures[f"{what}_{tenants}_tenants_p99"] = figure(p99, "us", GOAL_US, 1)
    for workers in args.workers:
        figures[f"passed_through_{workers}_workers_p99"] = figure(
            percentile(_passing(workers, args.seed), 0.99), "us", None, 1
        )
    return {"bench": "waiting-room", "met": met, "figures": figures}


def _passing(workers: int, seed: int) -> list[float]:
    """Microseconds per arrival for the check whether it must wait."""
    plane, config, took = Plane(workers, "least_load", seed), WaitingConfig(), []
    names = list(plane.engines)
    for number in range(OPERATIONS):
        if number % 2 == 0:
            plane.dispatch(plane.decide(*plane.arrive()))
            plane.land()
        plane.step(plane.rng.choice(names))
        begun = time.thread_time_ns()
        cause, _ = saturation(plane.view, MODEL, config, plane.now_us)
        took.append((time.thread_time_ns() - begun) / 1000)
        assert cause == FREE
    return took
