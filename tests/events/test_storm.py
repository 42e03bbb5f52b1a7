"""Random faults against writers and followers; the log must come out whole.

A failing run prints its seed; run it again with RELUME_SEED=<seed>.
"""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from relume.events.etcd.errors import LeaseGone
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.writer.stream_writer import EtcdWriter
from relume.events.log.errors import LogUnavailable
from relume.events.log.interface import LandedSegment
from tests.etcd_server import EtcdServer
from tests.events.conftest import config_for
from tests.events.support import following, numbers, positions, tick, until

pytestmark = [pytest.mark.etcd, pytest.mark.full]

STREAMS = ("w.w0", "w.w1", "r.r0")


async def faults(dice: random.Random, etcd: EtcdServer, log: EtcdLog, fired: list[str]) -> None:
    """Outages shorter and longer than the lease, and leases taken away, for a while."""
    for _ in range(7):
        await asyncio.sleep(dice.uniform(0.1, 0.6))
        fault = dice.choice(["kill", "stop", "stop", "lapse", "lapse"])
        fired.append(fault)
        if fault == "lapse":
            try:
                stream = dice.choice(STREAMS)
                answer = await log.client.range(b"/relume/v1/own/" + stream.encode())
                if answer.kvs:
                    await log.client.lease_revoke(answer.kvs[0].lease)
            except (LogUnavailable, LeaseGone):
                continue
        elif fault == "stop":
            etcd.stop()
            await asyncio.sleep(dice.choice([0.1, 0.6, 2.6]))
            etcd.cont()
        else:
            etcd.kill9()
            await asyncio.sleep(dice.choice([0.0, 0.5, 2.6]))
            etcd.restart(wait=False)


async def test_streams_come_out_whole(tmp_path: Path) -> None:
    seed = int(os.environ.get("RELUME_SEED", "0")) or random.randrange(1 << 30)
    dice = random.Random(seed)
    fired: list[str] = []
    landed: list[LandedSegment] = []
    config = {"spool_dir": str(tmp_path), "memory_limit_bytes": 4_000, "spool_sync_ms": 5}
    async with EtcdServer() as etcd, EtcdLog(config_for(etcd, **config)) as log:
        async with following(log.reader()) as seen, asyncio.TaskGroup() as tasks:
            writers: list[EtcdWriter] = []
            done = asyncio.Event()

            async def write(stream: str) -> None:
                async with log.writer(stream) as writer:
                    writer.on_landed(landed.append)
                    writers.append(writer)
                    count = 0
                    while not done.is_set():
                        for _ in range(dice.randrange(1, 40)):
                            writer.append(tick(count))
                            count += 1
                        await asyncio.sleep(dice.choice([0, 0.001, 0.02, 0.1]))
                    await writer.flush(20)
                    await until(lambda: writer.healthy, 5)
                    await writer.flush(5)

            for stream in STREAMS:
                tasks.create_task(write(stream))
            await until(lambda: len(writers) == len(STREAMS))
            await faults(dice, etcd, log, fired)
            done.set()
            # The follower has to arrive where the writers do.
            last = {w.stream: w for w in writers}
            await until(
                lambda: (
                    all(
                        (positions(seen.groups, s)[-1:] or [0])[0] >= last[s].position > 0
                        for s in STREAMS
                    )
                    and all(w.durable == w.position for w in writers)
                ),
                30,
            )
        told = f"seed {seed}, faults {fired}"
        groups = await log.reader().read()
        for stream in STREAMS:
            found = numbers(groups, stream)
            assert found == list(range(len(found))) and found, told
            listed = positions(groups, stream)
            assert listed == list(range(1, len(listed) + 1)), told
        there = {(s.stream, s.seq, g.revision, s.first, s.last) for g in groups for s in g.segments}
        assert {(e.stream, e.seq, e.revision, e.first, e.last) for e in landed} == there, told
        watched = [g for g in seen.groups if g.segments]
        assert watched == [g for g in groups if g.segments], told
        assert not list(tmp_path.iterdir()), told
