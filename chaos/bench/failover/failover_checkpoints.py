"""The gap after a kill with checkpoints over the gap without, a part of `failover-gap`.

Two workers with the `wide` model serve eight streams of long random prompts. When all stream, the
bench kills the engine with most of them. Rounds with checkpoints and without
(`checkpoints.placement` none) alternate ABBA in one fleet. The bench compares the longest gap of
all eight streams after the kill.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import tempfile
from typing import Any

import aiohttp
from msgspec import Struct, field

from relume.chaos.bench.bench_figures import figure, interval
from relume.chaos.bench.failover.failover_parts import (
    Log,
    TimedStream,
    configure,
    fleet_of,
    kill,
    log_lines,
    timed,
    until,
    until_back,
)
from relume.controlplane.local.local_fleet import LocalFleet
from relume.events import vocabulary as v

GOAL = 1 / 3
STREAMS = 8
TOKENS = 256
DELIVERED = 80
"""Minimum number of tokens that each client has when the bench kills the engine."""
ARGS = (
    "--dtype", "float32", "--max-model-len", "8192", "--block-size", "32",
    "--kv-cache-memory-bytes", "402653184", "--max-num-seqs", "64", "--enforce-eager",
)  # fmt: skip
ARMS = {"with": "load_aware", "without": "none"}


class Arm(Struct, kw_only=True):
    """Figures of the rounds of one kind, in seconds."""

    longest: list[float] = field(default_factory=list)
    moved: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)
    restored: int = 0
    broken: int = 0

    def part(self, name: str, seconds: float) -> None:
        self.parts.setdefault(name, []).append(seconds)


async def one_round(fleet: LocalFleet, log: Log, arm: Arm, tag: str, prompt_tokens: int) -> str:
    """Run the streams and kill; return the round as text."""
    rng = random.Random(tag)
    streams = [timed(f"{tag}-{n}", rng, prompt_tokens, TOKENS) for n in range(STREAMS)]
    path = fleet.children["r0"].log_path
    lines, seen = len(log_lines(path, "failover")), len(log.happened)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        running = [asyncio.create_task(s.run(session, fleet.gateways[0])) for s in streams]
        await until(
            lambda: all(len(s.at) >= DELIVERED or s.stream.ended for s in streams), "streams run"
        )
        held: dict[str, list[TimedStream]] = {}
        for stream in streams:
            if not stream.stream.ended:
                held.setdefault(log.place(stream), []).append(stream)
        victim = max(sorted(held), key=lambda name: len(held[name]))
        killed_at, incarnation = await kill(log, victim)
        await asyncio.gather(*running)
    await until_back(log, victim, incarnation)
    moved = [s for s in held[victim] if len(set(log.route[s.name])) > 1]
    arm.broken += sum(not s.stream.whole for s in streams)
    if moved:
        arm.longest.append(max(s.gap_s(killed_at) for s in streams))
        arm.moved += [s.gap_s(killed_at) for s in moved]
    for found in log_lines(path, "failover")[lines:]:
        arm.part("noticing", found["noticed"] - killed_at)
        arm.part("sending", found["sent"] - found["noticed"])
        arm.part("resuming", found["resumed"] - found["sent"])
    restores = [e for _, e in log.happened[seen:] if isinstance(e, v.RestoreDone)]
    arm.restored += len(restores)
    for event in restores:
        arm.part("loading", event.duration_us / 1e6)
    gaps = ", ".join(f"{1e3 * s.gap_s(killed_at):.0f}" for s in moved)
    shown = f"longest {1e3 * arm.longest[-1]:.0f} ms" if moved else "hit none"
    return f"{shown}; {len(moved)} moved ({gaps}), {len(restores)} restored"


async def measure(model: str, pairs: int, prompt_tokens: int) -> dict[str, Any]:
    """Figures of `pairs` pairs of rounds, after one warm-up round of each kind."""
    arms = {name: Arm() for name in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        async with fleet_of(folder, model, 2, ARGS) as (fleet, log):
            for index in range(pairs + 1):
                order = list(ARMS) if index % 2 == 0 else list(reversed(ARMS))
                for name in order:
                    await configure(fleet, log, {"placement": ARMS[name]})
                    arm = arms[name] if index else Arm()
                    summary = await one_round(fleet, log, arm, f"{name}{index}", prompt_tokens)
                    print(f"pair {index}/{pairs}, {name} checkpoints: {summary}", flush=True)
    return _figures(arms["with"], arms["without"])


def _figures(on: Arm, off: Arm) -> dict[str, Any]:
    ratios = [a / b for a, b in zip(on.longest, off.longest, strict=False)]
    low, high = interval(ratios)
    figures: dict[str, Any] = {
        "checkpoint_gap_ratio": figure(statistics.median(ratios), "ratio", round(GOAL, 3)),
        "checkpoint_gap_ratio_ci95_low": figure(low, "ratio"),
        "checkpoint_gap_ratio_ci95_high": figure(high, "ratio"),
        "checkpoint_broken": figure(on.broken + off.broken, "streams", 0),
        "checkpoint_restores": figure(on.restored, "restores"),
    }
    for name, arm in (("with", on), ("without", off)):
        figures[f"longest_gap_{name}"] = _ms(arm.longest)
        figures[f"longest_gap_{name}_worst"] = figure(1e3 * max(arm.longest), "ms", digits=0)
        figures[f"moved_gap_{name}_p50"] = _ms(arm.moved)
        for part, values in arm.parts.items():
            figures[f"{part}_{name}_p50"] = _ms(values)
    return figures


def _ms(seconds: list[float]) -> dict[str, Any]:
    return figure(1e3 * statistics.median(seconds), "ms", digits=1)
