"""How long each class of failure of a worker stays unnoticed, on real processes.

A fleet has two workers, one replica and a constant load, but for the idle class. Each class is made
`--times` times, on one worker after the other: one-process engines forked from a zygote, and stock
`vllm serve`. A time is from the fault to the first event in the log that says so, as a follower of
the log reads it.

- crash: kill -9 of an engine's process that schedules (behind `vllm serve`, another one computes).
- idle-hang, hang: SIGSTOP to it, without and under load; it continues once it was found.
- spin: a thread of it computes inside a step and never ends it.
- slow: the thread that computes waits after each step, for a multiple of the CPU time that this took it, so
  that they take four times as long. What follows a wait takes longer too; the figure `slow_times` is what
  they took beside those of the peer when the worker was found.
- throttled: the process that computes runs for an eighth of the time. (With a quarter, the steps took 2.0 to 2.9
  times as long as those of its peer, on two cores that all processes share.)
- errors: its server answers every request with 500; requests that failed until its breaker opened.
- stuck-stream: it steps on, but one stream's output stays away.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp

from relume.chaos.bench.bench_figures import figure, percentile
from relume.chaos.bench.failover.failover_parts import until
from relume.chaos.kill_demo import Watch
from relume.chaos.live.failpoint_server import FailpointServer
from relume.chaos.live.processes import signals
from relume.chaos.traffic import Stream, complete, prompts
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.failpoints.failpoint_client import ENVIRONMENT
from relume.events.failpoints.points import Action, Failpoint
from relume.events.vocabulary.enums import EnginePhase, FailureClass, HealthState, TransportKind

DESCRIPTION = (
    "how long each class of failure stays unnoticed, on one-process engines and vllm serve"
)
HOSTS = ("zygote", "serve")
CLIENTS = 8
TOKENS = 96
FOUND_S = 60.0
"""Maximum time that the bench waits for a detection."""
GOALS = {
    "crash": 50,
    "idle_hang": 3000,
    "hang": 3000,
    "spin": 3000,
    "slow": 5000,
    "throttled": 5000,
    "stuck_stream": 3000,
}
"""Milliseconds."""
MOST_FAILED = 5
RELOAD_S = 300.0
"""Maximum time in which an engine starts again."""
SLOWED = 3.25
"""Of the CPU time of a step. With 4 the steps took 5.7 to 6.1 times as long as those of the peer (p50)."""
THROTTLED = 8.0
Seen = Callable[[Any], bool]


class Log(Watch):
    """Follows the log; `happened`: the events but those of engine steps, with the monotonic time at
    which each was read."""

    def __init__(self, reader: Any) -> None:
        super().__init__(reader)
        self.happened: list[tuple[float, Any]] = []

    def _seen(self, stream: str, position: int, event: Any) -> None:
        super()._seen(stream, position, event)
        if type(event) is not v.EngineStep:
            self.happened.append((time.monotonic(), event))

    async def first(self, since: float, seen: Seen) -> float:
        """When the first event since then was read of which `seen` says so. Raises TimeoutError."""
        looked = 0
        async with asyncio.timeout(FOUND_S):
            while True:
                for at, event in self.happened[looked:]:
                    if at >= since and seen(event):
                        return at
                looked = len(self.happened)
                await asyncio.sleep(0.002)


class Load:
    """Clients that ask one after another, from several tasks, until it is left."""

    def __init__(self, url: str, clients: int = CLIENTS, tokens: int = TOKENS) -> None:
        self._url, self._clients, self._tokens = url, clients, tokens
        self._tasks: list[asyncio.Task[None]] = []
        self.broken = self.served = 0

    async def __aenter__(self) -> Load:
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(connector=connector)
        self._tasks = [asyncio.create_task(self._ask(n)) for n in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    async def _ask(self, number: int) -> None:
        text, sent = prompts(number + 1)[-1], 0
        while True:
            sent += 1
            name = f"d{number}-{sent}-{time.monotonic_ns()}"
            stream = Stream(request=name, prompt=text)
            await complete(self._session, self._url, stream, self._tokens, ignore_eos=True)
            self.broken += not stream.whole
            self.served += stream.whole


class Bench:
    """The classes on one fleet."""

    def __init__(self, fleet: LocalFleet, log: Log, failpoints: FailpointServer) -> None:
        self._fleet = fleet
        self._log = log
        self._failpoints = failpoints
        self._turn = 0
        self.broken = 0
        self.slow_times: list[float] = []

    def load(self) -> Load:
        """Requests for the fleet."""
        return Load(self._fleet.gateways[0])

    async def crash(self) -> float:
        """Milliseconds until something says that an engine was killed."""
        async with self.load() as load:
            worker = await self._busy()
            name, incarnation = worker.name, worker.incarnation
            pid = await self._pid(worker)
            began = time.monotonic()
            os.kill(pid, signal.SIGKILL)
            found = await self._log.first(began, partial(_says, name, incarnation))
        back = name, incarnation + 1
        await until(lambda: back in self._log.ready_at, f"{name} is back", RELOAD_S)
        self.broken += load.broken
        return 1000 * (found - began)

    async def idle_hang(self) -> float:
        """The same until one that has nothing to do was found hung."""
        return await self._stop(self._next())

    async def hang(self) -> float:
        """The same under load."""
        async with self.load() as load:
            took = await self._stop(await self._busy())
        self.broken += load.broken
        return took

    async def _stop(self, worker: Any) -> float:
        pid, key = await self._pid(worker), (worker.name, worker.incarnation)
        began = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            found = await self._log.first(began, partial(_says, *key))
        finally:
            os.kill(pid, signal.SIGCONT)
        await self._well(worker)
        return 1000 * (found - began)

    async def spin(self) -> float:
        """The same until an engine was found hung a thread of which spins inside a step."""
        async with self.load() as load:
            worker = await self._busy()
            point, process = Failpoint.ENGINE_PREFILL, f"engine {worker.name}"
            async with self._failpoints.armed(point, Action.SPIN, process=process) as armed:
                await armed.reached()
                began = time.monotonic()
                key = worker.name, worker.incarnation
                found = await self._log.first(began, partial(_says, *key))
            await self._well(worker)
        self.broken += load.broken
        return 1000 * (found - began)

    async def slow(self) -> float:
        """The same until the leader made a suspect of a worker whose steps take four times as
        long."""
        async with self.load() as load:
            worker = await self._busy()
            point, process = Failpoint.ENGINE_COMPUTE, f"engine {worker.name}"
            began = time.monotonic()
            async with self._failpoints.armed(
                point, Action.STRETCH, process=process, times=0, factor=SLOWED
            ):
                found = await self._log.first(began, partial(_slow, worker.name))
                self.slow_times.append(worker.health.slow[2] / 100)
            await self._well(worker)
        self.broken += load.broken
        return 1000 * (found - began)

    async def throttled(self) -> float:
        """The same of one whose process runs for a part of the time."""
        async with self.load() as load:
            worker = await self._busy()
            pid = await self._pid(worker, "worker")
            began = time.monotonic()
            throttling = asyncio.create_task(signals.slow(pid, THROTTLED))
            try:
                found = await self._log.first(began, partial(_slow, worker.name))
            finally:
                throttling.cancel()
                await asyncio.gather(throttling, return_exceptions=True)
            await self._well(worker)
        self.broken += load.broken
        return 1000 * (found - began)

    async def stuck_stream(self) -> float:
        """The same until a stream was found stuck whose output stays away while its engine steps."""
        async with self.load() as load:
            worker = await self._busy()
            point, process = Failpoint.ENGINE_FRAME, f"engine {worker.name}"
            # Not the first frames of the answer: those wait for the engine.
            async with self._failpoints.armed(point, process=process, tokens=20) as armed:
                request = (await armed.reached()).facts["request"]
                began = time.monotonic()
                found = await self._log.first(began, partial(_stuck, request))
            await self._log.first(began, partial(_ended, request))
            await self._well(worker)
        self.broken += load.broken
        return 1000 * (found - began)

    async def errors(self) -> float:
        """Number of requests that failed on a worker until its breaker opened."""
        worker = self._next()
        name, since = worker.name, len(self._log.happened)
        process = f"engine {name}"
        async with self._failpoints.armed(
            Failpoint.ENGINE_REQUEST, Action.FAIL, process=process, times=0
        ):
            async with self.load() as load:
                began = time.monotonic()
                await self._log.first(began, partial(_opened, name))
        self.broken += load.broken
        happened = [event for _, event in self._log.happened[since:]]
        end = next(i for i, event in enumerate(happened) if _opened(name, event))
        async with self.load():
            await self._well(worker)
        return float(sum(_failed(name, event) for event in happened[:end]))

    async def _busy(self) -> Any:
        """The next worker, once it has requests."""
        worker = self._next()
        await until(lambda: worker.batch > 0 and worker.decoding > 0, f"{worker.name} has requests")
        return worker

    def _next(self) -> Any:
        workers = sorted(self._log.fleet.workers)
        self._turn += 1
        return self._log.fleet.workers[workers[self._turn % len(workers)]]

    async def _pid(self, worker: Any, role: str = "core") -> int:
        """The process of that role of its engine, the only one if it has no others."""
        async with aiohttp.ClientSession() as session:
            async with session.get(f"{worker.agent_url}/state") as answer:
                engine = (await answer.json())["engine"]
        pids = [one["pid"] for one in engine["members"] if one["role"] == role]
        return int(pids[0]) if pids else int(engine["pid"])

    async def _well(self, worker: Any) -> None:
        """Until nothing is held against it any more."""

        def well() -> bool:
            state = getattr(worker.health, "state", HealthState.HEALTHY)
            suspects = [r.suspects.get(worker.name) for r in self._log.fleet.replicas.values()]
            fine = worker.engine == EnginePhase.READY and state == HealthState.HEALTHY
            return fine and worker.incarnation not in suspects

        await until(well, f"{worker.name} is healthy")


def _says(worker: str, incarnation: int, event: Any) -> bool:
    """Whether `event` says that something is wrong with that engine."""
    if isinstance(event, v.TransportObserved | v.WorkerSuspected | v.EngineDied | v.EngineHung):
        return (event.worker, event.incarnation) == (worker, incarnation)
    if type(event) is v.StallJudged:
        return event.hung and (event.worker, event.incarnation) == (worker, incarnation)
    return False


def _slow(worker: str, event: Any) -> bool:
    return (
        type(event) is v.HealthDecided
        and event.worker == worker
        and event.failure == FailureClass.SLOW
    )


def _stuck(request: str, event: Any) -> bool:
    return type(event) is v.StreamJudged and event.request == request


def _ended(request: str, event: Any) -> bool:
    return type(event) is v.RequestEnded and event.request == request


def _opened(worker: str, event: Any) -> bool:
    return (
        type(event) is v.HealthDecided
        and event.worker == worker
        and event.state == HealthState.UNHEALTHY
    )


def _failed(worker: str, event: Any) -> bool:
    return (
        type(event) is v.TransportObserved
        and event.worker == worker
        and event.kind == TransportKind.ENGINE_ERROR
    )


async def measure(host: str, times: int, classes: list[str], model: str) -> dict[str, list[float]]:
    """Milliseconds (of `errors`: failed requests) of each class, and the streams that broke."""
    found: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with FailpointServer(Path(folder) / "failpoints.sock") as failpoints:
            os.environ[ENVIRONMENT] = str(failpoints.path)
            options = FleetOptions(
                workers=2, state_dir=folder, port=0, admin_port=0, model=model, host_kind=host,
                # Each worker gets its share, and one that fails is not spared.
                replica_args=("--policy", "round_robin"),
            )  # fmt: skip
            async with LocalFleet(options) as fleet:
                async with EtcdLog(EtcdConfig(endpoints=(fleet.etcd_endpoint,))) as etcd:
                    log = Log(etcd.reader())
                    following = asyncio.create_task(log.run())
                    try:
                        bench = Bench(fleet, log, failpoints)
                        async with bench.load():
                            await asyncio.sleep(5.0)
                        await until(lambda: not log.fleet.requests, "no request is left")
                        for name in classes:
                            for number in range(times):
                                value = await getattr(bench, name)()
                                await until(lambda: not log.fleet.requests, "no request is left")
                                found.setdefault(name, []).append(value)
                                unit = "requests" if name == "errors" else "ms"
                                print(
                                    f"{host} {name} {number + 1}/{times}: {value:.0f} {unit}",
                                    flush=True,
                                )
                        found["broken"] = [float(bench.broken)]
                        if bench.slow_times:
                            found["slow_times"] = bench.slow_times
                    finally:
                        following.cancel()
                        with suppress(asyncio.CancelledError):
                            await following
    return found


def result_of(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """The result of the bench, from what `measure` found for each host."""
    figures: dict[str, Any] = {}
    met = True
    for host, classes in found.items():
        for name, values in classes.items():
            if name == "broken":
                figures[f"{host}_broken"] = figure(values[0], "streams", 0, digits=0)
                met &= values[0] == 0
            elif name == "slow_times":
                figures[f"{host}_slow_times_p50"] = figure(median(values), "times", digits=1)
            elif name == "errors":
                most = max(values)
                figures[f"{host}_errors_max"] = figure(most, "requests", MOST_FAILED, digits=0)
                met &= most <= MOST_FAILED
            else:
                goal = GOALS[name]
                figures[f"{host}_{name}_p50"] = figure(percentile(values, 0.5), "ms", digits=1)
                figures[f"{host}_{name}_max"] = figure(max(values), "ms", goal, digits=1)
                met &= max(values) < goal
    return {"bench": "detection", "met": met, "figures": figures}


CLASSES = ("crash", "idle_hang", "hang", "spin", "errors", "slow", "throttled", "stuck_stream")


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(prog="relume-chaos bench detection", description=DESCRIPTION)
    parser.add_argument("--times", type=int, default=10, help="repetitions of each class")
    parser.add_argument("--hosts", nargs="+", default=list(HOSTS), choices=HOSTS)
    parser.add_argument("--classes", nargs="+", default=list(CLASSES), choices=CLASSES)
    parser.add_argument("--model", default=".relume/models/tiny")
    args = parser.parse_args(argv)
    model = str(Path(args.model).absolute())
    found = {h: asyncio.run(measure(h, args.times, args.classes, model)) for h in args.hosts}
    return result_of(found)
