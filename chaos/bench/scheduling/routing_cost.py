"""What a routing decision costs: microseconds, decisions per second on one core, bytes.

A fleet of scripted engines (`chaos/bench/eventlog/replay_log.py`) steps, admits, computes and finishes. A
replica places requests by the real policy on the real view, and its own events land some
milliseconds later. The bench times the path from a request to the record of its decision: the
setting in force, the basis, the policy, the struct. It counts CPU time of the thread, which leaves
out other load as far as possible. Between decisions it folds engine steps at `--steps` per second
and worker; it reports the update of the worker index separately.
"""

from __future__ import annotations

import argparse
import gc
import random
import time
import tracemalloc
from collections import deque
from statistics import median
from typing import Any

from relume.chaos.bench.bench_figures import figure, percentile
from relume.chaos.bench.eventlog.replay_log import MODEL, Engine, Running
from relume.events import vocabulary as v
from relume.events.log.codec import encode
from relume.events.vocabulary.enums import AttemptMode, Guarantee, RequestOutcome, RouteCause
from relume.policies.routing import choose_worker as routing
from relume.policies.routing import estimate_index
from relume.policies.routing import selection as selectors
from relume.policies.routing.route_query import RouteQuery
from relume.policies.routing.routing_settings import POLICY
from relume.policies.state.fleet import Fleet, Head
from relume.policies.state.fold import fold
from relume.policies.state.overlay.receive_clock import UnrecordedReceipts
from relume.policies.state.overlay.view import View

DESCRIPTION = "microseconds, decisions per second and bytes of routing decisions"
GOALS_US = {64: 50.0, 1000: 300.0}
GOAL_RATE = 10_000
GROUP_US = 100
"""Time between two groups."""
LANDING = 8
"""Number of later events after which an own event lands."""
RUNNING = 256
"""Requests in progress while the bench counts decisions."""
HELD = 24
"""Mean number of requests per worker."""


def completed(request: str) -> v.RequestEnded:
    """The end of a request."""
    return v.RequestEnded(
        request=request,
        outcome=RequestOutcome.COMPLETED,
        status=200,
        tokens=9,
        finish="stop",
        attempts=1,
        verdict=Guarantee.EXACT,
    )


class Plane:
    """A fleet, and the replica that decides."""

    def __init__(self, workers: int, policy: str, seed: int) -> None:
        self.rng = random.Random(seed)
        self.fleet = Fleet()
        self.view = View("r.r0", self.fleet)
        self.unrecorded = UnrecordedReceipts()
        self.now_us = 0
        self.ready = 0.0
        self.policy = policy
        self.engines = {f"w{n}": Engine(name=f"w{n}", running={}) for n in range(workers)}
        for name in self.engines:
            self.tell(
                f"w.{name}", v.WorkerRegistered(worker=name, domain=f"host-{name}", agent_pid=7)
            )
            self.tell(f"w.{name}", v.EngineStarted(name, 1, 100, 1))
            ready = v.EngineReady(
                worker=name,
                incarnation=1,
                host="127.0.0.1",
                port=9000,
                model=MODEL,
                max_model_len=65_536,
                block_size=16,
                kv_blocks=20_000,
                hardware="scripted",
                step_tokens=512,
            )
            self.tell(f"w.{name}", ready)
        self.tell(
            "r.r0",
            v.ReplicaStarted(
                replica="r0", boot="b", host="127.0.0.1", port=8000, pid=1, policy=policy
            ),
        )
        self.written = 0
        self.landing: deque[Any] = deque()
        self.bodies: dict[str, tuple[int, int]] = {}
        self.number = 0

    def tell(self, stream: str, event: Any) -> None:
        """A group of another stream arrives: `relume.controlplane.replica.loop` and its scheduler."""
        self.fleet.revision += 1
        if not self.unrecorded.received(self.view.receipts, self.fleet.revision, self.now_us):
            estimate_index.forget(self.view)
        fold(self.fleet, stream, 1, event)
        self.now_us += GROUP_US
        self.advanced()

    def advanced(self) -> None:
        """The fold advanced."""
        self.view.landed()
        begun = time.thread_time()
        estimate_index.keep_up(self.view)
        self.ready += time.thread_time() - begun

    def receive(self) -> None:
        """The replica records what it received since its last such record."""
        recorded = self.unrecorded.record()
        if recorded is not None:
            self.written += 1
            self.view.reach(self.written)
            self.unrecorded.recorded(self.view.receipts)
            self.landing.append(recorded)

    def own(self, event: Any) -> None:
        """The replica writes."""
        self.written += 1
        self.view.own(self.written, event)
        self.landing.append(event)

    def land(self) -> None:
        """Fold all written events but the last few."""
        if len(self.landing) <= LANDING:
            return
        self.fleet.revision += 1
        while len(self.landing) > LANDING:
            fold(self.fleet, "r.r0", 1, self.landing.popleft())
        head = self.written - len(self.landing)
        self.fleet.streams["r.r0"] = Head(1, self.written, b"", head)
        self.advanced()

    def step(self, name: str) -> None:
        """One step of an engine; its gateway ends the requests that finished."""
        event = self.engines[name].record(self.rng)
        self.tell(f"w.{name}", event)
        for change in event.changes:
            if type(change) is v.EngineFinished and change.request in self.bodies:
                del self.bodies[change.request]
                self.own(completed(change.request))

    def arrive(self) -> tuple[str, int]:
        """A request arrives."""
        self.number += 1
        name = f"q{self.number}"
        prompt = self.rng.choice((80, 300, 700, 1500, 3000))
        self.bodies[name] = prompt, self.rng.randint(20, 200)
        arrived = v.RequestArrived(
            request=name,
            model=MODEL,
            route="/v1/completions",
            stream=True,
            prompt_tokens=prompt,
            max_tokens=200,
            verdict=Guarantee.EXACT,
        )
        self.own(arrived)
        return name, prompt

    def decide(self, name: str, prompt: int) -> v.RouteDecided:
        """Decide as `relume.controlplane.replica.scheduler` does."""
        view = self.view
        policy = view.setting(POLICY, self.policy)
        self.receive()
        basis = view.basis
        view.now_us = self.now_us
        query = RouteQuery(request=name, model=MODEL, prompt_tokens=prompt, delivered=0)
        choice = routing.decide(view, query, policy)
        return v.RouteDecided(
            decision=f"r0.b.{name}",
            basis=basis,
            request=name,
            attempt=1,
            cause=RouteCause.ARRIVAL,
            mode=AttemptMode.NEW,
            delivered=0,
            prompt_tokens=prompt,
            worker=choice.worker,
            incarnation=choice.incarnation,
            policy=policy,
            model=MODEL,
            candidates=choice.candidates,
            others=choice.others,
            at_us=view.now_us,
            ttft_us=routing.first_token_us(view, query, policy, choice),
        )

    def dispatch(self, event: v.RouteDecided) -> None:
        """Write the decision; its engine has the request at once."""
        self.own(event)
        prompt, output = self.bodies[event.request]
        running = Running(
            request=event.request, attempt=1, prompt=prompt, left=prompt, tokens=output
        )
        self.engines[event.worker].running[f"{event.request}/1"] = running
        queued = v.RequestQueued(event.request, 1, prompt, encode(event))
        self.tell(
            f"w.{event.worker}",
            v.EngineStep(
                incarnation=1,
                step=0,
                duration_us=0,
                batch=0,
                sum_context=0,
                prefill_tokens=0,
                waiting=1,
                kv_used=0,
                changes=(queued,),
            ),
        )

    def warm(self) -> None:
        """Place requests until every worker has its share."""
        for number in range(HELD * len(self.engines)):
            self.dispatch(self.decide(*self.arrive()))
            self.land()
            if number % 4 == 0:
                self.step(self.rng.choice(list(self.engines)))


def measured(plane: Plane, decisions: int, steps: float) -> tuple[list[float], float]:
    """Microseconds of each decision, and the mean time of index updates per decision; `steps`
    engine steps are folded before each."""
    names, took, owed = list(plane.engines), [], 0.0
    plane.ready = 0.0
    gc.collect()
    gc.freeze()
    for _ in range(decisions):
        owed += steps
        while owed >= 1:
            owed -= 1
            plane.step(plane.rng.choice(names))
        name, prompt = plane.arrive()
        plane.land()
        begun = time.thread_time_ns()
        event = plane.decide(name, prompt)
        took.append((time.thread_time_ns() - begun) / 1000)
        plane.dispatch(event)
    gc.unfreeze()
    return took, plane.ready / decisions * 1e6


def repeated(
    workers: int, policy: str, args: argparse.Namespace
) -> tuple[Plane, list[float], float, float]:
    """The last run's plane; over `args.repeats` identical runs, the median of each decision, of
    the index update, and of the runs' 99th percentiles; microseconds."""
    runs, bringing = [], []
    for _ in range(args.repeats):
        plane = Plane(workers, policy, args.seed)
        plane.warm()
        took, brought = measured(plane, args.decisions, args.steps / args.per_worker)
        runs.append(took)
        bringing.append(brought)
    once = median(percentile(took, 0.99) for took in runs)
    return plane, [median(one) for one in zip(*runs, strict=True)], median(bringing), once


def rate(plane: Plane, decisions: int) -> float:
    """Decisions per second of one core, with their encoding and the updates of view and index."""
    spent = plane.ready = 0.0
    running: deque[str] = deque()
    for _ in range(decisions):
        name, prompt = plane.arrive()
        begun = time.thread_time()
        event = plane.decide(name, prompt)
        encode(event)
        plane.own(event)
        spent += time.thread_time() - begun
        running.append(name)
        if len(running) > RUNNING:
            over = running.popleft()
            del plane.bodies[over]
            plane.own(completed(over))
        plane.land()
    return decisions / (spent + plane.ready)


def memory(workers: int, requests: int, policy: str) -> tuple[float, float]:
    """Bytes per worker, and per further request on a worker: fold, view and index."""
    gc.collect()
    tracemalloc.start()
    empty = tracemalloc.get_traced_memory()[0]
    plane = Plane(workers, policy, 1)
    selectors_of(plane)
    idle = tracemalloc.get_traced_memory()[0]
    for _ in range(requests):
        event = plane.decide(*plane.arrive())
        plane.own(event)
        plane.land()
    selectors_of(plane)
    gc.collect()
    full = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    return (idle - empty) / workers, (full - idle) / requests


def selectors_of(plane: Plane) -> None:
    """Update the indexes that the policy reads."""
    if plane.policy in selectors.POLICIES:
        plane.decide("q0", 1)


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(
        prog="relume-chaos bench routing-cost", description=DESCRIPTION
    )
    parser.add_argument("--workers", type=int, nargs="+", default=[64, 1000])
    parser.add_argument("--policies", nargs="+", default=["predicted_ttft"])
    parser.add_argument("--decisions", type=int, default=4000)
    parser.add_argument("--steps", type=float, default=30.0, help="steps per second and engine")
    parser.add_argument(
        "--per-worker", type=float, default=4.0, help="decisions per second and worker"
    )
    parser.add_argument("--repeats", type=int, default=5, help="number of identical runs")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args(argv)
    figures: dict[str, dict[str, Any]] = {}
    met = True

    def note(name: str, value: float, unit: str, goal: float | None, good: bool = True) -> None:
        nonlocal met
        met = met and good
        figures[name] = figure(value, unit, goal, 1)

    for policy in args.policies:
        for workers in args.workers:
            plane, took, bringing, once = repeated(workers, policy, args)
            p50, p99 = percentile(took, 0.5), percentile(took, 0.99)
            goal = GOALS_US.get(workers)
            what = f"{policy}_{workers}"
            note(f"{what}_p50", p50, "us", None)
            note(f"{what}_p99", p99, "us", goal, goal is None or p99 < goal)
            note(f"{what}_p99_once", once, "us", None)
            note(f"{what}_bringing_up", bringing, "us a decision", None)
            if workers == min(args.workers):
                each = rate(plane, args.decisions)
                wanted = GOAL_RATE if workers == 64 else None
                note(f"{what}_rate", each, "decisions/s", wanted, not wanted or each >= wanted)
        by_worker, by_request = memory(64, 2000, policy)
        note(f"{policy}_bytes_a_worker", by_worker, "B", None)
        note(f"{policy}_bytes_a_request", by_request, "B", None)
    return {"bench": "routing-cost", "met": met, "figures": figures}
