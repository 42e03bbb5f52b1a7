"""How many requests an engine that computes wrong results serves until cross-checks find it, and what
cross-checks cost.

Flips: three real engines without canaries serve a light load of various prompts, and each finished
request is answered again. In the memory of one engine after another a high mantissa bit of a random
element of a weight flips. Whether that changes tokens is asked of the engine itself, by other
prompts before and after. An engine whose tokens change must be quarantined by a majority. With a share
below 1 the first difference takes as many times longer; from there on all requests are compared.

Share: the same in simulated fleets with the default settings, of which one engine computes wrong
tokens for one request in three, where no canary touches it.

Cost: a fleet without canaries and cross-checks serves a light load, and then one with both as by
default. Tokens per CPU-second of the engines are compared, and the time of both is measured from the
begin on. Engines save for a check before they answer it, so the window lasts for minutes.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import tempfile
import time
from collections import Counter
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp

from relume.chaos.bench.bench_figures import cpu_s, figure, percentile
from relume.chaos.bench.failover.canaries import (
    CANARY_BUDGET_PERCENT,
    Fleet,
    LightLoad,
    StepLog,
    followed,
    is_quarantined,
)
from relume.chaos.bench.failover.failover_parts import until
from relume.chaos.bench.failover.simulated_checks import default_share
from relume.chaos.live.faults import flipped_weights
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.engine_shim.canary_prompts import COUNT
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EnginePhase, HealthState, RequestOutcome
from relume.policies.crosscheck.check_settings import CrossCheckConfig

DESCRIPTION = "how soon cross-checks find engines that compute wrong tokens, and what they cost"
BITS = (20, 21, 22)
ELEMENTS = 32
PROBES = 24
PROBE_TOKENS = 24
PROBE_PROMPT = 20
"""Shorter than a KV block: nothing of it comes from the prefix cache."""
FOUND_S = 120.0
BACK_S = 120.0
SETTLE_S = 5.0
COST_BUDGET_PERCENT = CrossCheckConfig().budget_ppm / 10_000
WORDS = "harbor winter lamp engine river copper garden signal letter market stone bridge".split()


class VariousLoad(LightLoad):
    """Prompts are drawn, so that no two requests are alike."""

    def prompt(self, number: int, draw: random.Random) -> str:
        return f"Story {number} of the " + " and the ".join(draw.choices(WORDS, k=6))


class ShortLoad(VariousLoad):
    """Short answers, so that a few checks of each engine fit into minutes."""

    tokens = 24


class CheckedFlips:
    """Flips bits in the engines of one fleet. `requests`: how many the engine completed between the flip
    and the verdict, of each flip that was found."""

    def __init__(self, fleet: LocalFleet, log: StepLog, seed: int) -> None:
        self._fleet, self._log = fleet, log
        self._draw = random.Random(f"checked flips {seed}")
        self.requests: list[int] = []
        self.found_s: list[float] = []
        self.changed: list[float] = []
        self.missed = self.unchanged = 0

    async def one(self, number: int) -> None:
        """Flip a bit, wait until it is found or the time is over, and until the worker is back."""
        fleet = self._log.fleet
        name = sorted(fleet.workers)[number % len(fleet.workers)]
        worker = fleet.workers[name]
        await until(partial(self._is_well, name), f"{name} is healthy", BACK_S)
        incarnation, pid = worker.incarnation, worker.engine_pid
        element, bit = self._draw.randrange(ELEMENTS), self._draw.choice(BITS)
        before = await self._tokens(name)
        model = self._fleet.options.model
        await asyncio.to_thread(flipped_weights.flip, pid, model, element, bit)
        began = time.monotonic()
        after = await self._tokens(name)
        share = sum(a != b for a, b in zip(before, after, strict=True)) / PROBES
        found = await self._found(name, incarnation, began) if share else -1.0
        what = f"flip {number + 1}: element {element}, bit {bit} in {name}"
        if found >= 0:
            served = self._served(name, incarnation, began, began + found)
            self.requests.append(served)
            self.found_s.append(found)
            self.changed.append(share)
            text = f"{share:.0%} of answers change, found after {found:.1f} s, {served} requests"
            print(f"{what}: {text}", flush=True)
        else:
            self.missed += share > 0
            self.unchanged += not share
            says = f"NOT FOUND, {share:.0%} of answers change" if share else "changes no token"
            print(f"{what}: {says}", flush=True)
            await self._fleet.admin(f"workers/{name}/restart", "POST")
        back = partial(self._is_well, name, incarnation)
        await until(back, f"{name} is back", BACK_S)

    async def _found(self, name: str, incarnation: int, began: float) -> float:
        """Seconds until the worker was quarantined; -1: not in time."""
        try:
            async with asyncio.timeout(FOUND_S):
                at = await self._log.first(began, partial(is_quarantined, name, incarnation))
        except TimeoutError:
            return -1.0
        return at - began

    def _served(self, name: str, incarnation: int, began: float, ended: float) -> int:
        """Requests that the engine completed in that time."""
        routes: dict[str, tuple[str, int]] = {}
        count = 0
        for at, event in self._log.happened:
            if type(event) is v.RouteDecided:
                routes[event.request] = event.worker, event.incarnation
            elif type(event) is v.RequestEnded and began <= at <= ended:
                completed = event.outcome == RequestOutcome.COMPLETED
                count += completed and routes.get(event.request) == (name, incarnation)
        return count

    def _is_well(self, name: str, after: int = 0) -> bool:
        worker = self._log.fleet.workers[name]
        state = getattr(worker.health, "state", HealthState.HEALTHY)
        ready = worker.engine == EnginePhase.READY and worker.incarnation > after
        return ready and state == HealthState.HEALTHY

    async def _tokens(self, name: str) -> list[Any]:
        """Answers to the probes, from the engine itself; None where it ended meanwhile."""
        worker = self._log.fleet.workers[name]
        url = f"http://{worker.host}:{worker.port}/v1/completions"
        draw, found = random.Random("probes"), []
        async with aiohttp.ClientSession() as session:
            for _ in range(PROBES):
                body = {
                    "model": self._fleet.options.model_name,
                    "prompt": [draw.randrange(400, 1900) for _ in range(PROBE_PROMPT)],
                    "max_tokens": PROBE_TOKENS, "temperature": 0, "ignore_eos": True,
                }  # fmt: skip
                try:
                    async with session.post(url, json=body) as answer:
                        found.append((await answer.json())["choices"][0]["text"])
                except (aiohttp.ClientError, KeyError):
                    found.append(None)
        return found


async def flips(count: int, share_percent: float, seed: int, model: str) -> dict[str, Any]:
    """Figures of `count` flips."""
    checks = f"share_ppm={round(share_percent * 10_000)},budget_ppm=1000000"
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        options = FleetOptions(
            state_dir=folder, port=0, admin_port=0, model=model,
            replica_args=("--policy", "round_robin", "--crosscheck-limits", checks),
        )  # fmt: skip
        # One canary a day: those after the start release a worker that was restarted.
        flags = ["--canary-interval-s", "3600", "--canary-budget-ppm", "1"]
        fleet = await stack.enter_async_context(Fleet(options, [flags] * options.workers))
        log = await followed(stack, fleet)
        found = CheckedFlips(fleet, log, seed)
        load = await stack.enter_async_context(VariousLoad(fleet.gateways[0]))
        for number in range(count):
            await found.one(number)
        others = sum(
            type(e) is v.HealthDecided and e.state == HealthState.QUARANTINED
            for _, e in log.happened
        ) - len(found.found_s)
        by_majority = sum(
            type(e) is v.HealthDecided
            and e.state == HealthState.QUARANTINED
            and "most engines" in e.evidence
            for _, e in log.happened
        )
    changed = len(found.found_s) + found.missed
    return {
        "flips_that_change_tokens": figure(changed, "flips", digits=0),
        "found": figure(len(found.found_s), "flips", changed, digits=0),
        "found_by_majority": figure(by_majority, "flips", digits=0),
        "answers_changed_p50": figure(percentile(found.changed or [-1], 0.5), "share", digits=2),
        "requests_until_found_p50": figure(
            percentile(found.requests or [-1], 0.5), "requests", digits=0
        ),
        "requests_until_found_max": figure(max(found.requests, default=-1), "requests", digits=0),
        "found_p50": figure(percentile(found.found_s or [-1], 0.5), "s", digits=1),
        "found_max": figure(max(found.found_s, default=-1), "s", digits=1),
        "flips_that_change_no_token": figure(found.unchanged, "flips", digits=0),
        "other_quarantines": figure(others, "verdicts", 0, digits=0),
        "streams": figure(load.served, "streams", digits=0),
        "corrupt_answers": figure(load.corrupt, "streams", digits=0),
        "broken": figure(load.broken, "streams", 0, digits=0),
    }


async def cost(seconds: float, model: str) -> dict[str, Any]:
    """Figures of two fleets: one without canaries and cross-checks, for a quarter of the time, and one
    with both as by default."""
    off = ("--crosscheck-limits", "share_ppm=0"), ["--canary-interval-s", "0"]
    without, _ = await _measured(seconds / 4, model, *off)
    rate, spent = await _measured(seconds, model, (), [])
    checks, canaries = spent[v.CrossChecked], spent[v.CanaryReported]
    engines = FleetOptions().workers
    fewest = min(map(len, checks.values())) if len(checks) == engines else 0
    return {
        "checks": figure(sum(map(len, checks.values())), "checks", digits=0),
        "checks_of_an_engine_min": figure(fewest, "checks", digits=0),
        "engine_time": figure(_share(checks, seconds, engines), "percent", COST_BUDGET_PERCENT),
        "engine_time_worst": figure(_worst(checks), "percent", COST_BUDGET_PERCENT),
        "canaries": figure(sum(map(len, canaries.values())), "canaries", digits=0),
        "canaries_engine_time": figure(
            _share(canaries, seconds, engines), "percent", CANARY_BUDGET_PERCENT
        ),
        "tokens_per_cpu_s_with": figure(rate, "tokens/s", digits=1),
        "tokens_per_cpu_s_without": figure(without, "tokens/s", digits=1),
        "with_over_without": figure(rate / without, "ratio"),
    }


Spent = dict[str, list[tuple[float, int]]]
"""By worker: seconds from the begin of the window, and microseconds of its engine."""


async def _measured(
    seconds: float, model: str, replica: tuple[str, ...], agent: list[str]
) -> tuple[float, dict[type, Spent]]:
    """Tokens per CPU-second of all engines of a fleet with these flags, and what its cross-checks and
    canaries took."""
    async with AsyncExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        options = FleetOptions(
            state_dir=folder, port=0, admin_port=0, model=model, replica_args=replica
        )
        fleet = await stack.enter_async_context(Fleet(options, [agent] * options.workers))
        log = await followed(stack, fleet)
        await stack.enter_async_context(ShortLoad(fleet.gateways[0]))
        await asyncio.sleep(SETTLE_S)
        if not agent:  # canaries of the start are not part of the budget
            await until(partial(_are_begun, log), "each engine has answered all canaries")
        began, known = time.monotonic(), len(log.happened)
        rate = await _rate(log, seconds)
        spent: dict[type, Spent] = {v.CrossChecked: {}, v.CanaryReported: {}}
        for at, event in log.happened[known:]:
            if type(event) is v.CrossChecked:
                spent[v.CrossChecked].setdefault(event.by, []).append((at - began, event.took_us))
            elif type(event) is v.CanaryReported:
                of_engine = spent[v.CanaryReported].setdefault(event.worker, [])
                of_engine.append((at - began, event.took_us))
    for kind, of_kind in spent.items():
        for name, took in sorted(of_kind.items()):
            shown = ", ".join(f"{us / 1000:.0f} ms at {at:.0f} s" for at, us in took)
            print(f"{kind.__name__} of {name}: {shown}", flush=True)
    return rate, spent


def _are_begun(log: StepLog) -> bool:
    """Whether each engine has answered the canaries of its start."""
    answered = Counter(e.worker for _, e in log.happened if type(e) is v.CanaryReported)
    return all(answered[name] >= COUNT for name in log.fleet.workers)


def _share(spent: Spent, seconds: float, engines: int) -> float:
    """Percent of the engines' time."""
    took_us = sum(us for took in spent.values() for _, us in took)
    return took_us / 1e4 / (seconds * engines)


def _worst(spent: Spent) -> float:
    """The largest share of one engine's time from the begin of the window to the end of a check."""
    shares = [0.0]
    for took in spent.values():
        for number, (at, _) in enumerate(took, 1):
            shares.append(sum(us for _, us in took[:number]) / 1e4 / at)
    return max(shares)


async def _rate(log: StepLog, seconds: float) -> float:
    """Tokens per CPU-second of all engines, in one window."""
    pids = [worker.engine_pid for worker in log.fleet.workers.values()]
    used, made = sum(map(cpu_s, pids)), log.tokens.total()
    await asyncio.sleep(seconds)
    return (log.tokens.total() - made) / (sum(map(cpu_s, pids)) - used)


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(
        prog="relume-chaos bench cross-checks", description=DESCRIPTION
    )
    parser.add_argument("--flips", type=int, default=12, help="flipped bits; 0: none")
    parser.add_argument("--share", type=float, default=100.0, help="percent that is compared")
    parser.add_argument("--seeds", type=int, default=30, help="simulated fleets; 0: none")
    parser.add_argument("--seconds", type=float, default=600.0, help="of the cost; 0: not measured")
    parser.add_argument("--seed", type=int, default=0, help="of the bits")
    parser.add_argument("--model", default=".relume/models/tiny")
    args = parser.parse_args(argv)
    model, figures = str(Path(args.model).absolute()), dict[str, Any]()
    if args.flips:
        figures |= asyncio.run(flips(args.flips, args.share, args.seed, model))
    if args.seeds:
        figures |= default_share(args.seeds, args.seed)
    if args.seconds:
        figures |= asyncio.run(cost(args.seconds, model))
    return {"bench": "cross-checks", "met": _met(figures), "figures": figures}


def _met(figures: dict[str, Any]) -> bool:
    def value(name: str, missing: float) -> float:
        return float(figures[name]["value"]) if name in figures else missing

    return (
        value("found", 0) >= value("flips_that_change_tokens", 0)
        and value("other_quarantines", 0) == 0
        and value("broken", 0) == 0
        and value("found_by_default_share", 0) >= value("simulated_fleets", 0)
        and value("engine_time_worst", 0) <= COST_BUDGET_PERCENT
        and value("canaries_engine_time", 0) <= CANARY_BUDGET_PERCENT
    )
