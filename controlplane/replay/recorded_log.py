"""Where a log to be replayed comes from: etcd with its archive, or a file.

A log that has been trimmed begins in its archive. If its beginning is missing, that is a
HistoryGap: replay never starts in the middle unless a snapshot says what came before.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from pathlib import Path

import structlog
from msgspec import Struct

from relume.controlplane.history import snapshots
from relume.controlplane.history.archive import find
from relume.controlplane.history.errors import HistoryError, HistoryGap
from relume.controlplane.history.replica_restore import load_history, read_archive
from relume.controlplane.replay.store import BadStoredLog, Footer, StoredLog
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.etcd.maintenance import Maintenance
from relume.events.log.damaged_segment import DamagedSegment
from relume.events.log.interface import RevisionGroup
from relume.policies.state.fleet import Fleet

log = structlog.get_logger("relume.replay")


class History(Struct, kw_only=True):
    """A log in memory. `base`: the fold it continues from (None: the empty one). `footer`: what a
    stored file says about its end. `origin` is for people. `kept`: the directory of the log's
    archive, with snapshots of the fold."""

    groups: list[RevisionGroup]
    origin: str
    base: Fleet | None = None
    footer: Footer | None = None
    archived: Path | None = None

    def until(self, revision: int) -> History:
        """The part up to `revision`."""
        groups = [g for g in self.groups if g.revision <= revision]
        return History(
            groups=groups, origin=f"{self.origin}, up to revision {revision}", base=self.base
        )

    def snapshots(self) -> list[Fleet]:
        """The folds stored beside the archive, except those that cannot be used."""
        archived, found = self.archived, []
        for covers in snapshots.present(archived) if archived is not None else ():
            assert archived is not None
            path = snapshots.path_of(archived, covers)
            with suppress(HistoryError):
                found.append(snapshots.read(path, archived.name).fleet)
        return found


def from_file(path: str | Path) -> History:
    """A stored log, or an archive's directory. Raises BadStoredLog, HistoryError."""
    path = Path(path)
    if path.is_dir():
        groups, last = read_archive(path)
        if not last:
            raise BadStoredLog(path, "is a directory without an archive")
        return History(groups=groups, origin=f"archive {path}", archived=find(path))
    with StoredLog(path) as stored:
        groups = list(stored.groups())
        return History(groups=groups, origin=str(path), base=stored.base, footer=stored.footer)


async def from_etcd(config: EtcdConfig, *archive_dirs: str | Path) -> History:
    """The log on etcd, with its archive where it was trimmed: the first of the directories that has
    one of this log.

    Raises HistoryError, BrokenChain, CorruptSegment, LogUnavailable.
    """
    origin = f"etcd {', '.join(config.endpoints)} {config.prefix}"
    async with EtcdLog(config) as etcd:
        log_id = await Maintenance(etcd.client).identity()
        reader = etcd.reader()
        reader.on_damage = functools.partial(_name_skipped, set())
        for root in map(Path, archive_dirs):
            if log_id and (root / log_id).is_dir():
                groups = await load_history(root, reader, log_id)
                return History(
                    groups=groups, origin=f"{origin} and archive {root}", archived=root / log_id
                )
        groups = await reader.read()
    missing = _beginnings(groups)
    if missing:
        stream, revision = missing[0]
        raise HistoryGap(
            0,
            revision,
            f"stream {stream} has been trimmed; name the archive of the log (--archive DIR)",
        )
    return History(groups=groups, origin=origin)


def _name_skipped(named: set[str], damaged: DamagedSegment) -> None:
    """Name the first segment of each stream that is skipped."""
    if damaged.stream not in named:
        named.add(damaged.stream)
        log.warning(
            "segment_skipped", stream=damaged.stream, segment=damaged.seq, reason=damaged.reason
        )


def _beginnings(groups: list[RevisionGroup]) -> list[tuple[str, int]]:
    """Streams whose first segment here is not their first, with its revision."""
    seen: set[str] = set()
    missing = []
    for group in groups:
        for segment in group.segments:
            if segment.stream not in seen:
                seen.add(segment.stream)
                if segment.seq != 1:
                    missing.append((segment.stream, group.revision))
    return missing
