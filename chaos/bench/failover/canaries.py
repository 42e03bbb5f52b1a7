"""How soon canaries find engines that compute wrong results, and what canaries cost.

Flips: three real engines serve a light load. In the memory of one after another a random mantissa bit
of a random element of a weight flips. Whether that changes logits is asked of the engine itself, by
four other prompts before and after. Those that do must be found within one round of canaries. A flip
that changes nothing is undone by a restart and counted.

Cost: one of two engines gets canaries as by default, the other none, under the same constant load.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from relume.chaos.bench.bench_figures import cpu_s, figure, percentile
from relume.chaos.bench.failover.detection import Load, Log
from relume.chaos.bench.failover.failover_parts import until
from relume.chaos.live.faults import flipped_weights
from relume.chaos.traffic import Stream, complete
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.engine_shim.canary_prompts import COUNT
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.vocabulary.enums import EnginePhase, HealthState

DESCRIPTION = "how soon canaries find flipped bits in weights, and what canaries cost"
INTERVAL_S = 2.0
"""Time between canaries while bits flip; 30 s by default."""
ROUND_S = COUNT * INTERVAL_S * 1.75
"""The longest time in which each canary was sent once: pauses are up to a quarter longer, and a due
canary waits for an idle engine for half an interval."""
SCALE_BITS = 23
ELEMENTS = 32
PROBES = 4
PROBE_TOKENS = 16
PROBE_PROMPT = 20
"""Shorter than a KV block: nothing of it comes from the prefix cache."""
RESTART_S = 120.0
CANARY_BUDGET_PERCENT = 0.1


class Fleet(LocalFleet):
    """With these options of each worker's agent."""

    def __init__(self, options: FleetOptions, flags: Sequence[Sequence[str]]) -> None:
        super().__init__(options)
        self._flags = flags

    def agent_flags(self, index: int) -> list[str]:
        return list(self._flags[index])


class StepLog(Log):
    """Counts the tokens that each worker's stream of events says were decoded."""

    def __init__(self, reader: Any) -> None:
        super().__init__(reader)
        self.tokens: Counter[str] = Counter()

    def _seen(self, stream: str, position: int, event: Any) -> None:
        super()._seen(stream, position, event)
        if type(event) is v.EngineStep:
            self.tokens[stream] += event.batch


class LightLoad:
    """Clients that pause between requests, so that engines have nothing to do at times."""

    tokens = 48
    """Of each answer."""

    def __init__(self, url: str, clients: int = 4) -> None:
        self._url, self._clients = url, clients
        self.broken = self.corrupt = self.served = 0

    async def __aenter__(self) -> LightLoad:
        self._session = aiohttp.ClientSession()
        self._tasks = [asyncio.create_task(self._ask(n)) for n in range(self._clients)]
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._session.close()

    def prompt(self, number: int, draw: random.Random) -> str:
        """Of the next request of a client."""
        return f"Story {number} of the harbor and the winter"

    async def _ask(self, number: int) -> None:
        draw = random.Random(f"light load {number}")
        while True:
            name = f"c{number}-{time.monotonic_ns()}"
            stream = Stream(request=name, prompt=self.prompt(number, draw))
            await complete(self._session, self._url, stream, self.tokens, ignore_eos=True)
            self.served += stream.whole
            corrupt = "corrupt_answer" in stream.error
            self.corrupt += corrupt
            self.broken += not stream.whole and not corrupt
            await asyncio.sleep(draw.uniform(0.2, 0.8))


class Flips:
    """Flips bits in the engines of one fleet."""

    def __init__(self, fleet: LocalFleet, log: Log, seed: int) -> None:
        self._fleet, self._log = fleet, log
        self._draw = random.Random(f"flips {seed}")
        self.found_s: list[float] = []
        self.missed = self.unchanged = 0

    async def one(self, number: int) -> None:
        """Flip a bit, wait until it is found or a round is over, and until the worker is back."""
        fleet = self._log.fleet
        name = sorted(fleet.workers)[number % len(fleet.workers)]
        worker = fleet.workers[name]
        await until(partial(self._is_well, name), f"{name} is healthy", RESTART_S)
        incarnation, pid = worker.incarnation, worker.engine_pid
        element, bit = self._draw.randrange(ELEMENTS), self._draw.randrange(SCALE_BITS)
        before = await self._logprobs(name)
        model = self._fleet.options.model
        await asyncio.to_thread(flipped_weights.flip, pid, model, element, bit)
        began = time.monotonic()
        changed = await self._logprobs(name) != before
        found = await self._found(name, incarnation, began)
        what = f"flip {number + 1}: element {element}, bit {bit} in {name}"
        if found >= 0:
            self.found_s.append(found)
            print(f"{what}: found after {found:.2f} s", flush=True)
        else:
            self.missed += changed
            self.unchanged += not changed
            says = "NOT FOUND" if changed else "changes no log probability, not found"
            print(f"{what}: {says}", flush=True)
            await self._fleet.admin(f"workers/{name}/restart", "POST")
        back = partial(self._is_well, name, incarnation)
        await until(back, f"{name} is back", RESTART_S)

    async def _found(self, name: str, incarnation: int, began: float) -> float:
        """Seconds until the worker was quarantined; -1: not within a round."""
        try:
            async with asyncio.timeout(ROUND_S):
                at = await self._log.first(began, partial(is_quarantined, name, incarnation))
        except TimeoutError:
            return -1.0
        return at - began

    def _is_well(self, name: str, after: int = 0) -> bool:
        worker = self._log.fleet.workers[name]
        state = getattr(worker.health, "state", HealthState.HEALTHY)
        good = getattr(worker.canary, "good", 0) >= COUNT
        ready = worker.engine == EnginePhase.READY and worker.incarnation > after
        return ready and good and state == HealthState.HEALTHY

    async def _logprobs(self, name: str) -> list[Any]:
        """Of the other prompts, from the engine itself; empty where it ended meanwhile."""
        worker = self._log.fleet.workers[name]
        url = f"http://{worker.host}:{worker.port}"
        draw, found = random.Random("probes"), []
        async with aiohttp.ClientSession() as session:
            for _ in range(PROBES):
                body = {
                    "model": self._fleet.options.model_name,
                    "prompt": [draw.randrange(400, 1900) for _ in range(PROBE_PROMPT)],
                    "max_tokens": PROBE_TOKENS, "temperature": 0, "logprobs": 5,
                    "ignore_eos": True,
                }  # fmt: skip
                try:
                    async with session.post(f"{url}/v1/completions", json=body) as answer:
                        completion = await answer.json()
                        found.append(completion["choices"][0]["logprobs"]["token_logprobs"])
                except (aiohttp.ClientError, KeyError):
                    found.append(None)
        return found


def is_quarantined(worker: str, incarnation: int, event: Any) -> bool:
    """Whether `event` is that verdict."""
    return (
        type(event) is v.HealthDecided
        and (event.worker, event.incarnation) == (worker, incarnation)
        and event.state == HealthState.QUARANTINED
    )


async def flips(count: int, seed: int, model: str) -> dict[str, Any]:
    """Figures of `count` flips."""
    flags = ["--canary-interval-s", str(INTERVAL_S), "--canary-budget-ppm", "1000000"]
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        options = FleetOptions(state_dir=folder, port=0, admin_port=0, model=model)
        fleet = await stack.enter_async_context(Fleet(options, [flags] * options.workers))
        log = await followed(stack, fleet)
        found = Flips(fleet, log, seed)
        load = await stack.enter_async_context(LightLoad(fleet.gateways[0]))
        for number in range(count):
            await found.one(number)
        unasked = sum(
            type(e) is v.HealthDecided and e.state == HealthState.QUARANTINED
            for _, e in log.happened
        ) - len(found.found_s)
    changed = len(found.found_s) + found.missed
    return {
        "flips_that_change_logits": figure(changed, "flips", digits=0),
        "found_within_a_round": figure(len(found.found_s), "flips", changed, digits=0),
        "found_p50": figure(percentile(found.found_s or [-1], 0.5), "s", digits=2),
        "found_max": figure(max(found.found_s, default=-1), "s", ROUND_S, digits=2),
        "flips_that_change_nothing": figure(found.unchanged, "flips", digits=0),
        "other_quarantines": figure(unasked, "verdicts", 0, digits=0),
        "streams": figure(load.served, "streams", digits=0),
        "corrupt_answers": figure(load.corrupt, "streams", digits=0),
        "broken": figure(load.broken, "streams", 0, digits=0),
    }


async def cost(seconds: float, model: str) -> dict[str, Any]:
    """Figures of two engines, one of which gets canaries."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        options = FleetOptions(
            workers=2, state_dir=folder, port=0, admin_port=0, model=model,
            replica_args=("--policy", "round_robin"),
        )  # fmt: skip
        fleet = await stack.enter_async_context(Fleet(options, [[], ["--canary-interval-s", "0"]]))
        log = await followed(stack, fleet)
        await stack.enter_async_context(Load(fleet.gateways[0]))
        await asyncio.sleep(5.0)
        names = sorted(log.fleet.workers)
        pids = [log.fleet.workers[name].engine_pid for name in names]
        began, known = time.monotonic(), len(log.happened)
        used, made = [cpu_s(pid) for pid in pids], dict(log.tokens)
        await asyncio.sleep(seconds)
        used = [cpu_s(pid) - before for pid, before in zip(pids, used, strict=True)]
        after = dict(log.tokens)
        took_s = time.monotonic() - began
        canaries = [e for _, e in log.happened[known:] if type(e) is v.CanaryReported]
    rates = [
        (after[f"w.{name}"] - made[f"w.{name}"]) / spent
        for name, spent in zip(names, used, strict=True)
    ]
    share = 100 * sum(event.took_us for event in canaries) / 1e6 / took_s
    return {
        "canaries": figure(len(canaries), "canaries", digits=0),
        "engine_time": figure(share, "percent", CANARY_BUDGET_PERCENT),
        "tokens_per_cpu_s_with": figure(rates[0], "tokens/s", digits=1),
        "tokens_per_cpu_s_without": figure(rates[1], "tokens/s", digits=1),
        "with_over_without": figure(rates[0] / rates[1], "ratio"),
    }


async def followed(stack: AsyncExitStack, fleet: LocalFleet) -> StepLog:
    """Its log, followed until `stack` ends."""
    config = EtcdConfig(endpoints=(fleet.etcd_endpoint,))
    etcd = await stack.enter_async_context(EtcdLog(config))
    log = StepLog(etcd.reader())
    following = asyncio.create_task(log.run())
    stack.callback(following.cancel)
    await until(lambda: len(log.fleet.workers) == fleet.options.workers, "the log is read")
    return log


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(prog="relume-chaos bench canaries", description=DESCRIPTION)
    parser.add_argument("--flips", type=int, default=20, help="flipped bits; 0: none")
    parser.add_argument("--seconds", type=float, default=120.0, help="of the cost; 0: not measured")
    parser.add_argument("--seed", type=int, default=0, help="of the bits")
    parser.add_argument("--model", default=".relume/models/tiny")
    args = parser.parse_args(argv)
    model, figures = str(Path(args.model).absolute()), dict[str, Any]()
    if args.flips:
        figures |= asyncio.run(flips(args.flips, args.seed, model))
    if args.seconds:
        figures |= asyncio.run(cost(args.seconds, model))
    return {"bench": "canaries", "met": _met(figures), "figures": figures}


def _met(figures: dict[str, Any]) -> bool:
    def value(name: str, missing: float) -> float:
        return float(figures[name]["value"]) if name in figures else missing

    changed = value("flips_that_change_logits", 0)
    return (
        value("found_within_a_round", 0) >= changed
        and value("other_quarantines", 0) == 0
        and value("broken", 0) == 0
        and value("engine_time", 0) <= CANARY_BUDGET_PERCENT
    )
