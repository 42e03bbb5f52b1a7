"""A log in one file: for incident exports, archives of tests, and mail.

    one line of JSON: format, versions, where it comes from
    frames: kind (1 byte) | length u32 | zlib of the payload
        S  a snapshot of the fold before the groups, at most one, first
        G  revision groups as `relume.controlplane.history.group_codec` writes them
        E  JSON: counts, heads and state hash at the end; the last frame

Segments are kept verbatim, so the hash chain holds across the file and etcd. The state
hash of the end anchors what follows the last hash the leader recorded. Reading and
writing are streaming; a file is whole or it is not there.
"""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import BinaryIO

import msgspec
from msgspec import Struct

from relume.controlplane.history.files import publish, sync
from relume.controlplane.history.group_codec import decode_groups, encode_group
from relume.controlplane.history.unpacking import BadPacking, Unpacker
from relume.events import vocabulary as v
from relume.events.decode_errors import UNREADABLE
from relume.events.log.errors import CorruptSegment, LogError
from relume.events.log.interface import RevisionGroup
from relume.policies.decision_versions import missing_shape, shape_name
from relume.policies.state.fleet import Fleet, dump, load, state_hash
from relume.policies.state.fold import apply_group

FORMAT = "relume-log"
VERSION = 1
SUFFIX = ".rlog"
_FRAME = struct.Struct("<cI")
_BLOCK_BYTES = 1 << 20


class BadStoredLog(LogError):
    """A file is not a stored log, or is damaged. Remedy: export it again."""

    def __init__(self, path: Path, detail: str) -> None:
        super().__init__(f"{path}: {detail}")
        self.path = path
        self.detail = detail


class Header(Struct, frozen=True, kw_only=True):
    """First line of the file. `shape`: of the state in its snapshot, if it has one."""

    format: str
    version: int
    relume: str = ""
    origin: str = ""
    note: str = ""
    shape: str = ""


class Footer(Struct, frozen=True, kw_only=True):
    """The end of the log in the file: counts, the state there as in `StateHashed`
    (digests in hex), and the crc of the first line."""

    groups: int
    segments: int
    records: int
    first: int
    last: int
    state: str
    order: str
    shape: str
    header: int = 0

    @property
    def end(self) -> v.StateHashed:
        """The state the log must end with, for `verify`."""
        state, order = bytes.fromhex(self.state), bytes.fromhex(self.order)
        return v.StateHashed(self.last, state, order, self.shape)


class StoredLog:
    """An opened file: `header`, `base` (the fold before it, or None), `groups()`.

    `footer` is set when `groups()` has been read to its end. A context manager.
    Raises BadStoredLog throughout.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.base: Fleet | None = None
        self.footer: Footer | None = None
        try:
            self._file: BinaryIO = self.path.open("rb")
        except OSError as error:
            raise BadStoredLog(self.path, error.strerror or "unreadable") from None
        self._size = os.fstat(self._file.fileno()).st_size
        self._unpacker = Unpacker()
        try:
            self.header = self._read_header()
            self._pending = self._frame()
            if self._pending[0] == b"S":
                self._check_shape()
                self.base = load(self._pending[1])
                self._pending = self._frame()
        except msgspec.ValidationError as error:
            self._file.close()
            raise BadStoredLog(
                self.path, f"its snapshot does not fit this build: {error}"
            ) from None
        except BadStoredLog:
            self._file.close()
            raise

    def __enter__(self) -> StoredLog:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def groups(self) -> Iterator[RevisionGroup]:
        """Every group, in order; at the end the footer must fit. Once only."""
        counted = [0, 0, 0]
        kind, payload = self._pending
        while kind == b"G":
            try:
                for group in decode_groups(payload):
                    counted[0] += 1
                    counted[1] += len(group.segments)
                    counted[2] += sum(len(s.records) for s in group.segments)
                    yield group
            except (CorruptSegment, struct.error, UnicodeDecodeError) as error:
                raise BadStoredLog(self.path, str(error)) from None
            kind, payload = self._frame()
        if kind != b"E":
            raise BadStoredLog(self.path, f"a frame of kind {kind!r}")
        footer = _json(self.path, payload, Footer)
        if [footer.groups, footer.segments, footer.records] != counted:
            raise BadStoredLog(self.path, f"holds {counted}, its footer says otherwise")
        if footer.header != self._header_crc:
            raise BadStoredLog(self.path, "damaged: its first line is not the one written")
        self.footer = footer

    def _check_shape(self) -> None:
        """Refuse a snapshot of another state: it would decode, and mean something else."""
        if shape := missing_shape(self.header.shape):
            raise BadStoredLog(
                self.path,
                f"continues a snapshot of state shape {shape}; this build has shape "
                f"{shape_name()}: read it with the build that wrote it",
            )

    def _read_header(self) -> Header:
        line = self._file.readline(65536)
        if not line.startswith(b'{"format":"relume-log"'):
            raise BadStoredLog(self.path, "is no stored log of Relume")
        header = _json(self.path, line, Header)
        self._header_crc = zlib.crc32(line)
        if header.version != VERSION:
            raise BadStoredLog(self.path, f"version {header.version}: read it with a newer Relume")
        return header

    def _frame(self) -> tuple[bytes, bytes]:
        head = self._file.read(_FRAME.size)
        if len(head) != _FRAME.size:
            raise BadStoredLog(self.path, "is cut short")
        kind, size = _FRAME.unpack(head)
        if size > self._size - self._file.tell():
            raise BadStoredLog(self.path, "is cut short")
        try:
            return kind, self._unpacker.unpack(self._file.read(size))
        except BadPacking as error:
            raise BadStoredLog(self.path, str(error)) from None


def save(
    path: str | Path,
    groups: Iterable[RevisionGroup],
    base: Fleet | None = None,
    origin: str = "",
    note: str = "",
) -> Footer:
    """Write `groups` (after `base`, or from the beginning) to `path`.

    They are folded on the way, for the state hash of the end. Raises LogError for groups
    that do not fold, OSError.
    """
    path = Path(path)
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with aside.open("wb") as file:
            header = Header(
                format=FORMAT,
                version=VERSION,
                relume=relume_version(),
                origin=origin,
                note=note,
                shape=shape_name(),
            )
            line = msgspec.json.encode(header) + b"\n"
            file.write(line)
            if base is not None:
                _write(file, b"S", dump(base))
            footer = _write_groups(file, groups, load(dump(base)) if base else Fleet())
            footer = msgspec.structs.replace(footer, header=zlib.crc32(line))
            _write(file, b"E", msgspec.json.encode(footer))
            file.flush()
            sync(file.fileno())
        publish(aside, path)
    finally:
        aside.unlink(missing_ok=True)
    return footer


def _write_groups(file: BinaryIO, groups: Iterable[RevisionGroup], fleet: Fleet) -> Footer:
    waiting: list[bytes] = []
    size = count = segments = records = first = 0
    for group in groups:
        apply_group(fleet, group)
        first = first or group.revision
        count += 1
        segments += len(group.segments)
        records += sum(len(s.records) for s in group.segments)
        waiting.append(encode_group(group))
        size += len(waiting[-1])
        if size >= _BLOCK_BYTES:
            _write(file, b"G", b"".join(waiting))
            waiting, size = [], 0
    if waiting:
        _write(file, b"G", b"".join(waiting))
    last = fleet.revision
    state, order = state_hash(fleet).hex(), fleet.order.hex()
    return Footer(
        groups=count,
        segments=segments,
        records=records,
        first=first,
        last=last,
        state=state,
        order=order,
        shape=shape_name(),
    )


def _write(file: BinaryIO, kind: bytes, payload: bytes) -> None:
    packed = zlib.compress(payload, 6)
    file.write(_FRAME.pack(kind, len(packed)) + packed)


def _json(path: Path, data: bytes, kind: type[Header] | type[Footer]):
    try:
        return msgspec.json.decode(data, type=kind)
    except UNREADABLE as error:
        raise BadStoredLog(path, f"damaged: {error}") from None


def relume_version() -> str:
    """The installed version; `checkout` where there is none."""
    try:
        return version("relume")
    except PackageNotFoundError:
        return "checkout"
