"""What event reporting costs the engine: tokens per CPU-second with it and without.

Two engines from one zygote: one with our scheduler subclass, which reports to a socket that a
reader empties as an agent does; one with vLLM's own scheduler and no agent. The same 16 greedy
streams run on one at a time, interleaved ABBA so that drift of the machine cancels; CPU is
the engine process's own user + system time. The ratio of each pair gives a median and its
bootstrap 95 % interval.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
from pathlib import Path
from typing import Any

import aiohttp

from relume.chaos.bench.bench_figures import cpu_s, figure, interval
from relume.chaos.bench.engine.engine_processes import engines
from relume.chaos.traffic import prompts
from relume.controlplane.local.local_fleet import FleetOptions

DESCRIPTION = "tokens per CPU-second of an engine with event reporting against without"
GOAL = 0.98
VARIANTS = {
    "reporting": FleetOptions().engine_args,
    "plain": (
        *FleetOptions().engine_args, "--scheduler-cls", "vllm.v1.core.sched.scheduler.Scheduler",
    ),
}  # fmt: skip


class Sink:
    """The agent's end of the report socket: reads and counts, nothing else."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.received_bytes = 0
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Sink:
        self._server = await asyncio.start_unix_server(self._read, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _read(self, reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            self.received_bytes += len(data)


async def burst(session: aiohttp.ClientSession, port: int, streams: int, tokens: int) -> int:
    """Run `streams` streaming completions at once; return the number of tokens."""

    async def one(text: str) -> None:
        body = {
            "model": "tiny",
            "prompt": text,
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
        async with session.post(f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for _ in answer.content.iter_any():
                pass

    await asyncio.gather(*(one(text) for text in prompts(streams)))
    return streams * tokens


async def measure(model: str, pairs: int, streams: int, tokens: int) -> dict[str, Any]:
    """The bench; see the module's text."""
    with tempfile.TemporaryDirectory() as folder:
        async with (
            Sink(f"{folder}/agent.sock") as sink,
            engines(
                folder, model, VARIANTS, {"reporting": {"RELUME_AGENT_SOCKET": sink.path}}
            ) as running,
        ):
            both = running["reporting"], running["plain"]
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:
                for engine in both:
                    await burst(session, engine.port, streams, tokens)
                    await burst(session, engine.port, streams, tokens)
                rates: tuple[list[float], list[float]] = ([], [])
                for index in range(pairs):
                    order = (0, 1) if index % 2 == 0 else (1, 0)
                    for which in order:
                        engine = both[which]
                        before = cpu_s(engine.pid)
                        made = await burst(session, engine.port, streams, tokens)
                        rates[which].append(made / (cpu_s(engine.pid) - before))
                    print(
                        f"pair {index + 1}/{pairs}: reporting {rates[0][-1]:.0f}, "
                        f"plain {rates[1][-1]:.0f} tokens per CPU-second",
                        flush=True,
                    )
                reported = sink.received_bytes
    ratios = [a / b for a, b in zip(*rates, strict=True)]
    low, high = interval(ratios)
    median = statistics.median(ratios)
    total = (pairs + 2) * streams * tokens
    return {
        "bench": "shim-overhead",
        "met": median >= GOAL,
        "figures": {
            "reporting_to_plain": figure(median, "ratio", GOAL),
            "ci95_low": figure(low, "ratio"),
            "ci95_high": figure(high, "ratio"),
            "plain": figure(statistics.median(rates[1]), "tokens/CPU-s", digits=0),
            "report_bytes_per_token": figure(reported / total, "bytes", digits=2),
        },
    }


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(
        prog="relume-chaos bench shim-overhead", description=DESCRIPTION
    )
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--model", default=".relume/models/tiny")
    args = parser.parse_args(argv)
    model = str(Path(args.model).absolute())
    return asyncio.run(measure(model, args.pairs, args.streams, args.tokens))
