"""The leader's history keeper: feeds the archive, decides when to take a round, watches
the quota, and finds the way out of NOSPACE.

Groups come from the replica's own fold, so nothing is read twice; only what was written
between the archive's end and our leadership is read from etcd. Everything blocking is in
threads. What fails is tried again from what is durable: a session is thrown away and
a new one begins at the archive's end.

The way out of NOSPACE needs no put: seal the archive, write the snapshot's file, delete,
snapshot again after the deletion, compact, defragment, disarm. If the leader's lease lapsed
meanwhile, no leader can be elected, because etcd refuses grants too. Then any replica does it, on
the condition that there is no leader.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import structlog
from msgspec import Struct

from relume.controlplane.history import quota
from relume.controlplane.history.archive import BLOCK_BYTES
from relume.controlplane.history.cycle import (
    FoldCopy,
    RoundResult,
    Rounds,
    Step,
    cut,
    until_reached,
)
from relume.controlplane.history.quota import Level, QuotaConfig
from relume.controlplane.history.relief import relieve, shrink
from relume.controlplane.history.vault import Vault
from relume.controlplane.replica.leader import Leadership
from relume.events import vocabulary as v
from relume.events.etcd.errors import NoSpace
from relume.events.etcd.maintenance import Maintenance
from relume.events.log.disk import is_full
from relume.events.log.errors import Compacted, Fenced, LogError
from relume.events.log.interface import LogReader, RevisionGroup
from relume.policies.leader import log_detail
from relume.policies.state.fleet import Fleet

log = structlog.get_logger("relume.history")

POLL_S = 0.25
RETRY_S = 5.0
PRESSED_EVERY_S = 30.0
RESTATE_S = 60.0
MEMORY_BYTES = 64 * 1024 * 1024
"""So much may wait for the archive's disk; past it the session begins again from etcd."""


class KeeperConfig(Struct, frozen=True, kw_only=True):
    """A round is due after `every_revisions`, or after `every_s` with anything new."""

    root: str
    every_revisions: int = 20_000
    every_s: float = 300.0
    keep_snapshots: int = 3
    watch_quota_s: float = 5.0
    quota: QuotaConfig = QuotaConfig()


class KeeperStatus(Struct, kw_only=True):
    """For metrics and `doctor`. `failing`: why the last try failed, empty when it did not."""

    level: Level = Level.CALM
    database_bytes: int = 0
    quota_bytes: int = 0
    archived: int = 0
    snapshot: int = 0
    trimmed: int = 0
    rounds: int = 0
    failures: int = 0
    relieved: int = 0
    failing: str = ""


class Keeper:
    """Give it every folded group (`group`) and event (`seen`), and run it.

    `reached()` is the revision up to which the log has been folded, which may pass
    `fleet.revision`. `step` is for tests, see `cycle`.
    """

    def __init__(
        self,
        config: KeeperConfig,
        fleet: Fleet,
        leader: Leadership,
        maintenance: Maintenance,
        reader: LogReader,
        reached: Callable[[], int],
        replica: str = "",
        step: Step = lambda name: None,
    ) -> None:
        self.config = config
        self.retry_s = RETRY_S
        self.pressed_every_s = PRESSED_EVERY_S
        self.status = KeeperStatus(quota_bytes=config.quota.quota_bytes)
        self._fleet = fleet
        self._leader = leader
        self._maintenance = maintenance
        self._reader = reader
        self._reached = reached
        self._replica = replica
        self._step = step
        self._take: Callable[[RevisionGroup], None] | None = None
        self._rounds: Rounds | None = None
        self._round_at = self._pressed_at = self._looked_at = float("-inf")
        self._detail_decided_at = float("-inf")

    # --- observers ---------------------------------------------------------------------

    def group(self, group: RevisionGroup) -> None:
        """A group was folded."""
        if self._take is not None:
            self._take(group)

    def seen(self, stream: str, position: int, event: object) -> None:
        """An event was folded."""
        if type(event) is v.WorkerRegistered:
            self._detail_decided_at = float("-inf")
        if self._rounds is not None:
            self._rounds.seen(stream, position, event)

    # --- the loop ----------------------------------------------------------------------

    async def run(self) -> None:
        """Keep history while leading, for ever."""
        while True:
            try:
                if epoch := self._leader.epoch:
                    await self._lead(epoch)
                elif "fleet" not in self._fleet.owners and await self._due_look() >= Level.FULL:
                    async with self._session(0) as vault:
                        await self._relieve(vault, 0)
            except Fenced as error:
                log.info("history_left_to_the_leader", reason=str(error))
            except (LogError, OSError) as error:
                self._failed(error)
                await asyncio.sleep(self.retry_s)
            await asyncio.sleep(POLL_S)

    def _failed(self, error: LogError | OSError) -> None:
        self.status.failures += 1
        self.status.failing = str(error)
        if is_full(error):
            remedy = f"make room in {self.config.root}: etcd keeps all that is not archived"
            log.error("archive_disk_full", reason=str(error), remedy=remedy, retry_s=self.retry_s)
        else:
            log.warning("history_postponed", reason=str(error), retry_s=self.retry_s)

    async def _lead(self, epoch: int) -> None:
        """Rounds as they fall due, while our leadership is of `epoch`."""
        self._looked_at = self._detail_decided_at = float("-inf")
        async with self._session(epoch) as vault:
            if await self._due_look() < Level.FULL:
                self.status.snapshot = max(await self._maintenance.manifests(), default=0)
            self._round_at = time.monotonic()
            while self._leader.epoch == epoch:
                if vault.waiting_bytes > MEMORY_BYTES:
                    raise OSError(f"the archive's disk is slow: {vault.waiting_bytes} bytes wait")
                level = await self._due_look()
                if level is Level.FULL:
                    await self._relieve(vault, epoch)
                    await self._round(epoch, pressed=False)
                elif level >= Level.SHED and self._since(self._pressed_at) > self.pressed_every_s:
                    await self._press(epoch)
                elif self._due():
                    await self._round(epoch, pressed=False)
                elif vault.waiting_bytes > BLOCK_BYTES:
                    await vault.flush()
                await asyncio.sleep(POLL_S)

    def _due(self) -> bool:
        new = self._fleet.revision - self.status.snapshot
        late = self._since(self._round_at) >= self.config.every_s
        return new >= self.config.every_revisions or (late and new > 0)

    @asynccontextmanager
    async def _session(self, epoch: int) -> AsyncIterator[Vault]:
        """A vault that has every group folded, and receives each new one. Raises what opening and
        filling raise."""
        log_id = await self._maintenance.identity()
        if not log_id:
            log_id = secrets.token_hex(8)
            with suppress(NoSpace):  # then it is named after the way out
                log_id = await self._maintenance.name(log_id, epoch)
        author = f"{epoch:x}" if epoch else f"0p{os.getpid()}"
        vault = await Vault.open(Path(self.config.root), log_id, author, self._replica)
        early: list[RevisionGroup] = []
        try:
            self._take = early.append
            await self._fill(vault, self._fleet.revision)
            for group in early:
                vault.add(group)
            self._take = vault.add
            self._rounds = Rounds(vault, self._maintenance, self.config.keep_snapshots, self._step)
            yield vault
        finally:
            self._take = self._rounds = None
            await vault.close()

    async def _fill(self, vault: Vault, until: int) -> None:
        """Archive what was written before us. What is nowhere is a gap, said aloud."""
        try:
            await vault.fill(self._reader, until)
        except Compacted:
            if await self._maintenance.whole():
                await vault.fill_from_whole(self._reader, until)
                return
            manifests = await self._maintenance.manifests()
            begin = max((covers for covers in manifests if covers <= until), default=until)
            log.error(
                "archive_gap",
                after=vault.last,
                following=begin,
                remedy="give all replicas one archive directory; restore the files if they exist",
            )
            await vault.skip_to(begin)
            await vault.fill(self._reader, until)

    # --- rounds ------------------------------------------------------------------------

    async def _round(self, epoch: int, pressed: bool) -> RoundResult:
        assert self._rounds is not None
        taken = await self._rounds.take(self._cut(), self._leader, epoch, pressed)
        status = self.status
        status.archived = status.snapshot = taken.covers
        status.trimmed = max(status.trimmed, taken.trimmed)
        status.rounds += 1
        status.failing = ""
        self._round_at = time.monotonic()
        return taken

    async def _press(self, epoch: int) -> None:
        """Keep less in etcd than usual, at once: two rounds, since what the first deletes
        the second's compaction frees; then shrink the file when that matters."""
        self._pressed_at = time.monotonic()
        taken = await self._round(epoch, pressed=True)
        if taken.deleted_at:
            await self._reach(taken.deleted_at)
            await self._round(epoch, pressed=True)
        space = await self._maintenance.space()
        if quota.worth_defragmenting(space.size_bytes, space.used_bytes, self.config.quota):
            log.info("defragmenting", bytes=space.size_bytes, used=space.used_bytes)
            await shrink(self._maintenance, space, self._step)
        await self._look()

    async def _relieve(self, vault: Vault, epoch: int) -> None:
        """The way out of NOSPACE; every step is one that a full etcd still does."""
        log.error("etcd_is_full", bytes=self.status.database_bytes, remedy="making room now")
        await relieve(vault, self._maintenance, self._cut, self._reach, epoch, self._step)
        await self._maintenance.name(vault.archive.log_id, epoch)
        self.status.relieved += 1
        await self._look()
        log.info("etcd_takes_writes_again", bytes=self.status.database_bytes)

    def _cut(self) -> FoldCopy:
        return cut(self._fleet, self._reached())

    async def _reach(self, revision: int) -> None:
        await until_reached(self._reached, revision)

    # --- the quota ---------------------------------------------------------------------

    async def _due_look(self) -> Level:
        """The level, looked at again when that is due. Raises LogUnavailable."""
        if self._since(self._looked_at) >= self.config.watch_quota_s:
            await self._look()
        return self.status.level

    async def _look(self) -> None:
        space = await self._maintenance.space()
        self._looked_at = time.monotonic()
        status = self.status
        status.database_bytes = space.size_bytes
        level = quota.level(space.size_bytes, space.full, self.config.quota)
        if level is not status.level:
            report = log.error if level >= Level.ALARM else log.info
            report(
                "etcd_quota",
                level=level.name.lower(),
                bytes=space.size_bytes,
                used=space.used_bytes,
                quota=self.config.quota.quota_bytes,
            )
        status.level = level
        if level < Level.FULL:
            self._decide_detail(space.size_bytes)

    def _decide_detail(self, size_bytes: int) -> None:
        """As the leader, tell agents how much detail of their engines' steps to record: at each
        change, and periodically while it is less than all."""
        config, was = self.config.quota, self._fleet.detail
        detail = log_detail.detail(was, size_bytes, config.quota_bytes, config.shed_percent)
        again = detail == log_detail.SHED and self._since(self._detail_decided_at) > RESTATE_S
        if self._leader.epoch and (detail != was or again):
            self._detail_decided_at = time.monotonic()
            self._leader.append(
                v.DetailDecided(
                    detail=detail,
                    was=was,
                    database_bytes=size_bytes,
                    quota_bytes=config.quota_bytes,
                    shed_percent=config.shed_percent,
                )
            )

    @staticmethod
    def _since(then: float) -> float:
        return time.monotonic() - then
