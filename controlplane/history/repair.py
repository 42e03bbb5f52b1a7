"""Making room from outside: for `relume doctor --repair`, and before a replica can start.

Under NOSPACE etcd grants no lease, so when no leader lives none can be elected, and no
replica can take its own stream. What the keeper does from its own fold is done here
from the log: restore, read to the present, archive, snapshot, then the same relief, on
the condition that leadership does not change meanwhile.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct

from relume.controlplane.history.cycle import FoldCopy, cut
from relume.controlplane.history.relief import relieve
from relume.controlplane.history.replica_restore import History, RestoredFold
from relume.controlplane.history.vault import Vault
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.maintenance import Maintenance, Space
from relume.events.log.interface import LogReader
from relume.policies.state.fold import apply_group

log = structlog.get_logger("relume.history")


class RepairResult(Struct, frozen=True):
    """What came of it. `archived`: the log up to this revision is in files."""

    before: Space
    after: Space
    archived: int


class _FoldReader:
    """A fold that reads on when called, and fills a vault."""

    def __init__(self, restored: RestoredFold, reader: LogReader, vault: Vault) -> None:
        self._fleet = restored.fleet
        self._reached = restored.covers
        self._reader = reader
        self._vault = vault

    async def reach(self, revision: int) -> None:
        """Fold and archive the log up to `revision`."""
        for group in await self._reader.read(self._reached, revision):
            apply_group(self._fleet, group)
        await self._vault.fill(self._reader, revision)
        self._reached = revision

    def cut(self) -> FoldCopy:
        return cut(self._fleet, self._reached)


async def repair(etcd: EtcdLog, archive_dir: str | Path, name: str = "repair") -> RepairResult:
    """Archive all of the log, trim it, shrink etcd's database and lift its alarm.

    Safe beside a running leader: what it does is refused once leadership changes.
    Raises Fenced (then do it again), HistoryError, LogUnavailable, OSError.
    """
    maintenance = Maintenance(etcd.client)
    reader = etcd.reader()
    before = await maintenance.space()
    epoch = (await reader.owners()).get(maintenance.stream, 0)
    log_id = await maintenance.identity() or secrets.token_hex(8)
    restored = await History(archive_dir, maintenance).restore()
    vault = await Vault.open(Path(archive_dir), log_id, f"{epoch:x}p{os.getpid()}", name)
    try:
        reading = _FoldReader(restored, reader, vault)
        await reading.reach(await maintenance.revision())
        after = await relieve(vault, maintenance, reading.cut, reading.reach, epoch)
        await maintenance.name(log_id, epoch)
        moment = reading.cut()
        manifest = await vault.snapshot(moment.dumped, moment.covers)
        await maintenance.commit(moment.covers, msgspec.json.encode(manifest), epoch)
        return RepairResult(before, after, vault.archive.last)
    finally:
        await vault.close()


async def unstick(etcd: EtcdLog, archive_dir: str | Path, name: str) -> bool:
    """Repair if etcd is full and there is no leader; returns whether it did.

    Raises as `repair` does.
    """
    maintenance = Maintenance(etcd.client)
    if not (await maintenance.space()).full:
        return False
    if maintenance.stream in await etcd.reader().owners():
        return False
    log.error("etcd_is_full", remedy="no leader: making room before this replica starts")
    done = await repair(etcd, archive_dir, name)
    log.info("etcd_takes_writes_again", bytes=done.after.size_bytes, archived=done.archived)
    return True
