"""What the engine notes beside the tokens of a request that does not stream.

Its answer is rendered at the end, so what belongs to delivered tokens must come back with
them: their log probabilities. The gateway keeps the notes without reading them. One record
a token: uint32 id, float32 log probability and uint32 rank of the sampled token, uint16
number of further ones, then id and log probability of each by rank; little-endian.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

_SAMPLED = struct.Struct("<IfIH")
_OTHER = struct.Struct("<If")


class MalformedNote(ValueError):
    """Bytes that are no note, or not one for each token."""


class TokenRecord(NamedTuple):
    """Log probabilities at one token. `others`: (id, log probability), best first."""

    id: int
    logprob: float
    rank: int
    others: tuple[tuple[int, float], ...]


def encode(records: Iterable[TokenRecord]) -> bytes:
    parts = []
    for record in records:
        parts.append(_SAMPLED.pack(record.id, record.logprob, record.rank, len(record.others)))
        parts += [_OTHER.pack(*other) for other in record.others]
    return b"".join(parts)


def decode(note: bytes, ids: Sequence[int]) -> list[TokenRecord]:
    """The records of tokens `ids`. Raises MalformedNote."""
    records, at = [], 0
    try:
        while at < len(note):
            token, logprob, rank, count = _SAMPLED.unpack_from(note, at)
            at += _SAMPLED.size
            others = [_OTHER.unpack_from(note, at + i * _OTHER.size) for i in range(count)]
            at += count * _OTHER.size
            records.append(TokenRecord(token, logprob, rank, tuple(others)))
    except struct.error as error:
        raise MalformedNote(str(error)) from None
    if [r.id for r in records] != list(ids):
        raise MalformedNote(f"{len(records)} records for {len(ids)} tokens")
    return records
