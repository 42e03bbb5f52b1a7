"""The gap that a client sees when its engine is killed, and the parts of that gap.

Three workers have eight streams each; the bench kills one engine with SIGKILL in the middle,
`--kills` times. The gateway logs when it noticed the loss, chose the next worker, sent the request
to it and received the first new token (on the clock that also timed the kill). Clients record
their longest gap. Per kill, the bench reports when the agent knew of the death, and when the
gateway received the notice. It also reports when the gateway gave up the first and the last stream,
and the cause (`engine_dead`: the notice; else the connection).
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from relume.chaos.bench.bench_figures import figure, percentile
from relume.chaos.bench.failover import failover_checkpoints
from relume.chaos.bench.failover.failover_parts import kill, log_lines, until_back, wide_model
from relume.chaos.kill_demo import Watch, find_victim, run_all
from relume.chaos.traffic import Stream, prompts
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog

DESCRIPTION = "the client's longest gap after a kill -9, split into its parts"
PARTS = ("noticing", "deciding", "resubmitting", "recomputing")
HEARING = ("agent_knows", "gateway_hears")


async def one_kill(
    fleet: LocalFleet, watch: Watch, tag: str, streams: int, tokens: int
) -> tuple[float, str, list[Stream]]:
    """Run the streams and kill one engine; return the time (monotonic), its worker, its streams."""
    hit: dict[str, Stream] = {}
    running = asyncio.create_task(run_all(fleet.gateways[0], tag, prompts(streams), tokens, hit))
    victim = ""
    while not victim and not running.done():
        await asyncio.sleep(0.005)
        victim = find_victim(watch, hit, tokens)
    if not victim:
        await running
        raise RuntimeError("no worker was ripe for the kill: the machine is too slow or too busy")
    held = [s for s in hit.values() if watch.route[s.request][-1] == victim and not s.done]
    killed_at, incarnation = await kill(watch, victim)
    await running
    await until_back(watch, victim, incarnation)
    return killed_at, victim, held


def noticed(
    fleet: LocalFleet, victim: str, killed_at: float, found: list[dict[str, Any]]
) -> tuple[dict[str, float], str]:
    """When agent and gateway knew of a death, in seconds after it, and the whole as text."""
    known = log_lines(fleet.children[victim].log_path, "engine died")[-1]["told_at"]
    heard = [x["at"] for x in log_lines(fleet.children["r0"].log_path, "engine_told_dead")]
    times = {"agent_knows": known - killed_at}
    if heard and heard[-1] > killed_at:
        times["gateway_hears"] = heard[-1] - killed_at
    given_up = sorted(x["noticed"] - killed_at for x in found)
    words = [f"{name.replace('_', ' ')} {at * 1e3:.1f}" for name, at in times.items()]
    words.append(f"streams given up {given_up[0] * 1e3:.1f} to {given_up[-1] * 1e3:.1f} ms")
    by = Counter(x["kind"] for x in found)
    return times, ", ".join([*words, *(f"{n} by {kind}" for kind, n in by.items())])


async def measure(kills: int, streams: int, tokens: int, model: str) -> dict[str, Any]:
    """The bench; see the module's text."""
    parts: dict[str, list[float]] = {name: [] for name in PARTS + HEARING}
    gaps: list[float] = []
    calm_gaps: list[float] = []
    broken = 0
    with tempfile.TemporaryDirectory() as folder:
        options = FleetOptions(state_dir=folder, port=0, admin_port=0, model=model)
        async with LocalFleet(options) as fleet:
            async with EtcdLog(EtcdConfig(endpoints=(fleet.etcd_endpoint,))) as etcd:
                watch = Watch(etcd.reader())
                following = asyncio.create_task(watch.run())
                calm: dict[str, Stream] = {}
                await run_all(fleet.gateways[0], "warm", prompts(streams), 16, {})
                await run_all(fleet.gateways[0], "calm", prompts(streams), tokens, calm)
                calm_gaps = [s.longest_gap_s for s in calm.values()]
                log_path = fleet.children["r0"].log_path
                for number in range(kills):
                    seen = len(log_lines(log_path, "failover"))
                    killed_at, victim, held = await one_kill(
                        fleet, watch, f"k{number}", streams, tokens
                    )
                    broken += sum(not s.whole for s in held)
                    gaps += [s.longest_gap_s for s in held]
                    found = log_lines(log_path, "failover")[seen:]
                    if not found:
                        print(f"kill {number + 1}/{kills}: hit no stream", flush=True)
                        continue
                    for move in found:
                        parts["noticing"].append(move["noticed"] - killed_at)
                        parts["deciding"].append(move["decided"] - move["noticed"])
                        parts["resubmitting"].append(move["sent"] - move["decided"])
                        parts["recomputing"].append(move["resumed"] - move["sent"])
                    times, words = noticed(fleet, victim, killed_at, found)
                    for name, at in times.items():
                        parts[name].append(at)
                    print(
                        f"kill {number + 1}/{kills}: {len(held)} streams, "
                        f"longest gap {max(s.longest_gap_s for s in held) * 1e3:.0f} ms; {words}",
                        flush=True,
                    )
                following.cancel()
    return _result(parts, gaps, calm_gaps, broken)


def _result(
    parts: dict[str, list[float]], gaps: list[float], calm_gaps: list[float], broken: int
) -> dict[str, Any]:
    figures: dict[str, Any] = {"broken": figure(broken, "streams", 0)}
    for name in (n for n in HEARING + PARTS if parts[n]):
        for label, share in (("p50", 0.5), ("p99", 0.99)):
            value = percentile(parts[name], share) * 1e3
            figures[f"{name}_{label}"] = figure(value, "ms", digits=2)
    figures["noticing_p99"]["goal"] = 50
    figures["deciding_p99"]["goal"] = 2
    figures["gap_p99"] = _ms(percentile(gaps, 0.99))
    figures["gap_p50"] = _ms(percentile(gaps, 0.5))
    figures["undisturbed_gap_p99"] = _ms(percentile(calm_gaps, 0.99))
    beyond = percentile(gaps, 0.99) - percentile(parts["recomputing"], 0.99)
    figures["gap_p99_beyond_recompute"] = {**_ms(beyond), "goal": 500}
    met = (
        broken == 0
        and figures["noticing_p99"]["value"] < 50
        and figures["deciding_p99"]["value"] < 2
        and beyond < 0.5
    )
    return {"bench": "failover-gap", "met": met, "figures": figures}


def _ms(seconds: float) -> dict[str, Any]:
    return figure(seconds * 1e3, "ms", digits=1)


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(
        prog="relume-chaos bench failover-gap", description=DESCRIPTION
    )
    parser.add_argument(
        "--kills", type=int, default=6, help="number of kills without checkpoints; 0: none"
    )
    parser.add_argument("--streams", type=int, default=24)
    parser.add_argument("--tokens", type=int, default=192)
    parser.add_argument("--model", default=".relume/models/tiny")
    parser.add_argument(
        "--pairs", type=int, default=4, help="pairs of rounds with and without checkpoints"
    )
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=2000,
        help="prompt tokens of the requests of these pairs",
    )
    parser.add_argument("--wide-model", type=Path, default=Path(".relume/models/wide"))
    args = parser.parse_args(argv)
    result: dict[str, Any] = {"bench": "failover-gap", "met": True, "figures": {}}
    if args.kills:
        model = str(Path(args.model).absolute())
        result = asyncio.run(measure(args.kills, args.streams, args.tokens, model))
    if args.pairs:
        wide = wide_model(args.wide_model)
        more = asyncio.run(failover_checkpoints.measure(wide, args.pairs, args.prompt_tokens))
        ratio, broken = more["checkpoint_gap_ratio"], more["checkpoint_broken"]
        result["met"] &= ratio["value"] <= ratio["goal"] and not broken["value"]
        result["figures"] |= more
    return result
