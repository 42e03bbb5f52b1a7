"""What can be wrong with stored history."""

from __future__ import annotations

from pathlib import Path

from relume.events.log.errors import LogError


class HistoryError(LogError):
    """A file of the archive or a snapshot cannot be used."""


class DamagedFile(HistoryError):
    """A stored file is damaged or not what its manifest says.

    Remedy: restore it from a copy; what etcd still holds is not affected.
    """

    def __init__(self, path: Path, detail: str) -> None:
        super().__init__(f"{path}: {detail}")
        self.path = path
        self.detail = detail


class OtherBuild(HistoryError):
    """A snapshot was made by a build that keeps other state; reading it would mislead."""

    def __init__(self, path: Path) -> None:
        super().__init__(
            f"{path}: made by another build of Relume; the replica folds the log instead"
        )
        self.path = path


class HistoryGap(HistoryError):
    """Revisions in (after, next) are neither in the archive nor in etcd."""

    def __init__(self, after: int, following: int, detail: str) -> None:
        super().__init__(f"history between revisions {after} and {following} is missing: {detail}")
        self.after = after
        self.following = following


class EtcdLostSegments(HistoryError):
    """etcd lacks segments of a log that the archive has, or that this replica has read: etcd was
    restored from a backup. `source`: which of them.

    Remedy: `relume log begin`. etcd is never filled up from the archive.
    """

    def __init__(self, log_id: str, stream: str, seq: int, known: int, source: str) -> None:
        super().__init__(
            f"etcd was restored from a backup: it has stream {stream} of log {log_id} up to segment "
            f"{seq}, {source} up to {known}"
        )
        self.log_id = log_id
        self.stream = stream


class AmbiguousArchive(HistoryError):
    """Several logs are archived under one directory and the caller named none."""

    def __init__(self, root: Path, names: list[str]) -> None:
        super().__init__(f"{root} holds {len(names)} logs ({', '.join(names)}); name one")
        self.root = root
        self.names = names
