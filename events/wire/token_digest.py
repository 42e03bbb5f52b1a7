"""A short digest of a run of token ids, by which answers are compared in the log."""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable
from hashlib import blake2b

BYTES = 8


def digest_of(tokens: Iterable[int]) -> bytes:
    """Of the ids as little-endian uint32, `BYTES` long. Raises OverflowError on an id beyond that."""
    ids = array("I", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return blake2b(ids.tobytes(), digest_size=BYTES).digest()
