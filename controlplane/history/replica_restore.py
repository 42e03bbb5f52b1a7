"""From stored history back to a fold, and to the whole list of groups.

A starting replica takes the newest snapshot that proves itself, and reads etcd after it. If a file
is missing or damaged it takes the one before; if none is left, or etcd has been trimmed past the
one there is, the archive is folded in between. What is in neither place is a HistoryGap, never a
silent beginning in the middle.

Files count whether or not a manifest was committed for them: under NOSPACE none can be.
A manifest's hash must be met where there is one.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import structlog
from msgspec import Struct

from relume.controlplane.history import snapshots
from relume.controlplane.history.archive import Archive, find
from relume.controlplane.history.continuity.lost_log import check_archived
from relume.controlplane.history.errors import HistoryError, HistoryGap
from relume.controlplane.history.snapshots import Manifest
from relume.events.decode_errors import UNREADABLE
from relume.events.etcd.maintenance import Maintenance
from relume.events.log.errors import Compacted
from relume.events.log.interface import LogReader, RevisionGroup
from relume.events.log.segment import Chain
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group

log = structlog.get_logger("relume.history")


class RestoredFold(Struct):
    """A fold that holds the log up to revision `covers`; reading continues after it."""

    fleet: Fleet
    covers: int


class History:
    """Restores from the files under `root` and from what etcd says of them."""

    def __init__(self, root: str | Path, maintenance: Maintenance) -> None:
        self._root = Path(root)
        self._maintenance = maintenance

    async def restore(self) -> RestoredFold:
        """The newest fold there is; an empty one where etcd still has the whole log. Raises
        HistoryError, LogUnavailable."""
        log_id = await self._maintenance.identity()
        if not log_id:
            return RestoredFold(Fleet(), 0)
        directory = self._root / log_id
        await check_archived(self._maintenance.client, directory, log_id)
        restored = await self._newest(directory, log_id)
        if await self._maintenance.holds(restored.covers):
            return restored
        log.warning("folding_the_archive", after=restored.covers, directory=str(directory))
        restored = await asyncio.to_thread(fold_archive, restored, directory, log_id)
        if not await self._maintenance.holds(restored.covers):
            if await self._maintenance.whole():
                return RestoredFold(Fleet(), 0)
            raise HistoryGap(
                restored.covers,
                await self._maintenance.revision(),
                f"etcd is trimmed past the files in {directory}; give this replica the archive "
                "directory of the others",
            )
        return restored

    async def _newest(self, directory: Path, log_id: str) -> RestoredFold:
        hashes = _hashes(await self._maintenance.manifests())
        local = await asyncio.to_thread(snapshots.present, directory)
        for covers in sorted({*hashes, *local}, reverse=True):
            path = snapshots.path_of(directory, covers)
            try:
                found = await asyncio.to_thread(
                    snapshots.read, path, log_id, hashes.get(covers, "")
                )
            except HistoryError as error:
                log.error("snapshot_unusable", reason=str(error), instead="the one before")
                continue
            log.info("snapshot_loaded", path=str(path), revision=found.fleet.revision)
            return RestoredFold(found.fleet, found.covers)
        return RestoredFold(Fleet(), 0)


def fold_archive(start: RestoredFold, directory: Path, log_id: str) -> RestoredFold:
    """Fold what the archive holds after `start`. Blocking. Raises HistoryError."""
    archive = Archive(directory, log_id)
    fleet = start.fleet
    for group in archive.read(start.covers):
        apply_group(fleet, group)
    return RestoredFold(fleet, max(start.covers, archive.last))


async def load_history(
    archive_dir: str | Path, reader: LogReader, log_id: str = ""
) -> list[RevisionGroup]:
    """The whole log, oldest first: the archive's groups, then etcd's, one hash chain (I6).

    `archive_dir` is the root of archives or one log's directory; `log_id` (see
    Maintenance.identity) selects the log. Raises HistoryError, BrokenChain, CorruptSegment,
    LogUnavailable.
    """
    groups: list[RevisionGroup] = []
    chain, last = Chain(), 0
    while True:
        more, end = await asyncio.to_thread(read_archive, archive_dir, log_id, last)
        await asyncio.to_thread(check_chain, more, chain)
        groups += more
        try:
            rest = await reader.read(end, heads=chain.heads or None)
            break
        except Compacted as error:
            # The leader may have sealed more, and trimmed it, while we read.
            if end == last:
                detail = "trimmed from etcd, not in the archive"
                raise HistoryGap(end, error.available, detail) from None
        last = end
    await asyncio.to_thread(check_chain, rest, chain)
    return groups + rest


def read_archive(
    archive_dir: str | Path, log_id: str = "", after: int = 0
) -> tuple[list[RevisionGroup], int]:
    """The groups of an archive after revision `after`, and the revision it ends at
    (`after` when there is none).

    Blocking. Raises HistoryError, BrokenChain.
    """
    directory = find(Path(archive_dir), log_id)
    if directory is None:
        return [], after
    archive = Archive(directory, log_id or directory.name)
    return list(archive.read(after)), max(archive.last, after)


def check_chain(groups: list[RevisionGroup], chain: Chain) -> None:
    """I6: every stream continues `chain` without a break. Raises BrokenChain."""
    for group in groups:
        for segment in group.segments:
            chain.check(segment)


def _hashes(manifests: dict[int, bytes]) -> dict[int, str]:
    found = {}
    for covers, value in manifests.items():
        try:
            found[covers] = msgspec.json.decode(value, type=Manifest).hash
        except UNREADABLE as error:
            log.error("snapshot_manifest_unreadable", covers=covers, reason=str(error))
    return found
