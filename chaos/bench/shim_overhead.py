"""What event reporting costs the engine: tokens per CPU-second with it and without.

Two engines from one zygote: one with our scheduler subclass reporting to a socket that is
read, as an agent does; one with vLLM's own scheduler and no agent. The same 16 greedy
streams run on one at a time, interleaved ABBA so that drift of the machine cancels; CPU is
the engine process's own user + system time. The ratio of each pair gives a median and its
bootstrap 95 % interval.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from relume.chaos.bench.figures import figure
from relume.chaos.traffic import prompts
from relume.controlplane.local_fleet import ENGINE_ENV, FleetOptions
from relume.controlplane.processes import Child, free_port

DESCRIPTION = "tokens per CPU-second of an engine with event reporting against without"
GOAL = 0.98
STOCK_SCHEDULER = "vllm.v1.core.sched.scheduler.Scheduler"


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


async def fork(zygote: str, argv: list[str], env: dict[str, str], log: str) -> int:
    """Ask the zygote for an engine; its pid."""
    reader, writer = await asyncio.open_unix_connection(zygote)
    line = json.dumps({"cmd": "fork", "env": env, "argv": argv, "log": log}) + "\n"
    writer.write(line.encode())
    await writer.drain()
    answer = json.loads(await asyncio.wait_for(reader.readline(), 30))
    writer.close()
    if "pid" not in answer:
        raise RuntimeError(f"zygote refused: {answer}")
    return answer["pid"]


async def until_healthy(port: int, timeout_s: float = 90) -> None:
    """Wait for the engine's HTTP server."""
    deadline = time.monotonic() + timeout_s
    async with aiohttp.ClientSession() as session:
        while time.monotonic() < deadline:
            try:
                async with session.get(f"http://127.0.0.1:{port}/health") as answer:
                    if answer.status == 200:
                        return
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    raise TimeoutError(f"engine on port {port} did not come up")


def cpu_s(pid: int) -> float:
    """User + system time of a process, all threads, in seconds, to the nanosecond.

    Linux names the CPU clock of process `pid` by the id `~pid << 3 | 2`.
    """
    return time.clock_gettime(~pid << 3 | 2)


async def burst(session: aiohttp.ClientSession, port: int, streams: int, tokens: int) -> int:
    """`streams` streaming completions at once; tokens produced."""

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


@asynccontextmanager
async def two_engines(model: str, folder: str) -> Any:
    """(pid, port) of the reporting and of the plain engine, and the sink."""
    async with AsyncExitStack() as stack:
        zygote = f"{folder}/zygote.sock"
        child = Child.start(
            "zygote",
            [sys.executable, "-m", "relume.engine_shim.zygote", "--socket", zygote],
            Path(folder) / "zygote.log",
            ENGINE_ENV,
        )
        stack.push_async_callback(child.stop)
        sink = await stack.enter_async_context(Sink(f"{folder}/agent.sock"))
        deadline = time.monotonic() + 90
        while not os.path.exists(zygote):
            if time.monotonic() > deadline or not child.alive:
                raise RuntimeError(f"zygote did not come up:\n{child.tail()}")
            await asyncio.sleep(0.1)
        engines = []
        for name in ("reporting", "plain"):
            port = free_port()
            argv = ["--model", model, "--served-model-name", "tiny", "--port", str(port)]
            argv += FleetOptions().engine_args
            env = dict(ENGINE_ENV, RELUME_WORKER=name, RELUME_INCARNATION="1")
            if name == "reporting":
                env["RELUME_AGENT_SOCKET"] = sink.path
            else:
                argv += ["--scheduler-cls", STOCK_SCHEDULER]
            pid = await fork(zygote, argv, env, f"{folder}/{name}.log")
            stack.callback(_kill, pid)
            engines.append((pid, port))
        for _, port in engines:
            await until_healthy(port)
        yield engines, sink


def _kill(pid: int) -> None:
    try:
        os.kill(pid, 9)
    except ProcessLookupError:
        pass


def interval(ratios: list[float], rounds: int = 2000) -> tuple[float, float]:
    """Bootstrap 95 % interval of the median."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(ratios, k=len(ratios))) for _ in range(rounds))
    return medians[int(0.025 * rounds)], medians[int(0.975 * rounds)]


async def measure(model: str, pairs: int, streams: int, tokens: int) -> dict[str, Any]:
    """The bench; see the module's text."""
    with tempfile.TemporaryDirectory() as folder:
        async with two_engines(model, folder) as (engines, sink):
            connector = aiohttp.TCPConnector(limit=0)
            async with aiohttp.ClientSession(connector=connector) as session:
                for _, port in engines:
                    await burst(session, port, streams, tokens)
                    await burst(session, port, streams, tokens)
                rates: tuple[list[float], list[float]] = ([], [])
                for index in range(pairs):
                    order = (0, 1) if index % 2 == 0 else (1, 0)
                    for which in order:
                        pid, port = engines[which]
                        before = cpu_s(pid)
                        made = await burst(session, port, streams, tokens)
                        rates[which].append(made / (cpu_s(pid) - before))
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
    parser = argparse.ArgumentParser(prog="relume.chaos.bench shim-overhead", description=DESCRIPTION)
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--model", default=".relume/models/tiny")
    args = parser.parse_args(argv)
    model = str(Path(args.model).absolute())
    return asyncio.run(measure(model, args.pairs, args.streams, args.tokens))
