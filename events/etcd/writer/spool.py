"""The file an outage spools to: append-only, checked, locked while its writer lives.

A file is frames: length u32, crc32 of the payload u32, payload. The first payload says
which stream it continues and where (`SpoolHead`), each further one is a record. A torn
or damaged frame ends the file: what a crash left of the last batch is not read. The next
writer sets these bytes aside (`<stream>.<nonce>.damaged`), because a damaged disk looks the same.

Sync policy: every batch is fdatasynced before it counts as written, so a process or
host that dies loses at most what was accepted since, `EtcdConfig.spool_sync_ms` and the
duration of one write.

Functions here block; call them in a thread.
"""

from __future__ import annotations

import fcntl
import os
import re
import struct
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import msgspec
from msgspec import Struct

from relume.events.decode_errors import UNREADABLE
from relume.events.log.errors import LogError

FRAME = struct.Struct("<II")
"""Before each record in the file: its length and its CRC."""
_MOST = 1024 * 1024  # no record is longer than a segment; a longer frame is damage
_SUFFIX = ".spool"
DAMAGED = ".damaged"
SPOOL_VERSION = 1


class CorruptSpool(LogError):
    """A spool file does not hold what was written to it."""

    def __init__(self, path: Path, detail: str) -> None:
        super().__init__(f"spool {path.name}: {detail}")
        self.path = path


class SpoolHead(Struct, frozen=True, array_like=True, kw_only=True):
    """The records continue segment `seq` with `hash` of the stream, from `position` on;
    they were accepted under `epoch` of this cluster and prefix."""

    version: int
    cluster: int
    prefix: str
    stream: str
    epoch: int
    seq: int
    hash: bytes
    position: int


def frame_bytes(record: bytes) -> int:
    """Size of a record in the file."""
    return FRAME.size + len(record)


class Spool:
    """One open spool file. `begin` is the offset of its first record, `size` its end."""

    def __init__(self, path: Path, fd: int, head: SpoolHead, begin: int, size: int) -> None:
        self.path = path
        self.head = head
        self.begin = begin
        self.size = size
        self._fd = fd

    @classmethod
    def create(cls, path: Path, head: SpoolHead) -> Self:
        """A new file, locked and durable in its directory. Raises OSError."""
        path.parent.mkdir(parents=True, exist_ok=True)
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        frame = framed(msgspec.msgpack.encode(head))
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _write_at(fd, frame, 0)
            os.fdatasync(fd)
            _sync_directory(path.parent)
        except OSError:
            path.unlink(missing_ok=True)  # it would be in the way of the next
            os.close(fd)
            raise
        return cls(path, fd, head, len(frame), len(frame))

    @classmethod
    def adopt(cls, path: Path) -> Self | None:
        """The file of a writer that is gone; None while that writer lives.

        Raises CorruptSpool when not even its head can be read, OSError.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            return None
        spool = cls(
            path,
            fd,
            SpoolHead(
                version=0, cluster=0, prefix="", stream="", epoch=0, seq=0, hash=b"", position=0
            ),
            0,
            os.fstat(fd).st_size,
        )
        try:
            payloads, spool.begin = spool.read(0, 1, 1)
            spool.head = msgspec.msgpack.decode(payloads[0], type=SpoolHead)
        except (IndexError, *UNREADABLE) as error:
            spool.close()
            raise CorruptSpool(path, f"no head ({error})") from None
        return spool

    def write(self, records: Sequence[bytes]) -> None:
        """Append and fdatasync. Raises OSError; the file then ends where it did."""
        data = b"".join(map(framed, records))
        try:
            _write_at(self._fd, data, self.size)
            os.fdatasync(self._fd)
        except OSError:
            os.ftruncate(self._fd, self.size)
            raise
        self.size += len(data)

    def read(self, offset: int, most: int, most_bytes: int) -> tuple[list[bytes], int]:
        """Up to `most` records from `offset`, about `most_bytes` of them, at least one
        if there is one; and the offset after them. Ends at damage."""
        records: list[bytes] = []
        want = max(most_bytes, FRAME.size)
        data = os.pread(self._fd, min(want, self.size - offset), offset)
        at = 0
        while len(records) < most and (at < want or not records):
            if len(data) - at < FRAME.size:
                data, at, offset = self._more(data, at, offset, FRAME.size)
                if len(data) < FRAME.size:
                    break
            length, crc = FRAME.unpack_from(data, at)
            if not 0 < length <= _MOST:
                break  # zeros would be a record without bytes, and its crc fits
            if len(data) - at < FRAME.size + length:
                if records and offset + len(data) < self.size:
                    break  # the caller comes again for it
                data, at, offset = self._more(data, at, offset, FRAME.size + length)
            payload = data[at + FRAME.size : at + FRAME.size + length]
            if len(payload) < length or zlib.crc32(payload) != crc:
                break
            records.append(payload)
            at += FRAME.size + length
        return records, offset + at

    def cut_off(self, offset: int) -> None:
        """Drop everything from `offset` on: damage after the last good record."""
        if offset < self.size:
            os.ftruncate(self._fd, offset)
            self.size = offset

    def set_aside(self, offset: int) -> Path | None:
        """Keep a copy of the bytes from `offset` on for people; None if there are none. Raises
        OSError."""
        rest = os.pread(self._fd, self.size - offset, offset)
        if not rest:
            return None
        aside = self.path.with_suffix(DAMAGED)
        aside.write_bytes(rest)
        return aside

    def close(self) -> None:
        """Let go of the file; it stays."""
        os.close(self._fd)

    def discard(self) -> None:
        """Remove the file: all of it has landed."""
        self.path.unlink(missing_ok=True)
        self.close()

    def refuse(self) -> Path:
        """Keep the file for people as `<stream>.refused`, in place of an earlier one."""
        aside = self.path.with_name(f"{self.head.stream}.refused")
        self.path.replace(aside)
        self.close()
        return aside

    def _more(self, data: bytes, at: int, offset: int, need: int) -> tuple[bytes, int, int]:
        offset += at
        return os.pread(self._fd, min(need, self.size - offset), offset), 0, offset


def path_for(directory: str, stream: str, nonce: str) -> Path:
    """Where the writer with `nonce` (hex) spools `stream`."""
    return Path(directory) / f"{stream}.{nonce}{_SUFFIX}"


def leftovers(directory: str, stream: str) -> list[Path]:
    """Spool files of earlier writers of `stream`, oldest first."""
    mine = re.compile(re.escape(stream) + r"\.[0-9a-f]+" + re.escape(_SUFFIX))
    root = Path(directory)
    if not root.is_dir():
        return []
    found = [p for p in root.iterdir() if mine.fullmatch(p.name)]
    return sorted(found, key=lambda p: p.stat().st_mtime_ns)


def _sync_directory(path: Path) -> None:
    directory = os.open(path, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def framed(payload: bytes) -> bytes:
    return FRAME.pack(len(payload), zlib.crc32(payload)) + payload


def _write_at(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(fd, view, offset)
        offset += written
        view = view[written:]
