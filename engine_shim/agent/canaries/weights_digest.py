"""Digests of a model's files: a short one at each start of an engine, and one of every byte.

The short one says to which class an engine belongs: two workers with other weights are not compared.
It covers names and sizes of all files, the text files whole, and of each file of weights its
beginning, which has the table of its tensors and some of them. It takes milliseconds.

The digest of every byte (`read_files`) takes minutes for a large model. It is compared when a worker
leaves quarantine, so each worker of the class needs it once. Files are read in pieces, at a bounded rate, and a file
that is read is remembered (`KnownFiles`) with its size, times and inode. Damage of a disk changes none of
these, so what is remembered does not count for a quarantined worker.
"""

from __future__ import annotations

import os
import threading
import time
from hashlib import blake2b
from pathlib import Path

import msgspec
from msgspec import Struct

from relume.events.decode_errors import UNREADABLE

HEAD_BYTES = 1 << 20
MOST_FILES = 1000
PIECE_BYTES = 1 << 20
MOST_NAMED = 256
"""Maximum number of files whose digests are named one by one."""


class FileStamp(Struct, frozen=True):
    """What changes when a file is replaced or written."""

    size: int
    mtime_ns: int
    ctime_ns: int
    inode: int
    device: int


class KnownFile(Struct, frozen=True):
    """The digest of every byte of a file as it was then."""

    stamp: FileStamp
    digest: str


class ModelDigest(Struct, frozen=True, kw_only=True):
    """The digest of every byte of a model's files. `files`: (name, digest) of those of which the
    short digest has not all. `reread`: no remembered digest is part of it."""

    digest: str
    files: tuple[tuple[str, str], ...]
    size_bytes: int
    reread: bool


class FilesChanged(OSError):
    """The files are others than those at the engine's start: nothing says which ones it loaded."""


class ReadStopped(Exception):
    """The reader was to stop."""


def files_of(model: str) -> list[Path]:
    """The files of a model, by name. Raises OSError if it is no readable local directory."""
    return sorted(path for path in Path(model).iterdir() if path.is_file())[:MOST_FILES]


def stamps_of(model: str) -> dict[str, FileStamp]:
    """By name, what changes when one of the model's files does. Raises OSError."""
    return {name_of(path): stamp_of(path) for path in files_of(model)}


def stamp_of(path: Path) -> FileStamp:
    """Raises OSError."""
    stat = path.stat()
    return FileStamp(stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns, stat.st_ino, stat.st_dev)


def name_of(path: Path) -> str:
    """The name as text that every program can encode."""
    return os.fsencode(path.name).decode("utf-8", "backslashreplace")


def weights_digest(model: str) -> str:
    """The short digest: 16 hex digits; empty if the model is no readable local directory."""
    digest = blake2b(digest_size=8)
    try:
        files = files_of(model)
        for path in files:
            digest.update(b"%s %d\n" % (os.fsencode(path.name), path.stat().st_size))
            with path.open("rb") as file:
                digest.update(file.read(HEAD_BYTES))
    except OSError:
        return ""
    return digest.hexdigest() if files else ""


class KnownFiles:
    """Digests of files that were read before, in one file of JSON. What cannot be read or written is
    not known: it costs time only."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def load(self) -> dict[str, KnownFile]:
        """By name of the model's file."""
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, KnownFile])
        except (OSError, *UNREADABLE):
            return {}

    def store(self, files: dict[str, KnownFile]) -> None:
        """Replace all of them."""
        beside = self._path.with_suffix(".new")
        try:
            beside.write_bytes(msgspec.json.encode(files))
            beside.replace(self._path)
        except OSError:
            return


class Reading:
    """A read under way: how far it is, how fast it may be, and whether it is to stop. Its reader runs in
    a thread of its own. `rate` in bytes per second; 0: as fast as the disk gives them."""

    def __init__(self, rate: float = 0.0) -> None:
        self.done_bytes = 0
        self._rate = rate
        self._due = 0.0
        self._stopped = threading.Event()

    def stop(self) -> None:
        """Have the reader end after the piece that it reads now."""
        self._stopped.set()

    def skip(self, count: int) -> None:
        """So many bytes need not be read."""
        self.done_bytes += count

    def advance(self, count: int) -> None:
        """So many bytes were read; blocks until more may be. Raises ReadStopped."""
        self.done_bytes += count
        rest_s = 0.0
        if self._rate:
            now = time.monotonic()
            self._due = max(self._due, now) + count / self._rate
            rest_s = self._due - now
        if self._stopped.wait(rest_s):
            raise ReadStopped


def read_files(
    model: str,
    at_start: dict[str, FileStamp],
    known: KnownFiles,
    anew: bool,
    reading: Reading,
) -> ModelDigest:
    """Read every byte of the model's files, if they are still as they were `at_start`; of those that
    are `known`, only if they are to be read `anew`. Blocks. Raises OSError, ReadStopped."""
    stamps = stamps_of(model)
    _check_unchanged(at_start, stamps)
    remembered = {} if anew else known.load()
    found: dict[str, KnownFile] = {}
    reread = True
    for path in files_of(model):
        name = name_of(path)
        file = remembered.get(name)
        if file is not None and file.stamp == stamps[name]:
            reread = False
            reading.skip(file.stamp.size)
        else:
            file = KnownFile(stamps[name], _digest_of(path, reading))
            known.store({**remembered, **found, name: file})
        found[name] = file
    _check_unchanged(stamps, stamps_of(model))
    whole = blake2b(digest_size=8)
    for name, file in found.items():
        whole.update(f"{name} {file.stamp.size} {file.digest}\n".encode())
    large = [(name, file.digest) for name, file in found.items() if file.stamp.size > HEAD_BYTES]
    return ModelDigest(
        digest=whole.hexdigest(),
        files=tuple(large) if len(large) <= MOST_NAMED else (),
        size_bytes=sum(file.stamp.size for file in found.values()),
        reread=reread,
    )


def _check_unchanged(before: dict[str, FileStamp], now: dict[str, FileStamp]) -> None:
    changed = sorted(n for n in before.keys() | now.keys() if before.get(n) != now.get(n))
    if changed:
        raise FilesChanged(f"{changed[0]} changed after the engine had started")


def _digest_of(path: Path, reading: Reading) -> str:
    digest, piece = blake2b(digest_size=8), bytearray(PIECE_BYTES)
    view = memoryview(piece)
    try:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(piece):
                digest.update(view[:count])
                reading.advance(count)
    except OSError as error:
        raise OSError(f"{name_of(path)}: {error.strerror or error}") from None
    return digest.hexdigest()
