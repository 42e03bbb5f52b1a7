"""Frames of the Unix socket between an engine and its host's state daemon.

A frame is `<header length, chunk length, place, offset>` (uint32, uint32, uint8, uint64,
little-endian), the header, and the chunk: after the header (place INLINE), or at `offset` of the
sender's shared staging memory (STAGED), where the sender leaves it until it is answered.
"""

from __future__ import annotations

import struct

from relume.events.wire.kv.kv_errors import MalformedMessage
from relume.events.wire.kv.kv_messages import MAX_CHUNK_BYTES, MAX_HEADER_BYTES

FRAME = struct.Struct("<IIBQ")
INLINE = 0
STAGED = 1


def pack(header: bytes, chunk_bytes: int = 0, place: int = INLINE, offset: int = 0) -> bytes:
    """The frame up to an inline chunk."""
    return FRAME.pack(len(header), chunk_bytes, place, offset) + header


def unpack(head: bytes) -> tuple[int, int, int, int]:
    """(header length, chunk length, place, offset). Raises MalformedMessage."""
    try:
        header_bytes, chunk_bytes, place, offset = FRAME.unpack(head)
    except struct.error as error:
        raise MalformedMessage(f"head of {len(head)} bytes") from error
    if header_bytes > MAX_HEADER_BYTES or chunk_bytes > MAX_CHUNK_BYTES or place > STAGED:
        raise MalformedMessage(f"frame of {header_bytes} and {chunk_bytes} bytes")
    return header_bytes, chunk_bytes, place, offset
