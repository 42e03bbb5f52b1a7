"""What fencing and chaining cost: our appends compared with raw transactions of the same etcd.

Per number of streams, three ways to write 4 KB values take turns (every other turn in reverse
order), each stream with one transaction in flight:

`raw`     an unconditional transaction with one put, on the bare generated stubs;
`shaped`  the same stubs with the append's own conditions and nothing else of it;
`append`  the stream writer: pack, crc, hash chain, conditions, check of the answer.

The ratio is append to raw, per turn; the figure is the median. Then, on an idle
stream, the bench measures the time from `append` until a follower has folded the event.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import uvloop
from aetcd import rpc

from relume.chaos.bench.bench_figures import figure, percentile
from relume.controlplane.local.local_fleet import FleetOptions, LocalFleet
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.writer.stream_writer import EtcdWriter
from relume.events.log.codec import encode
from relume.events.log.segment import pack
from relume.events.vocabulary.enums import TimerKind
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group

DESCRIPTION = "fenced appends against raw etcd transactions; append to fold"
RATIO_GOAL = 0.8
FOLD_GOAL_MS = 5.0
SEGMENT_BYTES = 4096
STREAMS = (1, 4, 16)

Way = Callable[[float], Awaitable[float]]
"""Writes for a number of seconds; returns values per second."""


class Raw:
    """Transactions on the bare stubs; with `shaped`, under an append's conditions."""

    def __init__(self, endpoint: str, streams: int, shaped: bool) -> None:
        self._endpoint = endpoint
        self._streams = streams
        self._shaped = shaped
        self._next = 0

    async def __call__(self, seconds: float) -> float:
        async with grpc.aio.insecure_channel(self._endpoint) as channel:
            stub = rpc.KVStub(channel)
            await stub.Txn(self._request(b"/bench/warm", b"", False))
            owner = b"/bench/owner"
            await stub.Put(rpc.PutRequest(key=owner, value=b"x"))
            self._epoch = (await stub.Range(rpc.RangeRequest(key=owner))).kvs[0].create_revision
            counts = [0] * self._streams
            began = time.perf_counter()

            async def write(stream: int) -> None:
                kind = b"shaped" if self._shaped else b"raw"
                self._next += 1
                prefix = b"/bench/%s%d/%d/%d/" % (kind, self._streams, self._next, stream)
                value = bytes(SEGMENT_BYTES)
                request = self._request(prefix + b"%016x" % 0, value, False)
                answer = await stub.Txn(request)
                if self._shaped:
                    request = self._request(prefix, value, True)
                number = 0
                while time.perf_counter() < began + seconds:
                    number += 1
                    key = prefix + b"%016x" % number
                    request.success[0].request_put.key = key
                    if self._shaped:
                        request.compare[1].key = request.failure[1].request_range.key = key
                        before = prefix + b"%016x" % (number - 1)
                        request.compare[2].key = request.failure[2].request_range.key = before
                    answer = await stub.Txn(request)
                    assert answer.succeeded
                counts[stream] = number

            await asyncio.gather(*(write(stream) for stream in range(self._streams)))
            return sum(counts) / (time.perf_counter() - began)

    def _request(self, key: bytes, value: bytes, shaped: bool) -> Any:
        request = rpc.TxnRequest(
            success=[rpc.RequestOp(request_put=rpc.PutRequest(key=key, value=value))]
        )
        if shaped:
            own = b"/bench/owner"
            request.compare.extend(
                (
                    rpc.Compare(key=own, target=1, result=0, create_revision=self._epoch),
                    rpc.Compare(key=key, target=1, result=0, create_revision=0),
                    rpc.Compare(key=key, target=1, result=1, create_revision=0),
                )
            )
            reads = (rpc.RangeRequest(key=k) for k in (own, key, key))
            request.failure.extend(rpc.RequestOp(request_range=read) for read in reads)
        return request


class Appends:
    """Stream writers that append the next segment the moment the last one landed."""

    def __init__(self, writers: list[EtcdWriter]) -> None:
        self._writers = writers
        head = len(pack(writers[0].stream, 1, 1, 1, bytes(16), [b""]))
        self._record = encode(v.TimerFired(TimerKind.WAIT, "x" * (SEGMENT_BYTES - head - 28)))
        self._until = 0.0
        self._landed = 0
        for writer in writers:
            writer.on_landed(partial(self._on_landed, writer))

    def _on_landed(self, writer: EtcdWriter, _: object) -> None:
        self._next(writer)

    def _next(self, writer: EtcdWriter) -> None:
        self._landed += 1
        if time.perf_counter() < self._until:
            writer.append(self._record)

    async def __call__(self, seconds: float) -> float:
        self._landed = 0
        began = time.perf_counter()
        self._until = began + seconds
        for writer in self._writers:
            writer.append(self._record)
        await asyncio.sleep(seconds)
        await asyncio.gather(*(writer.flush(10.0) for writer in self._writers))
        return self._landed / (time.perf_counter() - began)


async def rates(
    endpoint: str, spool: str, streams: int, seconds: float, turns: int
) -> dict[str, list[float]]:
    """Values per second of each way; one list entry per turn."""
    config = EtcdConfig(endpoints=(endpoint,), linger_ms=0.0, spool_dir=spool)
    async with AsyncExitStack() as stack:
        log = await stack.enter_async_context(EtcdLog(config))
        writers = [
            await stack.enter_async_context(log.writer(f"bench.{streams}.{number}"))
            for number in range(streams)
        ]
        ways: dict[str, Way] = {
            "raw": Raw(endpoint, streams, shaped=False),
            "shaped": Raw(endpoint, streams, shaped=True),
            "append": Appends(writers),
        }
        found: dict[str, list[float]] = {name: [] for name in ways}
        for way in ways.values():
            await way(seconds / 4)
        for turn in range(turns):
            for name in reversed(ways) if turn % 2 else ways:
                found[name].append(await ways[name](seconds))
        return found


async def append_to_fold_ms(endpoint: str, count: int) -> list[float]:
    """Times from append to folded at a follower, an event every 30 ms."""
    async with EtcdLog(EtcdConfig(endpoints=(endpoint,))) as log:
        async with log.writer("bench.idle") as writer:
            fleet = Fleet()
            folded: dict[int, float] = {}

            def seen(stream: str, position: int, event: Any) -> None:
                if stream == "bench.idle":
                    folded[position] = time.perf_counter()

            async def follow() -> None:
                # This part does not measure the bench's other streams.
                begin = writer.epoch - 1
                async for group in log.reader().follow(begin):
                    apply_group(fleet, group, seen)

            following = asyncio.create_task(follow())
            taken: dict[int, float] = {}
            try:
                await asyncio.sleep(0.3)
                for number in range(count):
                    began = time.perf_counter()
                    taken[writer.append(v.TimerFired(TimerKind.WAIT, str(number)))] = began
                    await asyncio.sleep(0.03)
                async with asyncio.timeout(10):
                    while len(folded) < count:
                        await asyncio.sleep(0.01)
            finally:
                following.cancel()
            return [(folded[position] - began) * 1e3 for position, began in taken.items()]


async def measure(args: argparse.Namespace) -> dict[str, Any]:
    """All figures, on an etcd of its own."""
    with tempfile.TemporaryDirectory(prefix="relume-bench-") as folder:
        fleet = LocalFleet(FleetOptions(state_dir=folder), lambda text: None)
        try:
            await fleet.start_etcd()
            figures: dict[str, Any] = {}
            met = True
            for streams in args.streams:
                spool = str(Path(folder) / "spool")
                found = await rates(fleet.etcd_endpoint, spool, streams, args.seconds, args.turns)
                pairs = zip(found["append"], found["raw"], strict=True)
                ratio = statistics.median(ours / raw for ours, raw in pairs)
                met = met and ratio >= RATIO_GOAL
                for name, values in found.items():
                    rate = statistics.median(values)
                    figures[f"{name}_{streams}"] = figure(rate, "segments/s", digits=0)
                figures[f"ratio_{streams}"] = figure(ratio, "append/raw", RATIO_GOAL, 3)
            times = await append_to_fold_ms(fleet.etcd_endpoint, args.events)
            p50, p99 = percentile(times, 0.5), percentile(times, 0.99)
            figures["append_to_fold_p50"] = figure(p50, "ms", FOLD_GOAL_MS, 2)
            figures["append_to_fold_p99"] = figure(p99, "ms", digits=2)
            return {"bench": "log", "met": met and p50 < FOLD_GOAL_MS, "figures": figures}
        finally:
            await fleet.stop()


def run(argv: list[str]) -> dict[str, Any]:
    """Entry of the bench runner."""
    parser = argparse.ArgumentParser(prog="relume-chaos bench log", description=DESCRIPTION)
    parser.add_argument("--streams", type=int, nargs="+", default=STREAMS)
    parser.add_argument(
        "--seconds", type=float, default=2.0, help="duration of one turn of one way"
    )
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--events", type=int, default=300, help="number of appends timed until the fold"
    )
    args = parser.parse_args(argv)
    return uvloop.run(measure(args))
