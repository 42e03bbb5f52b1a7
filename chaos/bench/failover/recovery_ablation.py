"""Compares rules for where checkpoints lie and how lost requests continue.

Placement none, neighbour (DéjàVu), load-aware (LUMEN) and load-aware with two holders, each
with Eq. 6 and with recovery by estimated completion, in one fleet of three real workers. Every
rule gets the same requests: lengths of the Azure conversation trace (data/, prompts scaled, no
longer than the context), a fixed number at once, the next when one ends. After half of them have
been sent, the bench kills one worker's engine, a different one in each repetition.

The bench reports per rule: how long the moved streams stood still; tokens computed again and
restored; coverage and balance, every 50 ms until the kill. Coverage is the share of the running
requests with KV blocks of which a holder acknowledged some, as LUMEN's review counts it, and the
share of their tokens. Balance is the highest expected recovery load of a holder to the lowest.
Without checkpoints both recovery rules do the same, which shows the noise.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import Struct, field

from relume.chaos.bench.bench_figures import figure
from relume.chaos.bench.failover.failover_parts import (
    Log,
    TimedStream,
    configure,
    fleet_of,
    kill,
    timed,
    until_back,
    wide_model,
)
from relume.chaos.scenario import request_traces as traces
from relume.controlplane.local.local_fleet import LocalFleet
from relume.policies.checkpoints import decisions as checkpoints
from relume.policies.checkpoints import placement
from relume.policies.checkpoints.checkpoint_settings import config_of
from relume.policies.checkpoints.placement import Weights
from relume.policies.state import coverage
from relume.policies.state.overlay.view import View

DESCRIPTION = "holders and recovery rules compared after kills, on Azure conversation lengths"
TRACE = "azure-conv"
COVERAGE_GOAL = 0.9
BALANCE_GOAL = 1.5
WORKERS = 3
MOST_CONTEXT = 4096
SAMPLE_S = 0.05
SHARE_SENT = 0.5
"""Share of the requests that have been sent when the bench kills the engine."""
ARGS = (
    "--dtype", "float32", "--max-model-len", str(MOST_CONTEXT), "--block-size", "32",
    "--kv-cache-memory-bytes", "201326592", "--max-num-seqs", "64", "--enforce-eager",
)  # fmt: skip
PLACEMENTS: dict[str, dict[str, Any]] = {
    "none": {"placement": "none", "holders": 1},
    "neighbour": {"placement": "neighbour", "holders": 1},
    "load_aware": {"placement": "load_aware", "holders": 1},
    "load_aware_x2": {"placement": "load_aware", "holders": 2},
}
RULES = ("eq6", "least_total")


class Way(Struct, kw_only=True):
    """One placement with one rule, and its measurements."""

    gaps: list[float] = field(default_factory=list)
    requests: list[tuple[int, int]] = field(default_factory=list)
    tokens: list[tuple[int, int]] = field(default_factory=list)
    balance: list[float] = field(default_factory=list)
    loads: dict[str, int] = field(default_factory=dict)
    recomputed: int = 0
    restored: int = 0
    broken: int = 0

    @property
    def words(self) -> str:
        """Its measurements so far, as text."""
        return (
            f"{len(self.gaps)} moved, longest {1e3 * max(self.gaps, default=0):.0f} ms, "
            f"{self.recomputed} tokens again, {self.restored} restored"
        )

    def sample(self, log: Log) -> None:
        """Record coverage and balance as in the log now."""
        view = View("r.r0", log.fleet)
        config = config_of(view)
        weights = Weights(config.alpha, config.beta)
        sites = [s for s in checkpoints.sites(view) if s.alive]
        loads = {s.worker: placement.load(s, weights) for s in sites}
        now = coverage.progress(log.fleet)
        if not now.tokens or len(loads) < 2:
            return
        self.requests.append((now.begun, now.requests))
        self.tokens.append((now.covered, now.tokens))
        self.balance.append(max(loads.values()) / max(min(loads.values()), 1))
        for worker, load in loads.items():
            self.loads[worker] = self.loads.get(worker, 0) + load


def lengths(scale: float) -> list[tuple[int, int]]:
    """(prompt, output) tokens of the trace; prompts times `scale`, cut to the context."""
    found = []
    for row in traces.read(TRACE, Path()):
        output = min(row.output, MOST_CONTEXT // 2)
        prompt = max(int(row.prompt * scale), 16)
        found.append((min(prompt, MOST_CONTEXT - output - 1), output))
    return found


async def visit(
    fleet: LocalFleet, log: Log, way: Way, tag: str, sizes: list[tuple[int, int]], at_once: int,
    victim: str,
) -> None:  # fmt: skip
    """Run all requests of one way, `at_once` at a time, with the kill."""
    rng = random.Random(tag)
    waiting = [timed(f"{tag}-{n}", rng, *size) for n, size in enumerate(sizes)]
    everything, sent = list(waiting), []
    waiting.reverse()

    async def one_after_another(session: aiohttp.ClientSession) -> None:
        while waiting:
            one = waiting.pop()
            sent.append(one)
            await one.run(session, fleet.gateways[0])

    def held() -> list[TimedStream]:
        return [s for s in sent if s.at and not s.stream.ended and log.place(s) == victim]

    before = _token_counts(log)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        running = [asyncio.create_task(one_after_another(session)) for _ in range(at_once)]
        sampled = time.monotonic()
        while len(sent) < SHARE_SENT * len(everything) or not (
            len(held()) >= at_once // WORKERS and max(len(s.at) for s in held()) >= 32
        ):
            if len(sent) == len(everything):
                raise RuntimeError(f"{victim} never had enough streams; more --requests?")
            if time.monotonic() - sampled >= SAMPLE_S:
                sampled = time.monotonic()
                way.sample(log)
            await asyncio.sleep(0.01)
        hit = held()
        killed_at, incarnation = await kill(log, victim)
        await asyncio.gather(*running)
    await until_back(log, victim, incarnation)
    way.gaps += [s.gap_s(killed_at) for s in hit if len(log.route[s.name]) > 1]
    way.broken += sum(not s.stream.whole for s in everything)
    recomputed, restored = _token_counts(log)
    way.recomputed += recomputed - before[0]
    way.restored += restored - before[1]


def _token_counts(log: Log) -> tuple[int, int]:
    """Recomputed and restored tokens by the log."""
    recomputed = sum(w.recomputed_tokens for w in log.fleet.workers.values())
    return recomputed, log.fleet.restores.get("tokens", 0)


async def measure(args: argparse.Namespace, model: str) -> dict[str, Way]:
    """Every way in every repetition; every other repetition has the reverse order."""
    ways_of = {f"{place}_{rule}": (place, rule) for place in PLACEMENTS for rule in RULES}
    ways = {name: Way() for name in ways_of}
    sizes = lengths(args.scale)
    with tempfile.TemporaryDirectory() as folder:
        async with fleet_of(folder, model, WORKERS, ARGS) as (fleet, log):
            warm = await _warm(fleet, log)
            for repetition in range(args.repetitions):
                first = (repetition * args.requests) % max(len(sizes) - args.requests, 1)
                mine = sizes[first : first + args.requests]
                for name in list(ways) if repetition % 2 == 0 else list(reversed(ways)):
                    place, rule = ways_of[name]
                    await configure(fleet, log, {**PLACEMENTS[place], "recovery": rule})
                    way, victim = ways[name], warm[repetition % WORKERS]
                    await visit(
                        fleet, log, way, f"{name}{repetition}", mine, args.at_once, victim
                    )  # fmt: skip
                    print(f"{repetition + 1}/{args.repetitions} {name}: {way.words}", flush=True)
    return ways


async def _warm(fleet: LocalFleet, log: Log) -> list[str]:
    """Send some requests to every worker, so that step times are known; return the workers' names."""
    rng = random.Random(0)
    streams = [timed(f"warm-{n}", rng, 400, 24) for n in range(4 * WORKERS)]
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        await asyncio.gather(*(s.run(session, fleet.gateways[0]) for s in streams))
    if not all(s.stream.whole for s in streams):
        raise RuntimeError(next(s.stream.error for s in streams if not s.stream.whole))
    return sorted(log.fleet.workers)


def figures_of(ways: dict[str, Way]) -> dict[str, Any]:
    """Figures by way; goals apply to load-aware placement, the project's default."""
    figures: dict[str, Any] = {}
    for name, way in ways.items():
        gaps = sorted(way.gaps) or [0.0]
        figures[f"{name}_moved"] = figure(len(way.gaps), "streams")
        figures[f"{name}_gap_p50"] = figure(1e3 * statistics.median(gaps), "ms", digits=0)
        figures[f"{name}_gap_p99"] = figure(
            1e3 * gaps[min(len(gaps) - 1, int(0.99 * len(gaps)))], "ms", digits=0
        )
        figures[f"{name}_gap_longest"] = figure(1e3 * gaps[-1], "ms", digits=0)
        figures[f"{name}_recomputed"] = figure(way.recomputed, "tokens")
        figures[f"{name}_restored"] = figure(way.restored, "tokens")
        figures[f"{name}_broken"] = figure(way.broken, "streams", 0)
        if not way.tokens:
            continue
        default = name == "load_aware_least_total"
        begun, requests = (sum(x) for x in zip(*way.requests, strict=True))
        figures[f"{name}_coverage"] = figure(
            begun / requests, "ratio", COVERAGE_GOAL if default else None
        )
        covered, tokens = (sum(x) for x in zip(*way.tokens, strict=True))
        figures[f"{name}_token_coverage"] = figure(covered / tokens, "ratio")
        figures[f"{name}_balance"] = figure(
            statistics.median(way.balance), "ratio", BALANCE_GOAL if default else None, 2
        )
        over_time = max(way.loads.values()) / max(min(way.loads.values()), 1)
        figures[f"{name}_balance_over_time"] = figure(over_time, "ratio", digits=2)
    return figures


def bars(ways: dict[str, Way], width: int = 40) -> str:
    """The median gaps as a text chart, each followed by the longest gap."""
    rows = {n: (statistics.median(w.gaps), max(w.gaps)) for n, w in ways.items() if w.gaps}
    most = max((longest for _, longest in rows.values()), default=1.0)
    lines = ["gap of moved streams: # median, - longest"]
    for name, (middle, longest) in rows.items():
        full = round(width * middle / most)
        bar = "#" * full + "-" * (round(width * longest / most) - full)
        lines.append(f"{name:24} {bar:{width}} {1e3 * middle:5.0f} {1e3 * longest:5.0f} ms")
    return "\n".join(lines)


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(
        prog="relume-chaos bench recovery-ablation", description=DESCRIPTION
    )
    parser.add_argument("--repetitions", type=int, default=3, help="kills per way")
    parser.add_argument("--requests", type=int, default=72, help="requests per way and repetition")
    parser.add_argument("--at-once", type=int, default=24, help="number of streams at once")
    parser.add_argument(
        "--scale", type=float, default=1.0, help="factor for the prompt lengths of the trace"
    )
    parser.add_argument("--model", type=Path, default=Path(".relume/models/wide"))
    args = parser.parse_args(argv)
    ways = asyncio.run(measure(args, wide_model(args.model)))
    print(bars(ways))
    figures = figures_of(ways)
    coverage_met = figures["load_aware_least_total_coverage"]["value"] >= COVERAGE_GOAL
    balance_met = figures["load_aware_least_total_balance"]["value"] < BALANCE_GOAL
    broken = sum(way.broken for way in ways.values())
    return {
        "bench": "recovery-ablation",
        "met": coverage_met and balance_met and not broken,
        "figures": figures,
    }
