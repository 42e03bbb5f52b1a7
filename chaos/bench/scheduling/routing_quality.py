"""Time to first token of each routing policy, on the same arrivals and prompts, real workers.

Arrivals are those of the Azure conversation trace, scaled to `--rate`. Prompts have the lengths and
common prefixes of Mooncake's conversations, scaled so that one of its blocks of 512 tokens becomes
`--block` tokens, which is one KV block. Answers are scaled alike. One fleet
serves all: before each run the bench changes the policy through the admin API, and prompts of a
run share nothing with those of another. Runs of all policies take turns, in another order each
round, so that other load on the machine affects all of them.

The gateway has the model's tokenizer, so it knows prefix hits. A policy counts as better than
another if 90 % of the draws among rounds agree.

The clock of a request starts when it was due, not when the client sent it.
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
from msgspec import Struct

from relume.chaos.bench.bench_figures import figure, percentile
from relume.chaos.bench.failover.failover_parts import TimedStream, wide_model
from relume.chaos.memory_folder import memory_folder
from relume.chaos.scenario import request_traces as traces
from relume.chaos.traffic import Stream
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.policies.routing.routing_settings import POLICY

DESCRIPTION = "time to first token of each routing policy on the same arrivals, real workers"
POLICIES = ("predicted_ttft", "least_load", "jsq", "round_robin")
OURS, BEATEN = "predicted_ttft", ("jsq", "round_robin")
DRAWS = 2000
LONGEST_BLOCKS = 56
"""Maximum length of a prompt; longer ones are cut."""
VOCABULARY = range(300, 3000)
PATIENCE_S = 120.0
CALM_S = 1.0


class Due(Struct, frozen=True):
    """One request: seconds after the beginning, the blocks of its prompt, tokens after the last
    whole block, tokens to generate."""

    at_s: float
    blocks: tuple[int, ...]
    rest: int
    output: int


def planned(seconds: float, rate: float, block: int, first: int) -> list[Due]:
    """The requests: arrivals of the one trace, prompts of the other from its request number
    `first` on."""
    arrivals = [row.at_ns for row in traces.read("azure-conv", Path())]
    prompts = traces.read("mooncake-conversation", Path())
    count = min(int(seconds * rate), len(arrivals) - 1)
    scale = seconds / max(arrivals[count] or 1, 1)
    shrunk = traces.PREFIX_BLOCK_TOKENS // block
    found = []
    for number in range(count):
        row = prompts[(first + number) % len(prompts)]
        tokens = min(row.prompt // shrunk, LONGEST_BLOCKS * block)
        whole, rest = divmod(max(tokens, 1), block)
        output = max(row.output // shrunk, 1)
        found.append(Due((arrivals[number] or 0) * scale, row.prefix[:whole], rest, output))
    return found


def prompt_of(due: Due, block: int, run: str) -> list[int]:
    """Token ids; equal blocks get equal tokens within a run, but not across runs."""
    tokens: list[int] = []
    for name in due.blocks:
        tokens += random.Random(f"{run}:{name}").choices(VOCABULARY, k=block)
    own = random.Random(f"{run}:{due.at_s}")
    return tokens + own.choices(VOCABULARY, k=due.rest)


def session_of(due: Due, run: str) -> dict[str, str]:
    """Session header: the first block that is not common to all names the conversation."""
    return {"x-session-id": f"{run}:{due.blocks[1]}"} if len(due.blocks) > 1 else {}


async def one_run(
    fleet: LocalFleet, policy: str, run: str, due: list[Due], block: int
) -> list[float]:
    """Milliseconds to the first token of each request. Raises if one gets no answer."""
    change = {"key": POLICY, "value": policy}
    answer = await fleet.admin("config", "PUT", body=change)
    if answer.get("state") != "decided":
        raise RuntimeError(f"the policy was not changed: {answer}")
    sent = [
        TimedStream(
            stream=Stream(request=f"{run}-{n}", prompt=""), prompt=prompt_of(one, block, run), output=one.output,
            headers=session_of(one, run),
        )
        for n, one in enumerate(due)
    ]  # fmt: skip
    connector = aiohttp.TCPConnector(limit=0)
    took: list[float] = []
    async with aiohttp.ClientSession(connector=connector, trust_env=False) as session:
        began = time.monotonic() + 0.2

        async def ask(one: TimedStream, at_s: float) -> None:
            await asyncio.sleep(began + at_s - time.monotonic())
            await one.run(session, fleet.gateways[0])
            if not one.stream.done or not one.at:
                raise RuntimeError(f"{one.name}: {one.stream.status} {one.stream.error}")
            took.append((one.at[0] - began - at_s) * 1000)

        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(ask(o, d.at_s) for o, d in zip(sent, due, strict=True)))
    await asyncio.sleep(CALM_S)
    return took


async def measure(args: argparse.Namespace, model: str) -> dict[str, list[list[float]]]:
    """TTFT of all requests by policy and round."""
    took: dict[str, list[list[float]]] = {policy: [] for policy in args.policies}
    engine_args = (
        "--dtype", "float32", "--max-model-len", "2048", "--block-size", str(args.block),
        "--kv-cache-memory-bytes", str(args.kv_mb << 20), "--max-num-seqs", "64",
        "--max-num-batched-tokens", "512", "--enforce-eager",
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="relume-bench-", dir=memory_folder()) as folder:
        options = FleetOptions(
            workers=args.workers, replicas=args.replicas, state_dir=folder, port=0,
            admin_port=0, model=model, tokenizer=True, engine_args=engine_args,
        )  # fmt: skip
        async with LocalFleet(options, lambda text: None) as fleet:
            warm = planned(args.seconds / 2, args.rate, args.block, args.first)
            await one_run(fleet, "round_robin", "warm", warm, args.block)
            for number in range(args.rounds):
                first = args.first + number * 100
                due = planned(args.seconds, args.rate, args.block, first)
                order = [*args.policies[number % len(args.policies) :], *args.policies]
                for policy in order[: len(args.policies)]:
                    found = await one_run(fleet, policy, f"{number}-{policy}", due, args.block)
                    print(
                        f"round {number + 1}: {policy:16} {len(found)} requests, mean "
                        f"{statistics.mean(found):.0f} ms, p99 {percentile(found, 0.99):.0f} ms",
                        flush=True,
                    )
                    took[policy].append(found)
    return took


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(
        prog="relume-chaos bench routing-quality", description=DESCRIPTION
    )
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--policies", nargs="+", default=list(POLICIES))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=15.0, help="seconds of traffic per run")
    parser.add_argument("--rate", type=float, default=8.0, help="mean requests per second")
    parser.add_argument("--block", type=int, default=32, help="tokens for one block of the trace")
    parser.add_argument(
        "--first", type=int, default=0, help="number of the first request in the trace"
    )
    parser.add_argument("--kv-mb", type=int, default=64, help="KV cache of each worker")
    parser.add_argument("--model", default="", help="default: the wide one")
    args = parser.parse_args(argv)
    model = args.model and str(Path(args.model).absolute())
    took = asyncio.run(measure(args, model or wide_model(Path(".relume/models/wide"))))
    figures = {}
    for policy, rounds in took.items():
        found = [ms for one in rounds for ms in one]
        for name, value in (
            ("mean", statistics.mean(found)),
            ("p50", statistics.median(found)),
            ("p99", percentile(found, 0.99)),
        ):
            figures[f"{policy}_ttft_{name}"] = figure(value, "ms", digits=1)
    figures["requests"] = figure(sum(map(len, next(iter(took.values())))), "requests")
    met = True
    for policy in took:
        if policy != OURS and OURS in took:
            low, high = gained(took[OURS], took[policy])
            figures[f"p99_gain_over_{policy}_low"] = figure(low, "ratio", digits=3)
            figures[f"p99_gain_over_{policy}_high"] = figure(high, "ratio", digits=3)
            met = met and (policy not in BEATEN or low > 0)
    return {"bench": "routing-quality", "met": met, "figures": figures}


def gained(ours: list[list[float]], others: list[list[float]]) -> tuple[float, float]:
    """Share of the other policy's p99 that ours saves: the middle 90 % over resampled rounds,
    which draw both policies' runs of a round together."""
    rng, count = random.Random(1), len(ours)
    found = []
    for _ in range(DRAWS):
        drawn = rng.choices(range(count), k=count)
        mine, theirs = (
            percentile([ms for at in drawn for ms in runs[at]], 0.99) for runs in (ours, others)
        )
        found.append(1 - mine / theirs)
    return percentile(found, 0.05), percentile(found, 0.95)
