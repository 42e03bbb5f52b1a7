"""A segment: the unit of appending, and the hash chain through a stream.

Layout (little endian), then the records, each after a uint32 length:

    magic "RLM1" | crc32 of all that follows | stream epoch i64 | seq u64 |
    first position u64 | wall clock unix ms i64 | count u32 | previous hash 16 bytes |
    stream name length u16 | stream name

The hash of a segment is blake2b-128 of its whole bytes, so the chain covers epoch,
order and content. The wall clock is for people; nothing decides by it.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from hashlib import blake2b

from msgspec import Struct

from relume.events.log.errors import BrokenChain, CorruptSegment

MAGIC = b"RLM1"
GENESIS = bytes(16)
MAX_SEGMENT_BYTES = 256 * 1024
_HEAD = struct.Struct("<qQQqI16sH")
_LEN = struct.Struct("<I")


class Segment(Struct, frozen=True, gc=False, kw_only=True):
    """One decoded segment. `first` is the position of its first record (1-based)."""

    stream: str
    epoch: int
    seq: int
    first: int
    at_ms: int
    previous: bytes
    hash: bytes
    records: tuple[bytes, ...]

    @property
    def last(self) -> int:
        """Position of its last record; `first - 1` when it is empty."""
        return self.first + len(self.records) - 1


def pack(
    stream: str,
    epoch: int,
    seq: int,
    first: int,
    previous: bytes,
    records: Iterable[bytes],
    at_ms: int = 0,
) -> bytes:
    """The bytes of a segment. Raises CorruptSegment when they pass MAX_SEGMENT_BYTES."""
    records = list(records)
    name = stream.encode()
    parts = [_HEAD.pack(epoch, seq, first, at_ms, len(records), previous, len(name)), name]
    for record in records:
        parts.append(_LEN.pack(len(record)))
        parts.append(record)
    body = b"".join(parts)
    if len(body) > MAX_SEGMENT_BYTES + 4096:
        raise CorruptSegment(f"{len(body)} bytes, more than {MAX_SEGMENT_BYTES}")
    return MAGIC + _LEN.pack(zlib.crc32(body)) + body


def repack(segment: Segment) -> bytes:
    """The bytes that `segment` was unpacked from. Raises CorruptSegment when its fields do not
    hash to what it says."""
    data = pack(
        segment.stream,
        segment.epoch,
        segment.seq,
        segment.first,
        segment.previous,
        segment.records,
        segment.at_ms,
    )
    if digest(data) != segment.hash:
        raise CorruptSegment(f"{segment.stream} segment {segment.seq} does not match its hash")
    return data


def digest(data: bytes) -> bytes:
    """The hash that chains segments: blake2b with 16 bytes."""
    return blake2b(data, digest_size=16).digest()


def unpack(data: bytes) -> Segment:
    """Decode and check one segment. Raises CorruptSegment."""
    if data[:4] != MAGIC:
        raise CorruptSegment("no segment (or of an unknown version)")
    try:
        if zlib.crc32(memoryview(data)[8:]) != _LEN.unpack_from(data, 4)[0]:
            raise CorruptSegment("crc mismatch")
        epoch, seq, first, at_ms, count, previous, name_len = _HEAD.unpack_from(data, 8)
        at = 8 + _HEAD.size + name_len
        name = data[8 + _HEAD.size : at].decode()
        records = _records(data, at, count)
    except (struct.error, UnicodeDecodeError) as error:
        raise CorruptSegment(str(error)) from None
    return Segment(
        stream=name,
        epoch=epoch,
        seq=seq,
        first=first,
        at_ms=at_ms,
        previous=previous,
        hash=digest(data),
        records=records,
    )


def _records(data: bytes, at: int, count: int) -> tuple[bytes, ...]:
    length_at = _LEN.unpack_from
    records = []
    for _ in range(count):
        end = at + 4 + length_at(data, at)[0]
        records.append(data[at + 4 : end])
        at = end
    # Slices do not fail at the end of the data; a length that runs past it shows here.
    if at != len(data):
        raise CorruptSegment("records run past the end, or bytes after the last")
    return tuple(records)


class Chain:
    """Checks that each stream's segments follow one another (I5, I6).

    Holds one (seq, hash, next position) a stream; `check` raises BrokenChain.
    """

    def __init__(self) -> None:
        self.heads: dict[str, tuple[int, bytes, int]] = {}

    def check(self, segment: Segment) -> None:
        """Accept the next segment of its stream, or raise BrokenChain."""
        seq, head, position = self.heads.get(segment.stream, (0, GENESIS, 1))
        if segment.seq != seq + 1:
            raise BrokenChain(segment.stream, segment.seq, f"follows segment {seq}")
        if segment.previous != head:
            raise BrokenChain(segment.stream, segment.seq, "names another predecessor")
        if segment.first != position:
            raise BrokenChain(
                segment.stream, segment.seq, f"starts at {segment.first}, not {position}"
            )
        following = position + len(segment.records)
        self.heads[segment.stream] = (segment.seq, segment.hash, following)
