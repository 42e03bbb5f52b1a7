"""How prefixes of prompts are named: by hashes of their KV blocks, at some lengths only.

A block's hash is the one vLLM 0.32 gives it by default: SHA-256 of the pickled (hash of the
block before it, its token ids, what else counts), the first after a fixed root. The chain makes it
name the whole prefix up to there. Only the first 8 bytes of each are stored: a collision sends a
request to a worker with less cached than expected, and nothing worse, since the engine compares
whole hashes.

Not every prefix is reported. A *mark* is a prefix of certain lengths in blocks: each up to 31, then
16 in every doubling. What two prompts share is known to a sixteenth, a prompt of 1,500 tokens in
blocks of 16 has 55 marks instead of 93 hashes, one of 100,000 has 152 instead of 6,250: the log
holds them twice (stored, removed) and in the decision.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Sequence
from hashlib import sha256

HASH_BYTES = 8
MAX_MARKS = 256
"""Of one prefix; more than any prompt has."""
MAX_REPORTED = 1 << 15
"""Maximum number of marks that one engine reports."""
DENSE = 31
"""Up to this number of blocks each prefix is a mark."""
PER_OCTAVE = 16

ROOT = sha256(pickle.dumps("vllm-none-hash", 5)).digest()
"""vLLM's NONE_HASH for SHA-256, unless PYTHONHASHSEED is set."""


def is_mark(blocks: int) -> bool:
    """Whether a prefix of this number of blocks is reported."""
    return blocks <= DENSE or not blocks & ((1 << (blocks.bit_length() - 5)) - 1)


def blocks_at(marks: int) -> int:
    """Blocks of the prefix that the first `marks` marks lead to."""
    if marks <= DENSE:
        return marks
    octave, place = divmod(marks - DENSE - 1, PER_OCTAVE)
    return (PER_OCTAVE + place) << (octave + 1)


def marks_in(blocks: int) -> int:
    """Number of marks of a prefix of this number of blocks."""
    if blocks <= DENSE:
        return blocks
    octave = blocks.bit_length() - 6
    return DENSE + PER_OCTAVE * octave + (blocks >> (octave + 1)) - PER_OCTAVE + 1


def link(before: bytes, tokens: Sequence[int], extra: object = None) -> bytes:
    """The hash of a block after the one with hash `before`; 32 bytes."""
    return sha256(pickle.dumps((before, tuple(tokens), extra), 5)).digest()


def of_tokens(tokens: Sequence[int], block_tokens: int, salt: str = "") -> bytes:
    """The marks of a prompt, `HASH_BYTES` each, as far as an engine may find it cached: it
    computes one token at least. `salt`: the request's `cache_salt`."""
    if block_tokens < 1:
        return b""
    found = []
    before, extra = ROOT, (("cache_salt", salt),) if salt else None
    for blocks in range(1, (len(tokens) - 1) // block_tokens + 1):
        end = blocks * block_tokens
        before = link(before, tokens[end - block_tokens : end], extra)
        extra = None
        if is_mark(blocks):
            found.append(before[:HASH_BYTES])
            if len(found) == MAX_MARKS:
                break
    return b"".join(found)


def common(one: bytes, other: bytes) -> int:
    """How many marks two prompts begin with in common, given the packed marks of both."""
    size = min(len(one), len(other)) // HASH_BYTES * HASH_BYTES
    one, other = one[:size], other[:size]
    if one == other:
        return size // HASH_BYTES
    differs = int.from_bytes(one, "little") ^ int.from_bytes(other, "little")
    return ((differs & -differs).bit_length() - 1) // (8 * HASH_BYTES)


def pack(hashes: Sequence[int]) -> bytes:
    """Hashes as they are in events."""
    return struct.pack(f"<{len(hashes)}Q", *hashes)


def unpack(data: bytes) -> tuple[int, ...]:
    """The hashes of an event's field; what follows the last whole one is left out."""
    return struct.unpack_from(f"<{len(data) // HASH_BYTES}Q", data)


def of_key(key: bytes) -> int:
    """The first bytes of a whole hash, as `unpack` gives them."""
    return int.from_bytes(key[:HASH_BYTES], "little")
