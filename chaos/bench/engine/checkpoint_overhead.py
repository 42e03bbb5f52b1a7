"""What checkpointing costs an engine: tokens per CPU-second with it and without.

Three ways to run the same 16 greedy streams, interleaved ABC CBA so that drift of the
machine cancels: `plain` on an engine without the connector; `idle` and `streaming` on one
engine that has it, whose requests name no holder, or a state daemon on the same host. CPU is the
engine process's own user + system time; the bench reports the daemon's separately. Ratios of
neighbours give a median and its bootstrap 95 % interval. `streaming` against `idle` compares one
process with itself; `streaming` against `plain` also contains the difference of two processes.
The ablation of buffering, layering and overlap (DéjàVu, Figure 7) was measured once:
`results/checkpoint-ablation.json`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from relume.chaos.bench.bench_figures import cpu_s, figure, interval, percentile
from relume.chaos.bench.engine.checkpoint_parts import (
    ENGINE_ARGS,
    Answer,
    Daemon,
    complete,
    connector_args,
    state_daemon,
)
from relume.chaos.bench.engine.engine_processes import Engine, engines
from relume.chaos.traffic import prompts

DESCRIPTION = "tokens per CPU-second and ITL of an engine with checkpointing against without"
GOAL = 0.98
SETTLE_S = 0.2
"""Pause after each burst, in which blocks on their way reach the daemon."""
CACHE = (*ENGINE_ARGS, "--max-model-len", "2048", "--kv-cache-memory-bytes", "67108864")


class Arm:
    """One way to run the streams, and its measurements."""

    def __init__(self, engine: Engine, daemon: Daemon, holder: bool) -> None:
        self.engine = engine
        self.daemon = daemon
        self.holder = holder
        self.rates: list[float] = []
        self.gaps_s: list[float] = []
        self.p99_s: list[float] = []
        self.daemon_shares: list[float] = []

    async def burst(self, session: aiohttp.ClientSession, streams: int, tokens: int) -> None:
        """All streams at once, to their end."""
        headers: dict[str, Any] = {"checkpoint": self.daemon.endpoint} if self.holder else {}
        engine_s, daemon_s = cpu_s(self.engine.pid), cpu_s(self.daemon.pid)
        answers: list[Answer] = await asyncio.gather(
            *(
                complete(session, self.engine, _name(), text, tokens, **headers)
                for text in prompts(streams)
            )
        )
        await asyncio.sleep(SETTLE_S)
        engine_s, daemon_s = cpu_s(self.engine.pid) - engine_s, cpu_s(self.daemon.pid) - daemon_s
        self.rates.append(streams * tokens / engine_s)
        self.daemon_shares.append(daemon_s / engine_s)
        gaps = [gap for answer in answers for gap in answer.gaps_s]
        self.gaps_s += gaps
        self.p99_s.append(percentile(gaps, 0.99))

    def forget(self) -> None:
        """Drop the measurements of the warm-up."""
        for measured in (self.rates, self.gaps_s, self.p99_s, self.daemon_shares):
            measured.clear()


_numbers = itertools.count()


def _name() -> str:
    return f"bench{next(_numbers)}"


async def rounds(arms: dict[str, Arm], count: int, streams: int, tokens: int) -> None:
    """Every arm once per round; every other round has the reverse order."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)  # uvicorn drops idle ones
    async with aiohttp.ClientSession(connector=connector) as session:
        for arm in [*arms.values()] * 2:
            await arm.burst(session, streams, tokens)
        for arm in arms.values():
            arm.forget()
        for index in range(count):
            order = list(arms) if index % 2 == 0 else list(reversed(arms))
            for name in order:
                await arms[name].burst(session, streams, tokens)
            shown = ", ".join(f"{name} {arm.rates[-1]:.0f}" for name, arm in arms.items())
            print(f"round {index + 1}/{count}: {shown} tokens per CPU-second", flush=True)


def compared(name: str, a: list[float], b: list[float], goal: float | None) -> dict[str, Any]:
    """Figures of the paired ratios a / b."""
    ratios = [x / y for x, y in zip(a, b, strict=True)]
    low, high = interval(ratios)
    return {
        name: figure(statistics.median(ratios), "ratio", goal),
        f"{name}_ci95_low": figure(low, "ratio"),
        f"{name}_ci95_high": figure(high, "ratio"),
    }


async def measure(model: str, count: int, streams: int, tokens: int) -> dict[str, Any]:
    """Figures of the three arms."""
    variants = {"plain": CACHE, "checkpointing": (*CACHE, *connector_args())}
    with tempfile.TemporaryDirectory() as folder:
        async with (
            state_daemon(folder) as daemon,
            engines(folder, model, variants) as running,
        ):
            arms = {
                "plain": Arm(running["plain"], daemon, False),
                "idle": Arm(running["checkpointing"], daemon, False),
                "streaming": Arm(running["checkpointing"], daemon, True),
            }
            before = daemon.stats()
            began = time.monotonic()
            await rounds(arms, count, streams, tokens)
            took_s = time.monotonic() - began
            after = daemon.stats()
    plain, idle, streaming = arms["plain"], arms["idle"], arms["streaming"]
    blocks = (after["taken"] - before["taken"]) / ((count + 2) * streams)
    return {
        **compared("streaming_to_idle", streaming.rates, idle.rates, GOAL),
        **compared("streaming_to_plain", streaming.rates, plain.rates, GOAL),
        **compared("idle_to_plain", idle.rates, plain.rates, None),
        "plain": figure(statistics.median(plain.rates), "tokens/CPU-s", digits=0),
        "itl_p99_plain": figure(1000 * percentile(plain.gaps_s, 0.99), "ms", digits=2),
        "itl_p99_idle": figure(1000 * percentile(idle.gaps_s, 0.99), "ms", digits=2),
        "itl_p99_streaming": figure(1000 * percentile(streaming.gaps_s, 0.99), "ms", digits=2),
        **compared("itl_p99_streaming_to_idle", streaming.p99_s, idle.p99_s, None),
        "daemon_to_engine_cpu": figure(statistics.median(streaming.daemon_shares), "ratio"),
        "blocks_held_a_stream": figure(blocks, "blocks", digits=2),
        "took": figure(took_s, "s", digits=0),
    }


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(
        prog="relume-chaos bench checkpoint-overhead", description=DESCRIPTION
    )
    parser.add_argument("--rounds", type=int, default=24, help="of the three ways to run")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--model", default=".relume/models/tiny")
    args = parser.parse_args(argv)
    model = str(Path(args.model).absolute())
    figures = asyncio.run(measure(model, args.rounds, args.streams, args.tokens))
    met = all(f["value"] >= f["goal"] for f in figures.values() if f["goal"] is not None)
    return {"bench": "checkpoint-overhead", "met": met, "figures": figures}
