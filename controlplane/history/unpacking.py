"""Decompression of stored history, bounded: a small file must not fill the memory.

Files of history compress 2 to 5 times. zlib reaches 1,000 times with bytes that somebody made for
that. What a file unpacks to is bounded by its own size, while it is unpacked and over all its parts.
"""

from __future__ import annotations

import zlib

MOST_RATIO = 100
"""Maximum of unpacked bytes per packed byte of a file, beyond FREE_BYTES."""
FREE_BYTES = 16 << 20
"""What any file may unpack to."""
MOST_PART_BYTES = 1 << 30
"""Maximum of one part: a block of groups, or a snapshot."""
_PIECE_BYTES = 64 * 1024


class BadPacking(ValueError):
    """Packed bytes are damaged, or unpack to more than they may. The text says which."""


class Unpacker:
    """Unpacks the parts of one file, in order."""

    def __init__(self) -> None:
        self._packed = 0
        self._unpacked = 0

    def unpack(self, packed: bytes) -> bytes:
        """The bytes of one part, which is whole. Raises BadPacking, before it holds more than
        the bound."""
        unpacker = zlib.decompressobj()
        pieces: list[bytes] = []
        part_bytes = 0
        view = memoryview(packed)
        try:
            for at in range(0, len(packed), _PIECE_BYTES):
                source: bytes | memoryview = view[at : at + _PIECE_BYTES]
                self._packed += len(source)
                while source:
                    left = min(
                        FREE_BYTES + MOST_RATIO * self._packed - self._unpacked,
                        MOST_PART_BYTES - part_bytes,
                    )
                    piece = unpacker.decompress(source, left + 1)
                    if len(piece) > left:
                        raise BadPacking(_refusal(part_bytes + len(piece)))
                    pieces.append(piece)
                    part_bytes += len(piece)
                    self._unpacked += len(piece)
                    source = unpacker.unconsumed_tail
        except zlib.error as error:
            raise BadPacking(f"damaged: {error}") from None
        if not unpacker.eof or unpacker.unused_data:
            raise BadPacking("damaged: a compressed part does not end where it should")
        return b"".join(pieces)


def _refusal(part_bytes: int) -> str:
    if part_bytes > MOST_PART_BYTES:
        return (
            f"one part of it unpacks to more than {MOST_PART_BYTES >> 20} MiB; "
            "export a shorter window of the log"
        )
    return (
        f"it unpacks to more than {FREE_BYTES >> 20} MiB and {MOST_RATIO} times its size, which no "
        "log of Relume does; do not use this file, and restore it or export the log again"
    )
