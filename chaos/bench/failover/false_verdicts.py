"""How often a worker that is well is judged ill: on real processes, and over simulated hours.

Live: three workers and two replicas serve for `--minutes`, beside two processes that burn CPU.
Meanwhile clients send requests that the engines refuse (4xx), and etcd stands still for 20 s.
Simulated: fleets of four workers serve for `--hours` in all; links are slow and processes are short
of CPU from time to time, etcd stands still, clients leave. No worker fails in either. Every event by
which a worker would get fewer requests counts, as does a stream that is moved away from one.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec

from relume.chaos.bench.bench_figures import figure
from relume.chaos.bench.failover.detection import Load, Log
from relume.chaos.outcome import Outcome
from relume.chaos.scenario.language import Fault, Fleet, Poisson, Scenario, Traffic, Uniform, When
from relume.chaos.sim import sim_fleet as fleets
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.log import codec
from relume.events.vocabulary.enums import FailureClass, HealthState

DESCRIPTION = "how often a worker that is well is judged ill, live and over simulated hours"
ETCD_AWAY_S = 20.0
BAD_EVERY_S = 0.05
BURN = "while True: pass"
RUN_HOURS = 5
"""Hours of one simulated run, whose log is kept in memory."""
EVERY_S = 20.0
"""Mean time between two requests of a simulated fleet."""
EVERY_TROUBLE_S = 600.0
CANARY_S = 30.0
"""Time between two canaries to a simulated worker, as live."""
_AT = When(at_s=0.0)
TROUBLES = (
    Fault(what="cpu-limit", when=_AT, target="any", amount=0.5, for_s=60.0),
    Fault(what="etcd-stop", when=_AT, target="all", for_s=ETCD_AWAY_S),
    Fault(what="link-slow", when=_AT, target="any", peer="gateway", amount=100.0, for_s=60.0),
    Fault(what="gateway-cpu-limit", when=_AT, target="follower", amount=0.5, for_s=60.0),
    Fault(what="client-gone", when=_AT, target="any"),
)
"""What is no worker's failure, in turn; but one with half a core is slow, and may be called so."""
SEEN_LATER_NS = 10_000_000_000
"""So long after it had its core back a worker may be called slow."""


def verdict_of(event: Any) -> str:
    """The kind of verdict against a worker that `event` is; empty: none."""
    match event:
        case v.StallJudged(hung=True) | v.EngineHung() | v.StreamJudged(stuck=True):
            return type(event).__name__
        case v.WorkerSuspected() | v.WorkerLost() | v.VerdictsWithheld() | v.EngineDied():
            return type(event).__name__
        case v.HealthDecided(state=state, failure=failure) if state != HealthState.HEALTHY:
            return f"{state} ({failure})"
    return ""


def verdicts(events: Iterable[Any]) -> Counter[str]:
    """How many of each kind."""
    return Counter(kind for kind in map(verdict_of, events) if kind)


async def live(minutes: float, model: str) -> tuple[Counter[str], int, int, int]:
    """Verdicts, streams that ended well, streams that broke, and refused requests."""
    burners = [await asyncio.create_subprocess_exec(sys.executable, "-c", BURN) for _ in range(2)]
    try:
        with tempfile.TemporaryDirectory() as folder:
            options = FleetOptions(
                workers=3, replicas=2, state_dir=folder, port=0, admin_port=0, model=model
            )
            async with LocalFleet(options) as fleet:
                return await _serve(fleet, 60 * minutes)
    finally:
        for burner in burners:
            burner.kill()
            await burner.wait()


async def _serve(fleet: LocalFleet, seconds: float) -> tuple[Counter[str], int, int, int]:
    async with EtcdLog(EtcdConfig(endpoints=(fleet.etcd_endpoint,))) as etcd:
        log = Log(etcd.reader())
        following = asyncio.create_task(log.run())
        async with Load(fleet.gateways[0], clients=3) as one, Load(fleet.gateways[1], 3) as other:
            began, refused = time.monotonic(), 0
            storm = asyncio.create_task(_refused(fleet.gateways[0], seconds))
            await asyncio.sleep(seconds / 2)
            pid = fleet.children["etcd"].pid
            print(f"etcd stands still for {ETCD_AWAY_S:g} s", flush=True)
            os.kill(pid, signal.SIGSTOP)
            await asyncio.sleep(ETCD_AWAY_S)
            os.kill(pid, signal.SIGCONT)
            while time.monotonic() - began < seconds:
                await asyncio.sleep(1.0)
            refused = await storm
            # Verdicts of the last moments are on their way.
            await asyncio.sleep(2.0)
        following.cancel()
        broken, served = one.broken + other.broken, one.served + other.served
    for at, event in log.happened:
        if verdict_of(event):
            print(f"at {at - began:.1f} s: {event}", flush=True)
    return verdicts(event for _, event in log.happened), served, broken, refused


async def _refused(url: str, seconds: float) -> int:
    """Requests with more tokens than any model has; returns how many were refused as 4xx."""
    refused, until = 0, time.monotonic() + seconds
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < until:
            body = {"model": "tiny", "prompt": "too much", "max_tokens": 1_000_000}
            async with session.post(f"{url}/v1/completions", json=body) as answer:
                refused += 400 <= answer.status < 500
            await asyncio.sleep(BAD_EVERY_S)
    return refused


def scenario_of(hours: float) -> Scenario:
    """A fleet without failures, but with troubles that are none of its workers'."""
    seconds = hours * 3600
    troubles: list[Fault] = []
    at_s = EVERY_TROUBLE_S
    while at_s < seconds - EVERY_TROUBLE_S:
        kind = TROUBLES[len(troubles) % len(TROUBLES)]
        troubles.append(msgspec.structs.replace(kind, when=When(at_s=at_s)))
        at_s += EVERY_TROUBLE_S
    return Scenario(
        name="well",
        about="Nothing fails.",
        fleet=Fleet(
            workers=4, domains=2, control_planes=2, etcd=3, canary_s=CANARY_S,
        ),
        traffic=Traffic(
            arrivals=Poisson(1 / EVERY_S),
            lengths=Uniform(prompt=(16, 400), output=(16, 200)),
            requests=int(seconds / EVERY_S),
        ),
        faults=tuple(troubles),
        expect=(),
    )  # fmt: skip


def simulated(hours: float) -> tuple[Counter[str], int, float, str]:
    """False verdicts, how many workers short of CPU were called slow, which they were, hours of
    virtual time, and why a run failed."""
    found: Counter[str] = Counter()
    spent_h, seed, right = 0.0, 0, 0
    while hours - spent_h > 0.01:
        began = time.perf_counter()
        part = min(RUN_HOURS, hours - spent_h)
        outcome = fleets.run(scenario_of(part), seed, until_s=part * 3600 + 7200)
        if outcome.error:
            return found, right, spent_h, outcome.error
        of_run = Counter[str]()
        for at_ns, event in _events(outcome):
            if verdict_of(event) and _short_of_cpu(outcome, event, at_ns):
                right += 1
            elif kind := verdict_of(event):
                of_run[kind] += 1
        found += of_run
        spent_h += outcome.ended_ns / 3.6e12
        took_s = time.perf_counter() - began
        print(f"seed {seed}: {spent_h:.1f} h, {dict(of_run)}, took {took_s:.0f} s", flush=True)
        seed += 1
    return found, right, spent_h, ""


def _events(outcome: Outcome) -> Iterable[tuple[int, Any]]:
    """With the time at which each was written, in ns from the start of the run."""
    for group in outcome.groups:
        for segment in group.segments:
            at_ns = (segment.at_ms - outcome.began_ms) * 1_000_000
            for event in codec.decode_all(segment.records):
                yield at_ns, event


def _short_of_cpu(outcome: Outcome, event: Any, at_ns: int) -> bool:
    """Whether `event` calls a worker slow that had half a core at that time."""
    if not isinstance(event, v.HealthDecided) or event.failure != FailureClass.SLOW:
        return False
    return any(
        fault.what == "cpu-limit"
        and fault.target == event.worker
        and fault.at_ns <= at_ns <= (fault.until_ns or outcome.ended_ns) + SEEN_LATER_NS
        for fault in outcome.fired
    )


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(
        prog="relume-chaos bench false-verdicts", description=DESCRIPTION
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="of the live part; 0: none")
    parser.add_argument("--hours", type=float, default=200.0, help="simulated; 0: none")
    parser.add_argument("--model", default=".relume/models/tiny")
    args = parser.parse_args(argv)
    figures: dict[str, Any] = {}
    met = True
    if args.minutes:
        model = str(Path(args.model).absolute())
        found, served, broken, refused = asyncio.run(live(args.minutes, model))
        print(f"live: {dict(found)}", flush=True)
        figures |= {
            "live_verdicts": figure(found.total(), "verdicts", 0, digits=0),
            "live_broken": figure(broken, "streams", 0, digits=0),
            "live_streams": figure(served, "streams", digits=0),
            "live_refused": figure(refused, "requests", digits=0),
        }
        met &= not found and not broken and served > 0 and refused > 0
    if args.hours:
        found, right, spent_h, error = simulated(args.hours)
        print(f"simulated: {dict(found)}, {right} rightly slow {error}", flush=True)
        workers = 4 * spent_h
        figures |= {
            "simulated_hours": figure(spent_h, "h", digits=1),
            "simulated_rightly_slow": figure(right, "verdicts", digits=0),
            "simulated_verdicts": figure(found.total(), "verdicts", 0, digits=0),
            "simulated_per_1000_worker_hours": figure(
                1000 * found.total() / max(workers, 1e-9), "verdicts", digits=3
            ),
        }
        met &= not error and not found
    return {"bench": "false-verdicts", "met": met, "figures": figures}
