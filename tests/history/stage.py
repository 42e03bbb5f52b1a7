"""A control plane without clients, on real etcd, that keeps history fast."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from relume.controlplane.history.cycle import Step
from relume.controlplane.history.history_keeper import Keeper, KeeperConfig
from relume.controlplane.history.quota import QuotaConfig
from relume.controlplane.history.replica_restore import History
from relume.controlplane.replica.loop import Replica, ReplicaConfig
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.maintenance import Maintenance
from relume.events.etcd.writer.stream_writer import EtcdWriter
from relume.events.log.errors import LogFull
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group
from tests.etcd_server import EtcdServer

TICK_S = 0.1


def config_for(server: EtcdServer, **changes: object) -> EtcdConfig:
    """Short times for tests: calls 500 ms, leases 2 s."""
    config = EtcdConfig(
        endpoints=server.endpoints,
        call_timeout_ms=500,
        lease_ttl_s=2,
        backoff_max_ms=200,
        silence_ms=500,
        close_timeout_ms=1_000,
        open_timeout_ms=5_000,
    )
    return msgspec.structs.replace(config, **changes)


class QuietGateway:
    """A gateway that serves nobody."""

    activity: dict[tuple[str, int], Any] = {}

    def let_go(self, request: str) -> None:
        """No stream here is resumable."""

    def is_absent(self, request: str) -> bool:
        return False

    def delivered_on(self, worker: str, incarnation: int) -> dict[str, int]:
        return {}

    def break_streams(self, worker: str, incarnation: int, cause: str, detail: str = "") -> None:
        """There are none."""


class Stage:
    """A running replica with its keeper."""

    def __init__(self, log: EtcdLog, replica: Replica, keeper: Keeper, reader: Any) -> None:
        self.log = log
        self.replica = replica
        self.keeper = keeper
        self.reader = reader

    @property
    def fleet(self) -> Fleet:
        return self.replica.fleet

    async def leads(self) -> None:
        """Return when it leads and has folded its own election."""
        await until(lambda: self.replica.leadership.epoch in self.fleet.owners.values())
        await until(lambda: self.fleet.leader == self.replica.config.name)


def fast(root: Path, **changes: Any) -> KeeperConfig:
    """A round every 40 revisions or every half second; the quota looked at ten times a s."""
    quota = QuotaConfig(changes.pop("quota_bytes", 2 * 1024**3))
    base = KeeperConfig(
        root=str(root),
        every_revisions=40,
        every_s=0.5,
        keep_snapshots=3,
        watch_quota_s=0.1,
        quota=quota,
    )
    return msgspec.structs.replace(base, **changes)


@asynccontextmanager
async def replica_on(
    server: EtcdServer,
    root: Path,
    name: str = "r0",
    step: Step = lambda name: None,
    etcd: dict[str, Any] | None = None,
    **keeping: Any,
) -> AsyncIterator[Stage]:
    """A replica that follows, campaigns and keeps history under `root`."""
    async with EtcdLog(config_for(server, **(etcd or {})), name=name) as log:
        async with log.writer(f"r.{name}", wait_s=10.0) as writer:
            maintenance = Maintenance(log.client)
            reader = log.reader()
            config = ReplicaConfig(name=name, tick_s=TICK_S)
            history = History(root, maintenance)
            replica = Replica(config, reader, writer, log.writer, history)
            reader.on_damage = replica.damaged.note
            keeper = Keeper(
                config=fast(root, **keeping),
                fleet=replica.fleet,
                leader=replica.leadership,
                maintenance=maintenance,
                reader=log.reader(),
                reached=lambda: max(replica.covered, reader.revision),
                replica=name,
                step=step,
            )
            replica.observe(keeper.seen)
            replica.observe_groups(keeper.group)
            await replica.catch_up()
            tasks = [
                asyncio.create_task(replica.run(QuietGateway())),
                asyncio.create_task(keeper.run()),
            ]
            try:
                yield Stage(log, replica, keeper, reader)
            finally:
                for task in tasks:
                    task.cancel()
                for task in tasks:
                    with suppress(asyncio.CancelledError):
                        await task


class Traffic:
    """A worker's stream being written, and all that etcd acknowledged of it."""

    def __init__(self, writer: EtcdWriter) -> None:
        self.writer = writer
        self.taken: list[v.EngineStep] = []
        self.landed: list[Any] = []
        writer.on_landed(self.landed.append)

    @property
    def acknowledged(self) -> int:
        """Position of the last event known to be durable."""
        return self.writer.durable

    async def steps(self, count: int, padding: int = 0, flush_s: float = 30.0) -> None:
        """Take `count` steps; every eighth waits until all are durable."""
        for number in range(count):
            self.step(padding)
            if number % 8 == 7:
                await self.writer.flush(flush_s)
        await self.writer.flush(flush_s)

    def step(self, padding: int = 0) -> bool:
        """Take one step with `padding` bytes in it; whether it was taken."""
        number = len(self.taken) + 1
        finished = v.EngineFinished(f"q{number}", 1, "x" * padding, number)
        event = v.EngineStep(
            incarnation=1,
            step=number,
            duration_us=1000 + number,
            batch=1,
            sum_context=number,
            prefill_tokens=0,
            waiting=0,
            kv_used=1,
            changes=(finished,),
        )
        try:
            self.writer.append(event)
        except LogFull:
            return False
        self.taken.append(event)
        return True


@asynccontextmanager
async def traffic_on(log: EtcdLog, worker: str = "w0") -> AsyncIterator[Traffic]:
    """A worker that has registered and started an engine."""
    async with log.writer(f"w.{worker}", wait_s=10.0) as writer:
        writer.append(
            v.WorkerRegistered(worker=worker, domain="host", agent_pid=1),
            v.EngineStarted(worker, 1, 2, 3),
        )
        yield Traffic(writer)


def folded(groups: Any) -> Fleet:
    """The fold of `groups` from the beginning."""
    fleet = Fleet()
    for group in groups:
        apply_group(fleet, group)
    return fleet


async def until(condition: Callable[[], object], timeout_s: float = 60.0) -> None:
    """Wait until `condition` holds. Raises TimeoutError."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.01)
