"""One control plane replica: the loop read -> step -> run effects, and what hangs on it.

It owns stream `r.<name>`, folds the whole log, serves clients through the gateway and
campaigns for leadership. `Replica.run` returns when it was fenced or stopped.

A replica that starts, or that fell so far behind that its place in the log was trimmed,
takes the fold from stored history and reads on after it.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import structlog
from msgspec import Struct, structs

from relume.controlplane.gateway.ports import GatewayPort
from relume.controlplane.history.continuity.damaged_streams import DamagedStreams
from relume.controlplane.history.replica_restore import History
from relume.controlplane.incidents.incident_fold import IncidentObserver
from relume.controlplane.replica.crosscheck.check_watch import CrossCheckWatch
from relume.controlplane.replica.death_notices import NoticeWatch
from relume.controlplane.replica.holder_watch import HolderWatch
from relume.controlplane.replica.leader import Leadership
from relume.controlplane.replica.liveness.stream_watch import StreamWatch
from relume.controlplane.replica.migration_watch import MigrationWatch
from relume.controlplane.replica.scheduler import Scheduler
from relume.controlplane.replica.stall_watch import StallWatch
from relume.events import vocabulary as v
from relume.events.log.codec import UnreadableRecord
from relume.events.log.errors import BrokenChain, Compacted, Fenced, LogUnavailable
from relume.events.log.feature_levels import LEVEL
from relume.events.log.interface import LogReader, RevisionGroup, StreamWriter
from relume.events.log.segment import GENESIS
from relume.policies import decision_versions
from relume.policies.admission import admission_settings
from relume.policies.admission.admission_settings import WaitingConfig
from relume.policies.canary import canary_settings
from relume.policies.canary.canary_settings import CanaryConfig
from relume.policies.checkpoints import checkpoint_settings
from relume.policies.checkpoints.checkpoint_settings import CheckpointConfig
from relume.policies.crosscheck import check_settings
from relume.policies.crosscheck.check_settings import CrossCheckConfig
from relume.policies.degradation import degradation_settings
from relume.policies.degradation.degradation_settings import DegradationConfig
from relume.policies.health import evidence, health_settings
from relume.policies.health.health_settings import HealthConfig
from relume.policies.leader import feature_level
from relume.policies.liveness import overdue, stall
from relume.policies.liveness.overdue import OverdueConfig
from relume.policies.migration import migration_settings
from relume.policies.migration.migration_settings import MigrationConfig
from relume.policies.routing import routing_settings
from relume.policies.routing.routing_settings import RoutingConfig
from relume.policies.spares import spare_settings
from relume.policies.spares.spare_settings import SparesConfig
from relume.policies.state import dirty_set, prefix_cache
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group
from relume.policies.state.overlay.view import View

RELOAD_RETRY_S = 0.5
MOST_FOREIGN_KEYS = 1_000
"""Maximum number of foreign keys that a replica counts and names."""
SAY_S = 5.0
"""A replica that waits for the log to come back says so this often."""

log = structlog.get_logger("relume.replica")


class ReplicaConfig(Struct, frozen=True, kw_only=True):
    """Identity and policy of one replica."""

    name: str = "r0"
    host: str = "127.0.0.1"
    port: int = 8000
    policy: str = RoutingConfig().policy
    tick_s: float = 1.0
    stall: stall.StallConfig = stall.StallConfig()
    checkpoints: CheckpointConfig = CheckpointConfig()
    migration: MigrationConfig = MigrationConfig()
    routing: RoutingConfig = RoutingConfig()
    """Its limits; the policy is `policy`."""
    waiting: WaitingConfig = WaitingConfig()
    health: HealthConfig = HealthConfig()
    canary: CanaryConfig = CanaryConfig()
    cross_checks: CrossCheckConfig = CrossCheckConfig()
    overdue: OverdueConfig = OverdueConfig()
    degradation: DegradationConfig = DegradationConfig()
    spares: SparesConfig = SparesConfig()
    feature_level: int = LEVEL
    """The highest feature level that it reads: that of its build."""


class Watch(Protocol):
    """Follows the fold, and acts beside the requests while it runs."""

    def seen(self, stream: str, position: int, event: Any) -> None:
        """Called with each event folded."""
        ...

    def folded(self, group: Any) -> None:
        """Called with each revision group, after its last event was folded."""
        ...

    async def run(self) -> None:
        """Act until cancelled."""
        ...


def watches_of(scheduler: Scheduler, gateway: GatewayPort) -> dict[str, Watch]:
    """All watches of a replica, by the names of their tasks."""
    now = asyncio.get_running_loop().time
    return {
        "stall-watch": StallWatch(scheduler, gateway, now),
        "stream-watch": StreamWatch(scheduler, gateway, now),
        "notices": NoticeWatch(scheduler, gateway),
        "holder-watch": HolderWatch(scheduler),
        "former-streams": scheduler.returns.former,
        "migration-watch": MigrationWatch(scheduler, gateway),
        "cross-checks": CrossCheckWatch(scheduler),
    }


class Replica:
    """Owns the fold, the view and the tasks. Give it an entered writer for `r.<name>`.

    `open_writer(stream)` opens further streams (leadership). `history` is where folds are stored;
    without it the log must be whole. Observers added with `observe` are called with (stream,
    position, event) for each event folded.
    """

    def __init__(
        self,
        config: ReplicaConfig,
        reader: LogReader,
        writer: StreamWriter,
        open_writer: Callable[[str], Any],
        history: History | None = None,
    ) -> None:
        self.config = config
        self.fleet = Fleet()
        self.boot = f"{writer.epoch:x}"
        self.writer = writer
        self.view = View(f"r.{config.name}", self.fleet)
        self.scheduler = Scheduler(
            self.view, writer, self.boot, config.policy, lambda: time.monotonic_ns() // 1000
        )
        self.leadership = Leadership(open_writer, self.fleet, config.name, self.boot, config.tick_s)
        self.last_group_at = time.monotonic()
        self.covered = 0
        """The fold was restored from history up to this revision; the log is read after it."""
        self.upkeep: Any = None
        """What keeping history says of itself (history.keeper.KeeperStatus), for metrics."""
        self.foreign_keys: set[bytes] = set()
        """Keys in the log's prefix that Relume does not write, as the reader met them."""
        self.damaged = DamagedStreams(self.fleet, self.leadership)
        self.watches: dict[str, Watch] = {}
        """What acts beside the fold, from `run` on."""
        self.incidents = IncidentObserver()
        """The latest incidents, of the log from `incidents.since` on."""
        self._reader = reader
        self._history = history
        self._engines_came = False
        self._groups: AsyncIterator[RevisionGroup] | None = None
        self._observers: list[Callable[[str, int, Any], None]] = [
            self.leadership.seen,
            self.scheduler.returns.seen,
            self.scheduler.seen,
            self.incidents.seen,
        ]
        self._group_observers: list[Callable[[Any], None]] = [self.incidents.folded]

    @property
    def refused_notices(self) -> int:
        """Connections to agents that were closed because of what came on them."""
        watch = self.watches.get("notices")
        return watch.refused if isinstance(watch, NoticeWatch) else 0

    def observe(self, observer: Callable[[str, int, Any], None]) -> None:
        """Call `observer` with every event after it was folded."""
        self._observers.append(observer)

    def observe_groups(self, observer: Callable[[Any], None]) -> None:
        """Call `observer` with every revision group after it was folded."""
        self._group_observers.append(observer)

    def note_foreign_key(self, key: bytes) -> None:
        """The reader ignored a key in the log's prefix: name it, once."""
        if key not in self.foreign_keys and len(self.foreign_keys) < MOST_FOREIGN_KEYS:
            self.foreign_keys.add(key)
            log.warning("foreign_key_ignored", key=repr(key))

    async def catch_up(self) -> None:
        """Fold the log up to where this process took its stream, and up to the end of what
        a predecessor spooled there; before this the replica must not decide.

        The writer lands that spool ahead of all we write, so replay has it in every view of
        ours; a view without it would decide on something else. While the log is away this
        waits, and says so. Raises LogError, FleetTooNew.
        """
        if self._history is not None:
            await self._reload(self._history)
        fenced = asyncio.ensure_future(self.writer.fenced())
        try:
            while not self._caught_up:
                await self._fold_one(fenced)
        finally:
            fenced.cancel()
        feature_level.check_build(self.fleet, self.config.feature_level)
        self.scheduler.advanced()
        self.scheduler.emit(
            v.ReplicaStarted(
                replica=self.config.name,
                boot=self.boot,
                host=self.config.host,
                port=self.config.port,
                pid=os.getpid(),
                policy=self.config.policy,
                settings=stall.settings_of(self.config.stall)
                + checkpoint_settings.settings_of(self.config.checkpoints)
                + migration_settings.settings_of(self.config.migration)
                + routing_settings.settings_of(
                    structs.replace(self.config.routing, policy=self.config.policy)
                )
                + admission_settings.settings_of(self.config.waiting)
                + health_settings.settings_of(self.config.health)
                + overdue.settings_of(self.config.overdue)
                + canary_settings.settings_of(self.config.canary)
                + check_settings.settings_of(self.config.cross_checks)
                + degradation_settings.settings_of(self.config.degradation)
                + spare_settings.settings_of(self.config.spares)
                + decision_versions.settings()
                + feature_level.settings_of(self.config.feature_level),
            )
        )
        log.info("caught_up", revision=self.fleet.revision, workers=len(self.fleet.workers))

    @property
    def _caught_up(self) -> bool:
        head = self.fleet.streams.get(self.writer.stream)
        folded = head.position if head is not None else 0
        return self.fleet.revision >= self.writer.epoch and folded >= self.writer.position

    async def _fold_one(self, fenced: asyncio.Future[None]) -> None:
        """Fold the next group, however long it takes. Raises LogError, Fenced."""
        fetching = asyncio.ensure_future(self._next_group())
        try:
            while not fetching.done():
                waited: set[asyncio.Future[Any]] = {fetching, fenced}
                await asyncio.wait(waited, timeout=SAY_S, return_when=asyncio.FIRST_COMPLETED)
                if fetching.done():
                    break
                if fenced.done():
                    raise self.writer.fence or Fenced(self.writer.stream, self.writer.epoch)
                log.warning(
                    "waiting_for_the_log",
                    revision=self.fleet.revision,
                    spooled=self.writer.position - self.writer.durable,
                    healthy=self.writer.healthy,
                )
            group = fetching.result()
            apply_group(self.fleet, group, self._seen_before)
            self.incidents.folded(group)
        finally:
            fetching.cancel()

    async def run(self, gateway: GatewayPort) -> None:
        """Follow the log, lead, and watch, until cancelled or fenced (then raises Fenced)."""
        self.scheduler.serve_clients_of(gateway)
        watches = self.watches = watches_of(self.scheduler, gateway)
        for watch in watches.values():
            self.observe(watch.seen)
            self.observe_groups(watch.folded)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._follow(), name="follow")
            tasks.create_task(self.leadership.run(), name="leadership")
            for name, watch in watches.items():
                tasks.create_task(watch.run(), name=name)
            tasks.create_task(self._until_fenced(), name="fenced")

    async def _follow(self) -> None:
        while True:
            group = await self._next_group()
            self.last_group_at = time.monotonic()
            self.scheduler.decisions.received(group.revision)
            apply_group(self.fleet, group, self._seen)
            self.damaged.record()
            feature_level.check_build(self.fleet, self.config.feature_level)
            evidence.owed(self.fleet)  # the leader took it, event by event
            engines, self._engines_came = self._engines_came, False
            self.scheduler.advanced(engines)
            for observer in self._group_observers:
                observer(group)

    async def _next_group(self) -> RevisionGroup:
        """The group after the fold. If the log was trimmed past it, the fold is first restored from
        history."""
        while True:
            if self._groups is None:
                after = max(self.covered, self.fleet.revision)
                self._groups = self._reader.follow(after, heads_of(self.fleet))
            try:
                group = await anext(self._groups)
                _check_continues(self.fleet, group)
                return group
            except Compacted as trimmed:
                self._groups = None
                if self._history is None:
                    raise
                log.warning("fell_behind", reason=str(trimmed))
                behind = self.fleet.revision
                try:
                    await self._reload(self._history)
                except LogUnavailable:
                    await asyncio.sleep(RELOAD_RETRY_S)
                    continue
                if self.covered <= behind:
                    raise

    async def _reload(self, history: History) -> None:
        """Restore the fold from history, in place: views and leadership refer to it. Events in
        between were not seen, so a leader steps down: the next leader finishes what is open.
        """
        snapshot = await history.restore()
        owners = await self._reader.owners()
        if snapshot.covers <= self.fleet.revision:
            return
        for name in Fleet.__struct_fields__:
            setattr(self.fleet, name, getattr(snapshot.fleet, name))
        dirty_set.of(self.fleet).everything()
        prefix_cache.forget_index(self.fleet)
        # The watch after `covers` reports changes from there; a snapshot of another
        # leader may not have seen every lease lapse.
        self.fleet.owners = dict(sorted(owners.items()))
        self.covered = snapshot.covers
        self.incidents.restart(snapshot.covers)
        self.leadership.resign("took the fold from history")
        self.scheduler.restarts.forget_begun()
        self.scheduler.advanced()

    def _seen_before(self, stream: str, position: int, event: Any) -> None:
        """An event of the time before this replica serves."""
        self.incidents.seen(stream, position, event)
        self.scheduler.returns.former.seen(stream, position, event)

    def _seen(self, stream: str, position: int, event: Any) -> None:
        if type(event) is v.EngineReady:
            self._engines_came = True
        elif type(event) is UnreadableRecord:
            log.error("record_unreadable", stream=stream, position=position, reason=event.reason)
        for observer in self._observers:
            observer(stream, position, event)

    async def _until_fenced(self) -> None:
        await self.writer.fenced()
        raise self.writer.fence or Fenced(self.writer.stream, self.writer.epoch)


def heads_of(fleet: Fleet) -> dict[str, tuple[int, bytes, int]]:
    """Where each stream ends that was folded."""
    streams = fleet.streams.items()
    return {name: (head.seq, head.hash, head.position + 1) for name, head in streams}


def _check_continues(fleet: Fleet, group: RevisionGroup) -> None:
    """The reader trusts the beginning of a trimmed log; the fold can check it.

    Raises BrokenChain when a segment does not follow the fold's end of its stream.
    """
    for segment in group.segments:
        head = fleet.streams.get(segment.stream)
        seq, digest = (head.seq, head.hash) if head is not None else (0, GENESIS)
        if segment.seq != seq + 1 or segment.previous != digest:
            raise BrokenChain(segment.stream, segment.seq, f"does not follow segment {seq}")
