"""Time until a fleet answers, and memory of the control plane.

The bench starts a whole local fleet, as `relume up` does: etcd, zygote, one control plane
replica, three workers. The clock runs from the first process until every worker has
completed a request; the bench sends the requests at once so that routing spreads them.
Memory is the replica's resident set then, and its peak after a burst of streams.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

from relume.chaos.bench.bench_figures import figure
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet

DESCRIPTION = "time until three workers answer; memory of the control plane"
ANSWER_GOAL_S = 60.0
MEMORY_GOAL_MB = 200.0
PATIENCE_S = 240.0


def memory_mb(pid: int, field: str) -> float:
    """`VmRSS` or `VmHWM` (its peak) of a process, in MB (10^6 bytes)."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise ValueError(f"no {field} for process {pid}")


async def complete(session: aiohttp.ClientSession, gateway: str, tokens: int) -> None:
    """One streamed completion. Raises when it fails or does not end."""
    body = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": tokens,
            "temperature": 0, "stream": True}  # fmt: skip
    async with session.post(f"{gateway}/v1/completions", json=body) as answer:
        answer.raise_for_status()
        ended = False
        async for line in answer.content:
            if line.startswith(b'data: {"error"'):
                raise RuntimeError(f"a completion failed: {line.decode(errors='replace')}")
            ended = ended or line.startswith(b"data: [DONE]")
        if not ended:
            raise RuntimeError("a completion did not end")


async def served_by(fleet: LocalFleet) -> set[str]:
    """Workers with at least one completed request."""
    decided: dict[str, str] = {}
    done = set()
    page = await fleet.admin("events?from=0&type=route_decided,request_ended&limit=1000")
    for entry in page["events"]:
        event = entry["event"]
        if event["type"] == "route_decided":
            decided[event["request"]] = event["worker"]
        elif event["outcome"] == "completed":
            done.add(decided[event["request"]])
    return done


async def once(model: str, workers: int, burst: int, tokens: int) -> dict[str, float]:
    """Start a fleet, use it, stop it; its figures."""
    with tempfile.TemporaryDirectory(prefix="relume-bench-") as folder:
        options = FleetOptions(workers=workers, state_dir=folder, model=model, port=0, admin_port=0)
        began = time.monotonic()
        async with asyncio.timeout(PATIENCE_S), LocalFleet(options, lambda text: None) as fleet:
            ready_s = time.monotonic() - began
            replica = fleet.children["r0"].pid
            gateway = fleet.gateways[0]
            async with aiohttp.ClientSession(trust_env=False) as session:
                while len(await served_by(fleet)) < workers:
                    await asyncio.gather(
                        *(complete(session, gateway, 4) for _ in range(2 * workers))
                    )
                answered_s = time.monotonic() - began
                idle_mb = memory_mb(replica, "VmRSS")
                await asyncio.gather(*(complete(session, gateway, tokens) for _ in range(burst)))
                return {
                    "engines_ready": ready_s,
                    "workers_answered": answered_s,
                    "control_plane": idle_mb,
                    "control_plane_peak": memory_mb(replica, "VmHWM"),
                    "agents": sum(
                        memory_mb(child.pid, "VmRSS")
                        for name, child in fleet.children.items()
                        if name.startswith("w")
                    ) / workers,
                    "etcd": memory_mb(fleet.children["etcd"].pid, "VmRSS"),
                }  # fmt: skip


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(prog="relume-chaos bench startup", description=DESCRIPTION)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument(
        "--burst", type=int, default=64, help="number of streams at once, for the memory peak"
    )
    parser.add_argument("--tokens", type=int, default=64, help="tokens per stream")
    parser.add_argument("--model", default=".relume/models/tiny")
    args = parser.parse_args(argv)
    model = str(Path(args.model).absolute())
    found = asyncio.run(once(model, args.workers, args.burst, args.tokens))
    goals = {"workers_answered": ANSWER_GOAL_S, "control_plane_peak": MEMORY_GOAL_MB}
    seconds = ("engines_ready", "workers_answered")
    figures = {
        name: figure(value, "s" if name in seconds else "MB", goals.get(name), 1)
        for name, value in found.items()
    }
    met = all(found[name] < goal for name, goal in goals.items())
    return {"bench": "startup", "met": met, "figures": figures}
