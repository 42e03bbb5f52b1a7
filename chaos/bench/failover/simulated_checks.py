"""How many requests an engine with wrong weights completes until cross-checks of the default share and
budget find it: simulated, where thousands of requests are cheap.

Four workers serve. At a random time a bit of the weights of one flips where no canary touches it: one of
three of its answers has wrong tokens from then on. Each run ends with the verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

from msgspec import Struct

from relume.chaos.bench.bench_figures import figure, percentile
from relume.chaos.outcome import Outcome
from relume.chaos.scenario.language import Fault, Fleet, Poisson, Scenario, Traffic, Uniform, When
from relume.chaos.sim import sim_fleet
from relume.chaos.validators.records import events_of
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import HealthState, RequestOutcome

WORKER = "w1"
CANARY_S = 30.0
"""As by default live."""
PER_S = 2.0
"""Requests of the fleet."""
FLIPPED_S = (300.0, 900.0)
LONGEST_S = 7200.0
"""Time from the begin of a run in which the worker must be found."""
LOOK_S = 1.0


class Found(Struct, frozen=True):
    """Of one run. `requests`: completed by the engine from the flip to the verdict, and how many of them
    until the first difference; `by_all`: completed by the fleet in that time."""

    requests: int
    until_difference: int
    by_all: int
    seconds: float
    others: int


class UntilVerdict(sim_fleet.SimFleet):
    """Ends when a worker is quarantined."""

    async def main(self) -> None:
        whole = asyncio.ensure_future(super().main())
        while not whole.done() and not self._is_found():
            await asyncio.sleep(LOOK_S)
        if not whole.done():
            whole.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await whole

    def _is_found(self) -> bool:
        return any(
            getattr(worker.health, "state", "") == HealthState.QUARANTINED
            for fold in self._folds()
            for worker in fold.workers.values()
        )


def scenario() -> Scenario:
    """A fleet with one engine that computes wrong results."""
    return Scenario(
        name="default-share",
        about="A bit flips where no canary touches it; cross-checks are as by default.",
        fleet=Fleet(
            workers=4, domains=2, control_planes=2, canary_s=CANARY_S,
        ),
        traffic=Traffic(
            arrivals=Poisson(PER_S),
            lengths=Uniform(prompt=(16, 400), output=(16, 96)),
            requests=int(PER_S * LONGEST_S),
        ),
        faults=(
            Fault(what="weights-flipped-unseen", when=When(at_s=FLIPPED_S), target=WORKER),
        ),
    )  # fmt: skip


def simulated(seed: int) -> Found | None:
    """What one run showed; None: the worker was not found in time. Raises RuntimeError if the run
    failed."""
    outcome = sim_fleet.run(scenario(), seed, until_s=2 * LONGEST_S, make=UntilVerdict)
    if outcome.error or not outcome.fired:
        raise RuntimeError(f"seed {seed}: {outcome.error or 'no bit flipped'}")
    return _found(outcome)


def _found(outcome: Outcome) -> Found | None:
    flipped_ms = outcome.began_ms + outcome.fired[0].at_ns // 1_000_000
    routes: dict[str, str] = {}
    mine = every = until_difference = others = 0
    for at in events_of(outcome.groups):
        event, kind = at.event, type(at.event)
        if kind is v.RouteDecided:
            routes[event.request] = event.worker
        elif kind is v.RequestEnded and at.at_ms >= flipped_ms:
            is_complete = event.outcome == RequestOutcome.COMPLETED
            every += is_complete
            mine += is_complete and routes.get(event.request) == WORKER
        elif kind is v.CrossChecked and event.differs >= 0:
            until_difference = until_difference or mine
        elif kind is v.HealthDecided and event.state == HealthState.QUARANTINED:
            if event.worker == WORKER:
                seconds = (at.at_ms - flipped_ms) / 1000
                return Found(mine, until_difference, every, seconds, others)
            others += 1
    return None


def default_share(count: int, first: int) -> dict[str, Any]:
    """Figures of so many runs, by seeds from `first` on."""
    found: list[Found] = []
    for seed in range(first, first + count):
        if (run := simulated(seed)) is None:
            print(f"seed {seed}: NOT FOUND within {LONGEST_S:g} s", flush=True)
            continue
        found.append(run)
        print(
            f"seed {seed}: {run.requests} requests of it, {run.until_difference} until the first "
            f"difference, {run.by_all} of the fleet, {run.seconds:.0f} s",
            flush=True,
        )
    requests = [run.requests for run in found] or [-1]
    differences = [run.until_difference for run in found] or [-1]
    by_all = [run.by_all for run in found] or [-1]
    seconds = [run.seconds for run in found] or [-1.0]
    return {
        "simulated_fleets": figure(count, "fleets", digits=0),
        "found_by_default_share": figure(len(found), "fleets", count, digits=0),
        "default_share_requests_p50": figure(percentile(requests, 0.5), "requests", digits=0),
        "default_share_requests_max": figure(max(requests), "requests", digits=0),
        "default_share_until_difference_p50": figure(
            percentile(differences, 0.5), "requests", digits=0
        ),
        "default_share_of_the_fleet_p50": figure(percentile(by_all, 0.5), "requests", digits=0),
        "default_share_of_the_fleet_max": figure(max(by_all), "requests", digits=0),
        "default_share_found_p50": figure(percentile(seconds, 0.5), "s", digits=0),
        "default_share_found_max": figure(max(seconds), "s", digits=0),
        "default_share_other_quarantines": figure(
            sum(run.others for run in found), "verdicts", 0, digits=0
        ),
    }
