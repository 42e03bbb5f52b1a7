"""Revision groups to bytes and back, segments verbatim as in etcd.

    group:  u64 revision | u16 owners | u32 segments | owner* | segment*
    owner:  i64 epoch | u16 length | stream name
    segment: u32 length | the bytes of `relume.events.log.segment`

A segment is packed again from its records; that those bytes are the ones that were in
etcd is what its hash proves, which is compared on the way in, and by the chain out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator

from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import repack, unpack

_GROUP = struct.Struct("<QHI")
_OWNER = struct.Struct("<qH")
_LEN = struct.Struct("<I")


def encode_group(group: RevisionGroup) -> bytes:
    """The bytes of `group`. Raises CorruptSegment when a segment is not what it hashes to."""
    parts = [_GROUP.pack(group.revision, len(group.owners), len(group.segments))]
    for stream, epoch in group.owners:
        name = stream.encode()
        parts += (_OWNER.pack(epoch, len(name)), name)
    for segment in group.segments:
        data = repack(segment)
        parts += (_LEN.pack(len(data)), data)
    return b"".join(parts)


def decode_groups(data: bytes) -> Iterator[RevisionGroup]:
    """The groups in a block. Raises CorruptSegment, struct.error when it is damaged."""
    view = memoryview(data)
    at = 0
    while at < len(view):
        revision, owner_count, segment_count = _GROUP.unpack_from(view, at)
        at += _GROUP.size
        owners = []
        for _ in range(owner_count):
            epoch, length = _OWNER.unpack_from(view, at)
            at += _OWNER.size
            owners.append((bytes(view[at : at + length]).decode(), epoch))
            at += length
        segments = []
        for _ in range(segment_count):
            (length,) = _LEN.unpack_from(view, at)
            at += _LEN.size
            segments.append(unpack(bytes(view[at : at + length])))
            at += length
        yield RevisionGroup(revision, tuple(segments), tuple(owners))
