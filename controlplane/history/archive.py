"""The archive: the log's past in sealed files, one directory a log.

    {root}/{log id}/manifest.jsonl                one line for each sealed file, append-only
    {root}/{log id}/{after}-{last}-{author}.rla   all groups with after < revision <= last

A file is a header, blocks and a footer. Each block is its lengths and crc, then zlib over
length-delimited groups; the footer holds counts and the heads of the hash chain. A file is written
under a temporary name and gets its own when it is complete and fsynced; its manifest line carries
the hash of the whole file. Nothing here is ever changed again.

Two leaders may write the same range (one of them does not know yet that it is deposed):
both write what etcd holds, so the files agree, and readers skip what they have read.

All of it is blocking; callers use a thread.
"""

from __future__ import annotations

import os
import struct
import time
import zlib
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path
from typing import BinaryIO

import msgspec
import structlog
from msgspec import Struct, structs

from relume.controlplane.history.errors import AmbiguousArchive, DamagedFile, HistoryGap
from relume.controlplane.history.files import append_line, make_directory, publish, sync
from relume.controlplane.history.group_codec import decode_groups, encode_group
from relume.controlplane.history.unpacking import BadPacking, Unpacker
from relume.events.decode_errors import UNREADABLE
from relume.events.log.damaged_segment import continues
from relume.events.log.errors import BrokenChain, CorruptSegment
from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import Chain, Segment

log = structlog.get_logger("relume.archive")

MAGIC = b"RLA1"
MANIFEST = "manifest.jsonl"
BLOCK_BYTES = 1024 * 1024
"""A block holds about so much before compression."""

_BLOCK = struct.Struct("<IIII")  # raw length, compressed length, crc of that, groups
_LEN = struct.Struct("<I")
_LEVEL = 1  # ratio 4 at 200 MB/s; higher levels cost thrice for a tenth

Heads = dict[str, tuple[int, str, int]]
"""Stream to (seq, hash in hex, position of the next event)."""


class Header(Struct, frozen=True):
    """Head of a file."""

    version: int
    log: str
    after: int


class Entry(Struct, frozen=True, kw_only=True):
    """A line of the manifest; without file name and hash also the footer of the file."""

    log: str
    after: int
    last: int
    groups: int
    segments: int
    heads: Heads
    adopted: bool = False
    """It begins after a gap, so the first segments of streams in it could not be checked."""
    file: str = ""
    size: int = 0
    hash: str = ""
    sealed_at_ms: int = 0


class AdoptingChain(Chain):
    """A chain check; with `adopt` the first segment of an unknown stream is its beginning."""

    def __init__(self, heads: dict[str, tuple[int, bytes, int]], adopt: bool) -> None:
        super().__init__()
        self.heads.update(heads)
        self._adopt = adopt

    def check(self, segment: Segment) -> None:
        """Accept the next segment of its stream, or raise BrokenChain."""
        if self._adopt and segment.stream not in self.heads:
            self.heads[segment.stream] = (segment.seq - 1, segment.previous, segment.first)
        super().check(segment)

    def holds(self, segment: Segment) -> bool:
        """Whether the chain is at or past `segment`."""
        return segment.seq <= self.heads.get(segment.stream, (0, b"", 0))[0]


class Archive:
    """One log's archive in `directory`, which need not exist before something is written.

    Opening reads the manifest and checks the last file.
    """

    def __init__(self, directory: Path, log_id: str) -> None:
        self.directory = directory
        self.log_id = log_id
        self.entries: list[Entry] = []
        """Sealed files in order; each begins at or before the last one's end, but for gaps."""
        lines = self._read_manifest()
        self.entries = self._in_order(self._intact(lines))
        self._name_unlisted({entry.file for entry in lines})

    @property
    def last(self) -> int:
        """The log up to this revision is in sealed files; 0: nothing is."""
        return self.entries[-1].last if self.entries else 0

    @property
    def first(self) -> int:
        """Everything after this revision is here, up to `last`; 0 for a whole archive."""
        after = self.last
        for entry in reversed(self.entries):
            if entry.last < after:
                break
            after = min(after, entry.after)
        return after

    def heads(self) -> dict[str, tuple[int, bytes, int]]:
        """The chain's heads at `last`, as `relume.events.log.segment.Chain` keeps them."""
        return _heads(self.entries[-1]) if self.entries else {}

    def begin(self, author: str, after: int | None = None) -> ArchiveFile:
        """A new file that continues this archive, or starts after a gap that ends at `after`.

        `author` distinguishes the files of several leaders. Removes what dead writers left.
        Raises OSError.
        """
        make_directory(self.directory)
        for leftover in self.directory.glob(".*.rla"):
            if not _alive(leftover.stem.rpartition(".")[2]):
                leftover.unlink(missing_ok=True)
        return ArchiveFile(self, author, self.last if after is None else after)

    def read(self, after: int = 0, until: int = 0) -> Iterator[RevisionGroup]:
        """The groups in (after, min(until, last)], each file verified before its groups.

        Raises DamagedFile, HistoryGap, BrokenChain.
        """
        chain = AdoptingChain({}, adopt=False)
        end = 0
        for entry in self.entries:
            if until and end >= until:
                return
            if entry.after > max(end, after):
                raise HistoryGap(max(end, after), entry.after, f"not in {self.directory}")
            if entry.after > end:
                chain = AdoptingChain({}, adopt=True)
            if entry.last <= after:
                chain = AdoptingChain(_heads(entry), adopt=entry.adopted)
            else:
                for group in self._groups(entry):
                    for segment in group.segments:
                        if not chain.holds(segment):
                            chain.check(segment)
                    if group.revision > after and not (until and group.revision > until):
                        after = group.revision
                        yield group
            end = entry.last

    def _groups(self, entry: Entry) -> Iterator[RevisionGroup]:
        path = self.directory / entry.file
        data = self._verified(entry)
        (length,) = _LEN.unpack_from(data, len(MAGIC))
        at = len(MAGIC) + _LEN.size + length
        unpacker = Unpacker()
        while True:
            _, packed, crc, count = _BLOCK.unpack_from(data, at)
            at += _BLOCK.size
            if not count:
                return
            block = data[at : at + packed]
            at += packed
            if zlib.crc32(block) != crc:
                raise DamagedFile(path, "crc of a block does not fit")
            try:
                yield from decode_groups(unpacker.unpack(block))
            except (BadPacking, struct.error, CorruptSegment) as error:
                raise DamagedFile(path, str(error)) from None

    def _verified(self, entry: Entry) -> bytes:
        path = self.directory / entry.file
        try:
            data = path.read_bytes()
        except OSError as error:
            raise DamagedFile(path, error.strerror or "unreadable") from None
        if len(data) != entry.size or _hash(data) != entry.hash:
            raise DamagedFile(path, f"is not the file the manifest names ({len(data)} bytes)")
        if data[: len(MAGIC)] != MAGIC:
            raise DamagedFile(path, "no archive file, or of an unknown version")
        if _footer(data) != _without_file(entry):
            raise DamagedFile(path, "holds something else than the manifest says")
        return data

    def _read_manifest(self) -> list[Entry]:
        """All lines; a torn one is skipped."""
        path = self.directory / MANIFEST
        entries = []
        for line in path.read_bytes().split(b"\n") if path.exists() else ():
            if not line:
                continue
            try:
                entries.append(msgspec.json.decode(line, type=Entry))
            except UNREADABLE:
                text = line[:60].decode(errors="replace")
                log.warning("archive_manifest_line_torn", path=str(path), line=text)
        return entries

    def _name_unlisted(self, listed: set[str]) -> None:
        """Files after `last` without a line: the line is lost, or their writer died before it wrote it."""
        for path in sorted(self.directory.glob("[!.]*.rla")):
            last = path.name.split("-")[1] if path.name.count("-") else ""
            if path.name not in listed and last > f"{self.last:016x}":
                log.error(
                    "archive_file_unlisted",
                    path=str(path),
                    archive_ends=self.last,
                    remedy="restore manifest.jsonl if etcd lacks the revisions after that",
                )

    def _intact(self, entries: list[Entry]) -> list[Entry]:
        """Manifests whose files exist; the file that ends last is verified in full."""
        found: list[Entry] = []
        for entry in sorted(entries, key=lambda e: (e.last, -e.after), reverse=True):
            try:
                size = (self.directory / entry.file).stat().st_size
            except OSError:
                size = -1
            try:
                if size != entry.size:
                    raise DamagedFile(
                        self.directory / entry.file, f"{size} bytes, not {entry.size}"
                    )
                if not found:
                    self._verified(entry)
            except DamagedFile as error:
                log.error("archive_file_damaged", reason=str(error), remedy="restore the file")
                continue
            found.append(entry)
        return found

    def _in_order(self, entries: list[Entry]) -> list[Entry]:
        """The fewest of `entries` that cover what they cover, in order."""
        chosen: list[Entry] = []
        end = 0
        waiting = deque(sorted(entries, key=lambda e: (e.after, -e.last)))
        while waiting:
            joined = []
            while waiting and waiting[0].after <= end:
                joined.append(waiting.popleft())
            entry = max(joined, key=lambda e: e.last, default=None)
            if entry is None:
                entry = waiting.popleft()
                log.error(
                    "archive_gap", directory=str(self.directory), after=end, following=entry.after
                )
            if entry.last > end:
                chosen.append(entry)
                end = entry.last
        return chosen


class ArchiveFile:
    """A file being written: `add` blocks, then `seal` it or `discard` it."""

    def __init__(self, archive: Archive, author: str, after: int) -> None:
        self.after = after
        self.last = after
        self.groups = 0
        self.segments = 0
        self._archive = archive
        self._author = author
        gap = after != archive.last
        self.adopted = gap or (bool(archive.entries) and archive.entries[-1].adopted)
        """As in `Entry`."""
        self._chain = AdoptingChain({} if gap else archive.heads(), self.adopted)
        self._incomplete: set[str] = set()
        self._aside = archive.directory / f".{after:016x}-{author}.{os.getpid()}.rla"
        self._file: BinaryIO = self._aside.open("w+b")
        header = msgspec.json.encode(Header(1, archive.log_id, after))
        self._file.write(MAGIC + _LEN.pack(len(header)) + header)

    def heads(self) -> dict[str, tuple[int, bytes, int]]:
        """Where each stream ends that was added, or is in the archive."""
        return dict(self._chain.heads)

    def add(self, groups: Iterable[RevisionGroup]) -> None:
        """Write `groups` (in order) as one block.

        Raises BrokenChain when they do not continue what came before, OSError. Of a worker's stream
        segments are left out then: those before were damaged in etcd before they were archived.
        """
        encoded = []
        for group in groups:
            if group.revision <= self.last:
                raise BrokenChain("", group.revision, f"revision {self.last} came before")
            segments = [s for s in group.segments if continues(self._chain, s, self._left_out)]
            if len(segments) < len(group.segments):
                group = structs.replace(group, segments=tuple(segments))
            encoded.append(encode_group(group))
            self.last = group.revision
            self.groups += 1
            self.segments += len(segments)
        if encoded:
            raw = b"".join(encoded)
            block = zlib.compress(raw, _LEVEL)
            self._file.write(_BLOCK.pack(len(raw), len(block), zlib.crc32(block), len(encoded)))
            self._file.write(block)

    def _left_out(self, stream: str, seq: int, reason: str) -> None:
        if stream not in self._incomplete:
            self._incomplete.add(stream)
            log.error("archive_lacks_segments", stream=stream, segment=seq, reason=reason)

    def seal(self, last: int) -> Entry:
        """Complete the file as holding everything up to `last`; durable on return.

        Raises OSError; ValueError when `last` is before a group in it.
        """
        if last < self.last:
            raise ValueError(f"cannot end at {last}: revision {self.last} is in the file")
        heads = {s: (seq, head.hex(), at) for s, (seq, head, at) in self._chain.heads.items()}
        footer = Entry(
            log=self._archive.log_id,
            after=self.after,
            last=last,
            groups=self.groups,
            segments=self.segments,
            heads=heads,
            adopted=self.adopted,
        )
        encoded = msgspec.json.encode(footer)
        self._file.write(_BLOCK.pack(0, 0, 0, 0) + encoded + _LEN.pack(len(encoded)))
        self._file.flush()
        sync(self._file.fileno())
        self._file.seek(0)
        digest = blake2b(digest_size=16)
        while chunk := self._file.read(BLOCK_BYTES):
            digest.update(chunk)
        name = f"{self.after:016x}-{last:016x}-{self._author}.rla"
        size = self._file.tell()
        self._file.close()
        path = self._archive.directory / name
        publish(self._aside, path)
        entry = msgspec.structs.replace(
            footer,
            file=name,
            size=size,
            hash=digest.hexdigest(),
            sealed_at_ms=time.time_ns() // 1_000_000,
        )
        try:
            append_line(self._archive.directory / MANIFEST, msgspec.json.encode(entry))
        except OSError:
            path.unlink(missing_ok=True)  # no line names it
            raise
        self._archive.entries.append(entry)
        return entry

    def discard(self) -> None:
        """Give up what is not sealed."""
        with suppress(OSError):  # closing writes what is buffered: a full disk refuses it again
            self._file.close()
        self._aside.unlink(missing_ok=True)


def find(root: Path, log_id: str = "") -> Path | None:
    """The archive's directory of log `log_id` under `root`; without an id the only one.

    `root` may be that directory itself. None when there is none. Raises WhichArchive.
    """
    if (root / MANIFEST).exists():
        return root
    if log_id:
        return root / log_id if (root / log_id).is_dir() else None
    names = sorted(p.parent.name for p in root.glob(f"*/{MANIFEST}"))
    if len(names) > 1:
        raise AmbiguousArchive(root, names)
    return root / names[0] if names else None


def _footer(data: bytes) -> Entry | None:
    """What a file says about itself at its end; None if that cannot be read."""
    try:
        (length,) = _LEN.unpack_from(data, len(data) - _LEN.size)
        return msgspec.json.decode(data[-_LEN.size - length : -_LEN.size], type=Entry)
    except (struct.error, *UNREADABLE):
        return None


def _without_file(entry: Entry) -> Entry:
    return msgspec.structs.replace(entry, file="", size=0, hash="", sealed_at_ms=0)


def _heads(entry: Entry) -> dict[str, tuple[int, bytes, int]]:
    return {s: (seq, bytes.fromhex(head), at) for s, (seq, head, at) in entry.heads.items()}


def _hash(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _alive(pid: str) -> bool:
    return pid.isdigit() and Path(f"/proc/{pid}").exists()
