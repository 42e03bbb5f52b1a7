"""The prefix of a KV block: digests chained over token ids, from block 0 on.

Two blocks of equal chains were computed from the same tokens, by engines of one
fingerprint, in one *scope*: what vLLM's own block hash counts beside tokens (a cache salt).
A request without a scope shares nothing.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from relume.events.wire.kv.fingerprint import Fingerprint

Buffer = bytes | bytearray | memoryview
CHAIN_BYTES = 16
MAX_CHAINS = 8192
"""Of one question; a longer prefix is matched as far as that."""


def scope(salt: str) -> bytes:
    """The scope of a request with this cache salt (empty: none)."""
    return hashlib.blake2b(salt.encode(), digest_size=CHAIN_BYTES, person=b"relume scope").digest()


def root(fingerprint: Fingerprint, scope: bytes) -> bytes:
    """The chain before block 0."""
    return hashlib.blake2b(fingerprint.digest + scope, digest_size=CHAIN_BYTES).digest()


def link(before: bytes, tokens: Buffer) -> bytes:
    """The chain of a block after `before`; `tokens` as they head its image."""
    digest = hashlib.blake2b(before, digest_size=CHAIN_BYTES)
    digest.update(tokens)
    return digest.digest()


def chains(start: bytes, blocks: Iterable[Buffer]) -> list[bytes]:
    """The chain of each block, from `root` on."""
    found = []
    for tokens in blocks:
        start = link(start, tokens)
        found.append(start)
    return found
