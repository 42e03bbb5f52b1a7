"""The layout of keys in etcd.

{prefix}/own/{stream}             owner key, lease-bound; create_revision = epoch
{prefix}/log/{stream}/{seq:016x}  one segment, immutable
{prefix}/snap/{revision:016x}     manifest of a snapshot
{prefix}/id                       the log's id: its name in the archive

`permissions` says which process may read and write which of them.
"""

from __future__ import annotations

import re

from relume.events.log.errors import LogError

_STREAM = re.compile(r"[A-Za-z0-9_.-]{1,128}")
_SEGMENT = re.compile(rb"([A-Za-z0-9_.-]{1,128})/([0-9a-f]{16})")
_NUMBER = re.compile(rb"[0-9a-f]{16}")


class BadStreamName(LogError):
    """Stream names are 1 to 128 of A-Z a-z 0-9 _ . -"""

    def __init__(self, stream: str) -> None:
        super().__init__(f"bad stream name {stream!r}")
        self.stream = stream


class BadKey(LogError):
    """A key inside the log's prefix is not ours. Readers ignore such keys, and name them."""

    def __init__(self, key: bytes) -> None:
        super().__init__(f"foreign key {key!r} inside the log's prefix")
        self.key = key


def after_prefix(prefix: bytes) -> bytes:
    """The first key after all keys that begin with `prefix` (etcd's range_end)."""
    return prefix[:-1] + bytes([prefix[-1] + 1])


class Keys:
    """The key layout under one prefix."""

    def __init__(self, prefix: str) -> None:
        self.root = prefix.encode() + b"/"
        self.own = self.root + b"own/"
        self.log = self.root + b"log/"
        self.snap = self.root + b"snap/"
        self.identity = self.root + b"id"

    def owner(self, stream: str) -> bytes:
        """Owner key of `stream`. Raises BadStreamName."""
        if not _STREAM.fullmatch(stream):
            raise BadStreamName(stream)
        return self.own + stream.encode()

    def stream(self, stream: str) -> bytes:
        """Prefix of the segments of `stream`. Raises BadStreamName."""
        if not _STREAM.fullmatch(stream):
            raise BadStreamName(stream)
        return self.log + stream.encode() + b"/"

    def segment(self, stream: str, seq: int) -> bytes:
        """Key of segment `seq`; keys sort as their numbers do."""
        return self.stream(stream) + b"%016x" % seq

    def snapshot(self, revision: int) -> bytes:
        """Key of the manifest of the snapshot at `revision`."""
        return self.snap + b"%016x" % revision

    def owned_stream(self, key: bytes) -> str:
        """The stream an owner key is for. Raises BadKey."""
        stream = key[len(self.own) :].decode(errors="replace")
        if not key.startswith(self.own) or not _STREAM.fullmatch(stream):
            raise BadKey(key)
        return stream

    def segment_of(self, key: bytes) -> tuple[str, int]:
        """(stream, seq) of a segment's key. Raises BadKey."""
        found = _SEGMENT.fullmatch(key, len(self.log))
        if found is None or not key.startswith(self.log):
            raise BadKey(key)
        return found[1].decode(), int(found[2], 16)

    def folder_of(self, key: bytes) -> str:
        """The stream in whose folder a key of the log is, be it a segment or not. Raises BadKey."""
        stream, slash, _ = key[len(self.log) :].partition(b"/")
        name = stream.decode(errors="replace")
        if not slash or not key.startswith(self.log) or not _STREAM.fullmatch(name):
            raise BadKey(key)
        return name

    def snapshot_of(self, key: bytes) -> int:
        """The revision of a manifest's key. Raises BadKey."""
        number = key[len(self.snap) :]
        if not key.startswith(self.snap) or not _NUMBER.fullmatch(number):
            raise BadKey(key)
        return int(number, 16)

    def is_ours(self, key: bytes) -> bool:
        """Whether `key`, which is in one of the three folders, has the form of its folder."""
        try:
            if key.startswith(self.own):
                self.owned_stream(key)
            elif key.startswith(self.snap):
                self.snapshot_of(key)
            else:
                self.segment_of(key)
        except BadKey:
            return False
        return True
