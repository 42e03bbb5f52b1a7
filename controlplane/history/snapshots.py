"""Snapshots: the fold at a revision, in a file that proves itself.

    {root}/{log id}/{revision:016x}.rls

    magic "RLS1" | crc32 of all that follows | header length u32 | header | zlib of the fold

The header names the log, the revisions, the hash of the fold (I7) and the shape of the
state. `covers` may pass the fold's own revision: transactions up to it held nothing for
the fold, so reading continues after it. The shape is a digest of the state's schema and version. A
build with a different state could decode an old snapshot without an error and decide differently
from there, so it folds the whole log instead.

All of it is blocking; callers use a thread.
"""

from __future__ import annotations

import struct
import time
import zlib
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from relume.controlplane.history.errors import DamagedFile, OtherBuild
from relume.controlplane.history.files import make_directory, write_whole
from relume.controlplane.history.unpacking import BadPacking, Unpacker
from relume.events.decode_errors import UNREADABLE
from relume.policies.decision_versions import shape_name
from relume.policies.state.fleet import Fleet, load, state_hash

MAGIC = b"RLS1"
SUFFIX = ".rls"
_HEAD = struct.Struct("<4sII")  # magic, crc, header length
_LEVEL = 1


class Header(Struct, frozen=True, kw_only=True):
    """Head of a snapshot file."""

    version: int
    log: str
    revision: int
    covers: int
    hash: str
    shape: str


class Manifest(Struct, frozen=True, kw_only=True):
    """What is committed under `snap/{covers}` in etcd. `hash` is of the dumped fold, `state`
    the state hash (I7). `streams`: (epoch, seq, hash in hex, position) of each stream's
    end at `covers`."""

    log: str
    revision: int
    covers: int
    hash: str
    state: str
    file: str
    size: int
    shape: str
    streams: dict[str, tuple[int, int, str, int]]
    replica: str = ""
    at_ms: int = 0


class Snapshot(Struct, frozen=True):
    """A loaded snapshot: the log continues after `covers`."""

    fleet: Fleet
    covers: int
    hash: str


def write(directory: Path, log_id: str, dumped: bytes, covers: int, replica: str = "") -> Manifest:
    """Write the fold `dumped` (of `relume.policies.state.fleet.dump`); durable on return.

    Raises OSError.
    """
    fleet = load(dumped)
    digest = blake2b(dumped, digest_size=16).hexdigest()
    header = Header(
        version=1, log=log_id, revision=fleet.revision, covers=covers, hash=digest, shape=shape()
    )
    encoded = msgspec.json.encode(header)
    body = encoded + zlib.compress(dumped, _LEVEL)
    data = _HEAD.pack(MAGIC, zlib.crc32(body), len(encoded)) + body
    path = directory / f"{covers:016x}{SUFFIX}"
    make_directory(directory)
    write_whole(path, data)
    streams = {s: (h.epoch, h.seq, h.hash.hex(), h.position) for s, h in fleet.streams.items()}
    return Manifest(
        log=log_id,
        revision=fleet.revision,
        covers=covers,
        hash=digest,
        state=state_hash(fleet).hex(),
        file=path.name,
        size=len(data),
        shape=shape(),
        streams=streams,
        replica=replica,
        at_ms=time.time_ns() // 1_000_000,
    )


def read(path: Path, log_id: str, expected_hash: str = "") -> Snapshot:
    """The snapshot in `path`. Raises DamagedFile, OtherBuild."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise DamagedFile(path, error.strerror or "unreadable") from None
    if len(data) < _HEAD.size or data[:4] != MAGIC:
        raise DamagedFile(path, "no snapshot, or of an unknown version")
    _, crc, length = _HEAD.unpack_from(data)
    body = data[_HEAD.size :]
    if zlib.crc32(body) != crc:
        raise DamagedFile(path, "crc does not fit")
    try:
        header = msgspec.json.decode(body[:length], type=Header)
        dumped = Unpacker().unpack(body[length:])
    except (BadPacking, *UNREADABLE) as error:
        raise DamagedFile(path, str(error)) from None
    if header.log != log_id:
        raise DamagedFile(path, f"is of log {header.log}, not of {log_id}")
    digest = blake2b(dumped, digest_size=16).hexdigest()
    if digest != header.hash or (expected_hash and digest != expected_hash):
        raise DamagedFile(path, f"hashes to {digest}, not {expected_hash or header.hash}")
    if header.shape != shape():
        raise OtherBuild(path)
    try:
        return Snapshot(load(dumped), header.covers, digest)
    except msgspec.ValidationError as error:
        raise DamagedFile(path, str(error)) from None


def present(directory: Path) -> list[int]:
    """Revisions that snapshot files in `directory` cover, newest first."""
    found = []
    for path in directory.glob(f"*{SUFFIX}"):
        try:
            found.append(int(path.stem, 16))
        except ValueError:
            continue
    return sorted(found, reverse=True)


def path_of(directory: Path, covers: int) -> Path:
    """Where the snapshot that covers revision `covers` lies."""
    return directory / f"{covers:016x}{SUFFIX}"


@cache
def shape() -> str:
    """Digest of the schema of the state this build keeps, without its texts, and its version."""
    schema = _bare(msgspec.json.schema(Fleet))
    encoded = msgspec.json.encode(schema, order="deterministic")
    if (version := shape_name()) != "1":
        encoded += version.encode()
    return blake2b(encoded, digest_size=8).hexdigest()


def _bare(schema: Any) -> Any:
    if isinstance(schema, dict):
        return {k: _bare(v) for k, v in schema.items() if k not in ("title", "description")}
    return [_bare(v) for v in schema] if isinstance(schema, list) else schema
