"""What fleets write into etcd, and the linger that they need.

Workers make 30 steps per second with 16 decoding requests. First the bench measures how many
segments per second this etcd accepts from sixteen streams. Then it computes, per fleet size,
events and bytes per second, and the least linger at which the fleet's segments are half of that
capacity. Where one process can drive that many streams, the bench tries it: it writes every
worker's records at that pace and measures the time until they landed.
`results/log-scale-age.json` has the error of a worker's load at each linger.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import tempfile
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import uvloop
from msgspec import Struct

from relume.chaos.bench.bench_figures import figure, percentile
from relume.chaos.bench.eventlog.log_appends import rates
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.writer.stream_writer import EtcdWriter
from relume.events.log.codec import encode
from relume.events.log.interface import LandedSegment
from relume.events.log.segment import pack

DESCRIPTION = "events and bytes per second of 64 to 1,000 workers, the linger they need"
WORKERS = (64, 256, 1000)
STEPS_PER_S = 30.0
BATCH, CONTEXT, BLOCK, OUTPUT = 16, 1200, 16, 200
SHARE = 0.5
"""Share of etcd's capacity that a fleet may use."""
GRACE_S = 0.5
"""Wait after the last linger, in which appends in flight land."""


class Steps:
    """Records of one worker's steps, with the changes that BATCH decoding requests make."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)
        self._number = self._request = 0

    def next(self) -> v.EngineStep:
        """The next step's record."""
        self._number += 1
        changes: list[Any] = []
        for _ in range(BATCH):
            if self._rng.random() < 1 / BLOCK:
                changes.append(v.KvBlocksFilled(self._name(), 1, self._rng.randrange(20, 90)))
            if self._rng.random() < 1 / OUTPUT:
                self._request += 1
                name, prompt = self._name(), self._rng.randrange(200, 3000)
                changes += [
                    v.EngineFinished(name, 1, "stop", OUTPUT),
                    v.RequestQueued(name, 1, prompt, bytes(260)),
                    v.RequestAdmitted(name, 1, 0, prompt // BLOCK),
                    v.PrefillChunkDone(name, 1, prompt, prompt),
                    v.FirstToken(name, 1),
                ]
        took = int(1e6 / STEPS_PER_S)
        context = BATCH * CONTEXT + self._number % 997
        return v.EngineStep(
            incarnation=1,
            step=self._number,
            duration_us=took,
            batch=BATCH,
            sum_context=context,
            prefill_tokens=0,
            waiting=0,
            kv_used=1200,
            changes=tuple(changes),
        )

    def _name(self) -> str:
        return f"4bd01f6c88a1-{self._request % 4096:x}"


class Volume(Struct):
    """What one worker writes per second, and the framing bytes of one segment."""

    events: float
    changes: float
    record_bytes: float
    segment_bytes: int

    @classmethod
    def measured(cls, steps: int = 3000) -> Volume:
        """Measured on generated records."""
        source = Steps(0)
        made = [source.next() for _ in range(steps)]
        size = statistics.mean(len(encode(step)) for step in made)
        changes = statistics.mean(len(step.changes) for step in made)
        empty = len(pack("w.w0000", 1, 1 << 20, 1 << 20, bytes(16), [b""]))
        return cls(STEPS_PER_S, changes * STEPS_PER_S, size * STEPS_PER_S, empty)

    def bytes_per_s(self, linger_ms: float) -> float:
        """Bytes per second of one worker, with framing."""
        return self.record_bytes + self.segment_bytes * segments_per_s(linger_ms)


def segments_per_s(linger_ms: float) -> float:
    """Segments per second of one worker: one per step, or one per linger."""
    return min(STEPS_PER_S, 1000 / linger_ms) if linger_ms > 0 else STEPS_PER_S


def linger_for(workers: int, capacity: float) -> float:
    """Linger in ms at which the fleet writes SHARE of `capacity` segments per second."""
    each = SHARE * capacity / workers
    return 0.0 if each >= STEPS_PER_S else 1000 / each


async def landing_ms(
    endpoint: str, prefix: str, workers: int, linger_ms: float, seconds: float
) -> tuple[list[float], float]:
    """Times from append to landed under a fleet's load, and the share of its records that
    landed by the end of the last linger."""
    config = EtcdConfig(
        endpoints=(endpoint,), prefix=prefix, linger_ms=linger_ms, linger_bytes=1 << 20,
        lease_ttl_s=60,
    )  # fmt: skip
    loop = asyncio.get_running_loop()
    waits: list[float] = []
    offered = landed = 0

    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(EtcdLog(config))

        async def work(number: int, writer: EtcdWriter) -> None:
            nonlocal offered
            steps = Steps(number)
            taken: dict[int, Any] = {}

            def on_landed(told: LandedSegment) -> None:
                nonlocal landed
                now = loop.time()
                for position in [p for p in taken if p <= told.last]:
                    waits.append((now - taken.pop(position)) * 1e3)
                    landed += 1

            writer.on_landed(on_landed)
            await asyncio.sleep(random.Random(number).random() / STEPS_PER_S)
            began = loop.time()
            for step in range(int(seconds * STEPS_PER_S)):
                taken[writer.append(steps.next())] = loop.time()
                offered += 1
                await asyncio.sleep(max(began + (step + 1) / STEPS_PER_S - loop.time(), 0))

        writers = []
        for first in range(0, workers, 64):
            some = [log.writer(f"w.w{n:04}") for n in range(first, min(first + 64, workers))]
            writers += await asyncio.gather(*(stack.enter_async_context(w) for w in some))
        async with asyncio.timeout(seconds * 6 + 30):
            await asyncio.gather(*(work(n, w) for n, w in enumerate(writers)))
        await asyncio.sleep(linger_ms / 1000 + GRACE_S)
        share = landed / max(offered, 1)
    return waits, share


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, on an etcd of its own."""
    volume = Volume.measured()
    figures: dict[str, Any] = {
        "worker_events": figure(volume.events, "events/s"),
        "worker_changes": figure(volume.changes, "changes/s", digits=1),
        "worker_bytes": figure(volume.bytes_per_s(0.0), "B/s", digits=0),
    }
    met = True
    with tempfile.TemporaryDirectory(prefix="relume-bench-") as folder:
        fleet = LocalFleet(FleetOptions(state_dir=folder), lambda text: None)
        try:
            await fleet.start_etcd()
            spool = str(Path(folder) / "spool")
            found = await rates(fleet.etcd_endpoint, spool, 16, args.seconds / 2, 3)
            capacity = statistics.median(found["append"])
            figures["capacity"] = figure(capacity, "segments/s", digits=0)
            for workers in args.workers:
                linger = linger_for(workers, capacity)
                name = f"{workers}_workers"
                figures[f"{name}_linger"] = figure(linger, "ms", digits=0)
                figures[f"{name}_events"] = figure(workers * volume.events, "events/s", digits=0)
                size = workers * volume.bytes_per_s(linger) / 1e6
                figures[f"{name}_bytes"] = figure(size, "MB/s", digits=2)
                print(f"{workers} workers, linger {linger:.0f} ms ...", flush=True)
                waits, share = await landing_ms(
                    fleet.etcd_endpoint, f"/{name}", workers, linger, args.seconds
                )
                for part in (50, 99):
                    wait = percentile(waits, part / 100)
                    figures[f"{name}_landed_p{part}"] = figure(wait, "ms", digits=1)
                figures[f"{name}_kept_up"] = figure(share, "share", 0.9, 3)
                met = met and share >= 0.9
        finally:
            await fleet.stop()
    return {"bench": "log-scale", "met": met, "figures": figures}


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(prog="relume-chaos bench log-scale", description=DESCRIPTION)
    parser.add_argument("--workers", type=int, nargs="+", default=WORKERS)
    parser.add_argument("--seconds", type=float, default=6.0, help="seconds of load per fleet size")
    return uvloop.run(measure(parser.parse_args(argv)))
