"""Relay bench: our gateway and vllm-router, over the same synthetic engines.

The bench measures per point (streams x paced or burst) the CPU seconds of the router's process
per 100,000 chunks (paced) or per 1,000 requests (burst). It also measures the time to the first
byte that the router adds to a direct request to the engine (p50). Targets take turns within every
repetition; figures are medians over the repetitions, ratios are ours to vllm-router's. Ours runs
as `relume serve` on a real etcd: failover recording, token tracking and the log are on. The
target `resumable` is ours again with resumable streams, whose events have ids. Its ratio is to
ours without ids, the median of neighbours in time.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
from typing import Any

from msgspec import Struct

from relume.chaos.bench.bench_figures import figure
from relume.chaos.bench.gateway.relay_routers import BenchFailed, LoadClient, Routers, cpu_ns

CPU_GOAL = 0.8
STREAMS = (1, 16, 64)
EVENTS = 100  # tokens of an answer
REQUESTS_PER_S = 400  # requests of a burst point, in waves of as many requests as there are streams
TARGETS = ("direct", "relume", "resumable", "vllm-router")
IDS_GOAL = 1.1  # maximum CPU of a stream whose events have ids, to one without
TTFB_NOISE_MS = 0.1  # resolution: smaller differences of medians are noise


class Point(Struct, frozen=True):
    """One load: `events` per answer, for `seconds`."""

    streams: int
    paced: bool
    events: int
    seconds: float

    @property
    def name(self) -> str:
        """Its name in the figures."""
        return f"{'paced' if self.paced else 'burst'}_{self.streams}"


class Sample(Struct, frozen=True):
    """One measurement. `cpu_s` per 100,000 chunks or 1,000 requests."""

    cpu_s: float
    ttfb_ms_p50: float
    requests: int
    events: int


def points(quick: bool, streams: tuple[int, ...]) -> list[Point]:
    """The loads of a run."""
    seconds = 1.5 if quick else 4.0
    return [Point(count, paced, EVENTS, seconds) for paced in (True, False) for count in streams]


def measure(client: LoadClient, routers: Routers, target: str, point: Point) -> Sample:
    """Run one point against one target."""
    served_by = "relume" if target == "resumable" else target
    pid = routers.pids.get(served_by)
    before = cpu_ns(pid) if pid else 0
    result = client.run(
        {
            "port": routers.ports[served_by],
            "streams": point.streams,
            "events": point.events,
            "paced": point.paced,
            "seconds": point.seconds,
            "requests_per_s": REQUESTS_PER_S,
            "resumable": target == "resumable",
        }
    )
    used_s = (cpu_ns(pid) - before) / 1e9 if pid else 0.0
    if result["errors"] or not result["requests"]:
        raise BenchFailed(f"{target} at {point.name}: {result['errors']} wrong answers")
    units = result["events"] / 1e5 if point.paced else result["requests"] / 1e3
    return Sample(
        used_s / units,
        statistics.median(result["ttfb_us"]) / 1e3,
        result["requests"],
        result["events"],
    )


def summarise(point: Point, samples: dict[str, list[Sample]]) -> dict[str, dict[str, Any]]:
    """The figures of one point."""

    def median(target: str, field: str) -> float:
        return statistics.median(getattr(s, field) for s in samples[target])

    unit = "s/100k chunks" if point.paced else "s/1k requests"
    direct = median("direct", "ttfb_ms_p50")
    added = {t: median(t, "ttfb_ms_p50") - direct for t in samples if t != "direct"}
    name = point.name
    figures = {
        f"cpu_{name}": figure(median("relume", "cpu_s"), unit, digits=3),
        f"added_ttfb_p50_{name}": figure(added["relume"], "ms", digits=3),
    }
    pairs = zip(samples["resumable"], samples["relume"], strict=True)
    ids = statistics.median(with_ids.cpu_s / without.cpu_s for with_ids, without in pairs)
    figures[f"cpu_ratio_ids_{name}"] = figure(ids, "x", IDS_GOAL, 3)
    figures[f"added_ttfb_p50_ids_{name}"] = figure(added["resumable"], "ms", digits=3)
    if "vllm-router" in samples:
        peer = median("vllm-router", "cpu_s")
        ratio = median("relume", "cpu_s") / peer
        figures[f"cpu_{name}_vllm_router"] = figure(peer, unit, digits=3)
        figures[f"cpu_ratio_{name}"] = figure(ratio, "x", CPU_GOAL, 3)
        figures[f"added_ttfb_p50_{name}"]["goal"] = round(added["vllm-router"] + TTFB_NOISE_MS, 3)
    return figures


def parser() -> argparse.ArgumentParser:
    """The flags."""
    flags = argparse.ArgumentParser(
        prog="relume-chaos bench relay", description=__doc__.splitlines()[0]
    )
    flags.add_argument("--quick", action="store_true", help="shorter points, two repetitions")
    flags.add_argument("--repetitions", type=int, default=0, help="default 5, quick 2")
    flags.add_argument("--streams", type=int, nargs="+", default=list(STREAMS))
    flags.add_argument("--policy", default="", help="vllm-router's --policy (default: its own)")
    flags.add_argument("--only-ours", action="store_true", help="leave vllm-router out")
    return flags


async def _run(options: argparse.Namespace) -> dict[str, Any]:
    repetitions = options.repetitions or (2 if options.quick else 5)
    figures: dict[str, dict[str, Any]] = {}
    targets = TARGETS[:3] if options.only_ours else TARGETS
    with LoadClient() as client:
        async with Routers(options.policy, not options.only_ours) as routers:
            for point in points(options.quick, tuple(options.streams)):
                samples: dict[str, list[Sample]] = {target: [] for target in targets}
                warm = Point(point.streams, point.paced, point.events, 0.3)
                for target in targets:
                    await asyncio.to_thread(measure, client, routers, target, warm)
                for repetition in range(repetitions):
                    turn = repetition % len(targets)
                    for target in (*targets[turn:], *targets[:turn]):
                        samples[target].append(
                            await asyncio.to_thread(measure, client, routers, target, point)
                        )
                figures.update(summarise(point, samples))
    met = all(f["goal"] is None or f["value"] <= f["goal"] for f in figures.values())
    return {"bench": "relay", "met": met, "figures": figures}


def run(argv: list[str]) -> dict[str, Any]:
    """Run the bench; see `--help`. Raises `BenchFailed` on wrong answers."""
    return asyncio.run(_run(parser().parse_args(argv)))
