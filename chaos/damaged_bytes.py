"""Bytes that no build can read: records, and the ends of spools."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from random import Random

from relume.events.etcd.writer.spool import FRAME, framed

UNREADABLE = (b"\x92\xabtelepathy/9\x01", b"\xc1", b"\x92\xadengine_step/1\x01")
"""Records that cannot be read: an unknown tag, no msgpack, a known tag without its fields."""
ABSURD_EPOCHS = (1 << 40, 1 << 62, (1 << 63) - 1)
"""Epochs of notices that no agent can have: etcd has never had as many revisions."""


def tear(spool: Path, batch: Sequence[bytes], rng: Random) -> str:
    """Leave a spool as a loss of power in the middle of a write does. `batch`: the records that were
    being written, if there are any. Part of them follows the last whole record, or bytes that were
    never written do. Returns what it did."""
    frames = b"".join(map(framed, batch))
    torn = frames[: rng.randrange(1, len(frames))] if frames else bytes(rng.randrange(1, 64))
    with spool.open("ab") as file:
        file.write(torn)
    return f"{spool.name}: {len(torn)} bytes after the last record"


def corrupt(spool: Path, rng: Random) -> str:
    """Damage the last record of a spool, as a bad disk does: it is cut, or one of its bits flips.
    Returns what it did."""
    data = spool.read_bytes()
    last = last_frame(data)
    at, bit = rng.randrange(last + 1, len(data)), rng.randrange(8)
    if rng.random() < 0.5:
        os.truncate(spool, at)
        return f"{spool.name}: the last {len(data) - at} bytes cut off"
    with spool.open("r+b") as file:
        file.seek(at)
        file.write(bytes((data[at] ^ 1 << bit,)))
    return f"{spool.name}: bit {bit} of byte {at} flipped"


def last_frame(data: bytes) -> int:
    """Where the last whole frame of a spool begins."""
    last = at = 0
    while at + FRAME.size <= len(data):
        end = at + FRAME.size + FRAME.unpack_from(data, at)[0]
        if end > len(data):
            break
        last, at = at, end
    return last
