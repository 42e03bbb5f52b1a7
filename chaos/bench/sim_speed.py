"""How fast the simulator runs: 64 workers x 20,000 requests and 1,000 x 60,000.

The bench first runs engines alone, with each request on the engine that has the fewest, and
reports the cost per event. Then it runs whole fleets with the control plane, agents, etcd and
clients, and reports the cost per request. Lengths are those of the Azure conversation trace;
1.5 requests per second arrive per worker.
"""

from __future__ import annotations

import argparse
import gc
import heapq
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from relume.chaos.bench.bench_figures import figure
from relume.chaos.outcome import Outcome
from relume.chaos.scenario.language import Fleet, FromTrace, Poisson, Scenario, Traffic
from relume.chaos.scenario.schedule import Request, requests_of
from relume.chaos.sim import sim_fleet as fleets
from relume.chaos.sim.engine.engine_model import EngineConfig, Job, SimEngine
from relume.chaos.sim.engine.step_cost import load
from relume.chaos.sim.world.virtual_clock import Clock

DESCRIPTION = "simulated engines, and whole fleets: 64 workers x 20,000 requests, 1,000 x 60,000"
SIZES = ((64, 20_000, 10.0), (1_000, 60_000, 60.0))
"""Workers, requests, and the maximum duration in seconds."""
PER_WORKER_S = 1.5
"""Requests per second and worker."""
MODEL = "qwen3-32b_rtxpro6000x2"
KV_BLOCKS = 25_000


class Ran:
    """Result of a run: duration in seconds, events, steps, finished requests, virtual end time."""

    def __init__(self) -> None:
        self.took_s = 0.0
        self.events = self.steps = self.finished = self.end_ns = 0


def simulate(workers: int, requests: Sequence[Request]) -> Ran:
    """Serve `requests`, each by the engine with the fewest; on a tie, the lower number."""
    cost, config = load(MODEL), EngineConfig(kv_blocks=KV_BLOCKS)
    engines = [SimEngine(config, cost) for _ in range(workers)]
    arrivals = -1
    clock: Clock[int] = Clock()
    # A heap of (jobs, engine) in which each engine has a current entry, and outdated ones.
    fewest = [(0, index) for index in range(workers)]
    ran, at = Ran(), 0
    gc.collect()
    began = time.perf_counter()
    clock.set(arrivals, requests[0].at_ns)
    while (who := clock.next()) is not None:
        now = clock.now_ns
        ran.events += 1
        if who == arrivals:
            request, at = requests[at], at + 1
            if at < len(requests):
                clock.set(arrivals, requests[at].at_ns)
            while True:
                seen, who = fewest[0]
                if seen == engines[who].load:
                    break
                heapq.heappop(fewest)
            engine = engines[who]
            job = Job(
                name=request.name,
                prompt_tokens=request.prompt_tokens,
                output_tokens=request.output_tokens,
            )
            engine.submit(job, now)
            heapq.heapreplace(fewest, (engine.load, who))
        else:
            engine = engines[who]
            done = sum(event.what == "finished" for event in engine.advance(now))
            if done:
                ran.finished += done
                heapq.heappush(fewest, (engine.load, who))
        clock.set(who, engine.next_ns)
    ran.took_s = time.perf_counter() - began
    ran.steps = sum(engine.steps for engine in engines)
    ran.end_ns = clock.now_ns
    return ran


def traffic(workers: int, count: int, seed: int = 1) -> list[Request]:
    """`count` requests for a number of workers."""
    lengths = FromTrace("azure-conv")
    how = Traffic(arrivals=Poisson(PER_WORKER_S * workers), lengths=lengths, requests=count)
    return list(requests_of(how, seed, Path()))


def fleet_of(workers: int, count: int) -> Outcome:
    """A run of a whole fleet."""
    how = Traffic(
        arrivals=Poisson(PER_WORKER_S * workers), lengths=FromTrace("azure-conv"), requests=count
    )
    model, _, hardware = MODEL.partition("_")
    scenario = Scenario(
        name="sim-speed",
        about="whole fleets, timed",
        fleet=Fleet(workers=workers, model=model, hardware=hardware),
        traffic=how,
    )
    return fleets.run(scenario, 1, until_s=1e6)


def run(argv: list[str]) -> dict[str, Any]:
    """Run it as the docstring says; `--quick`: a hundredth of it; `--share N`: one N-th of the
    requests of whole fleets; the goals shrink alike."""
    parser = argparse.ArgumentParser(prog="relume-chaos bench sim-speed", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a hundredth of the requests")
    parser.add_argument(
        "--share", type=int, default=1, help="run one N-th of the requests of whole fleets"
    )
    given = parser.parse_args(argv)
    share = 100 if given.quick else 1
    figures: dict[str, Any] = {}
    each: list[float] = []
    met = True
    for workers, count, goal_s in SIZES:
        ran = simulate(workers, traffic(workers, count // share))
        each.append(ran.took_s / ran.events * 1e6)
        name = f"{workers}_workers"
        figures |= {
            f"{name}_took": figure(ran.took_s, "s", goal_s, 2),
            f"{name}_an_event": figure(each[-1], "us", None, 2),
            f"{name}_events": figure(ran.events, "", None, 0),
            f"{name}_steps": figure(ran.steps, "", None, 0),
            f"{name}_virtual": figure(ran.end_ns / 1e9, "s", None, 1),
        }
        met = met and ran.took_s <= goal_s and ran.finished == count // share
    figures["an_event_1000_to_64"] = figure(each[1] / each[0], "ratio", None, 2)
    part = max(share, given.share)
    for workers, count, goal_s in SIZES:
        wanted = count // part
        began, cpu = time.perf_counter(), time.process_time()
        outcome = fleet_of(workers, wanted)
        took_s, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        served = sum(history.record.finish == "length" for history in outcome.histories) // 2
        name = f"fleet_{workers}_workers"
        figures |= {
            f"{name}_took": figure(took_s, "s", goal_s / part, 2),
            f"{name}_a_request": figure(took_s / wanted * 1e6, "us", None, 0),
            f"{name}_cpu": figure(cpu_s, "s", None, 2),
            f"{name}_virtual": figure(outcome.ended_ns / 1e9, "s", None, 1),
        }
        met = met and took_s <= goal_s / part and served == wanted and not outcome.error
    return {"bench": "sim-speed", "met": met, "figures": figures}
