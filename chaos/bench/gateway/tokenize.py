"""What counting prompts by the model's tokenizer costs a gateway: `relume-chaos bench tokenize`.

The bench measures the CPU of the tokenising process per request at 100, 1,000, 10,000 and 100,000
tokens: rendering, tokenising and hashing of blocks together. It also measures the cost of a call
in the gateway's own process, memory, and the delay of the gateway's event loop and of short
prompts while the process counts prompts of 100,000 tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from pathlib import Path
from typing import Any

import uvloop

from relume.chaos.bench.bench_figures import cpu_s, figure
from relume.controlplane.gateway.openai.token_counts import Tokens

BLOCK = 16
WORDS = (
    "the log holds every decision and a fleet of workers answers through failures of any process"
).split()
LENGTHS = (100, 1_000, 10_000, 100_000)


def parser() -> argparse.ArgumentParser:
    """Arguments of the bench."""
    made = argparse.ArgumentParser(prog="relume-chaos bench tokenize", description=__doc__)
    made.add_argument("--tokenizer", default=".relume/models/tiny", help="folder or name")
    made.add_argument("--quick", action="store_true", help="fewer repetitions")
    return made


def _pss_mb(pid: int) -> float:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1024


class Asker:
    """Makes prompts of a given length and has the tokenising process count them."""

    def __init__(self, tokens: Tokens) -> None:
        self.tokens = tokens
        self.draw = random.Random(1)
        self.words_a_token = 1.0

    def body(self, count: int) -> bytes:
        words = (self.draw.choice(WORDS) for _ in range(int(count * self.words_a_token)))
        return json.dumps({"messages": [{"role": "user", "content": " ".join(words)}]}).encode()

    async def count(self, body: bytes) -> int:
        told = await self.tokens.count("m", True, BLOCK, body)
        if told is None:
            raise RuntimeError("not counted")
        return told.tokens

    async def calibrate(self) -> None:
        self.words_a_token = 1_000 / await self.count(self.body(1_000))


async def _costs(asker: Asker, quick: bool) -> dict[str, Any]:
    """CPU per request, of both processes, by length."""
    found = {}
    pid = asker.tokens.pid
    for length in LENGTHS:
        many = max(3, (20_000 if quick else 100_000) // length)
        bodies = [asker.body(length) for _ in range(min(many, 2_000))]
        theirs, ours, begun = cpu_s(pid), time.process_time(), time.perf_counter()
        seen = [await asker.count(body) for body in bodies]
        took = time.perf_counter() - begun
        each = 1e6 / len(bodies)
        found[f"cpu_us_at_{length}"] = (cpu_s(pid) - theirs) * each
        found[f"gateway_cpu_us_at_{length}"] = (time.process_time() - ours) * each
        found[f"wall_us_at_{length}"] = took * each
        found[f"tokens_at_{length}"] = statistics.mean(seen)
    return found


async def _held_up(asker: Asker, seconds: float) -> dict[str, Any]:
    """The loop's gaps and short prompts' waits under a constant load of long prompts."""
    long, short = asker.body(100_000), asker.body(100)
    gaps, waits = [], []
    stop = asyncio.Event()

    async def keep_busy() -> None:
        while not stop.is_set():
            await asker.count(long)

    async def ask() -> None:
        while not stop.is_set():
            begun = time.perf_counter()
            await asker.count(short)
            waits.append(time.perf_counter() - begun)
            await asyncio.sleep(0.005)

    async def tick() -> None:
        while not stop.is_set():
            begun = time.perf_counter()
            await asyncio.sleep(0.001)
            gaps.append(time.perf_counter() - begun - 0.001)

    tasks = [asyncio.create_task(one()) for one in (keep_busy, ask, tick)]
    await asyncio.sleep(seconds)
    stop.set()
    await asyncio.gather(*tasks)
    return {
        "loop_gap_p99_ms": 1e3 * statistics.quantiles(gaps, n=100)[98],
        "loop_gap_max_ms": 1e3 * max(gaps),
        "short_beside_long_p50_ms": 1e3 * statistics.median(waits),
        "short_beside_long_p99_ms": 1e3 * statistics.quantiles(waits, n=100)[98],
    }


async def _run(args: argparse.Namespace) -> dict[str, Any]:
    async with Tokens(args.tokenizer, 30.0, time.monotonic) as tokens:
        await tokens.ready()
        found = {"memory_at_rest_mb": _pss_mb(tokens.pid)}
        asker = Asker(tokens)
        await asker.calibrate()
        found |= await _costs(asker, args.quick)
        found |= await _held_up(asker, 2.0 if args.quick else 8.0)
        found["memory_after_mb"] = _pss_mb(tokens.pid)
    return found


_UNITS = {"us": "us", "ms": "ms", "mb": "MB"}


def run(argv: list[str]) -> dict[str, Any]:
    """Run the bench; see `--help`."""
    found = uvloop.run(_run(parser().parse_args(argv)))
    figures = {}
    for name, value in found.items():
        unit = next((u for part, u in _UNITS.items() if part in name.split("_")), "tokens")
        figures[name] = figure(value, unit, digits=2)
    return {"bench": "tokenize", "met": True, "figures": figures}
