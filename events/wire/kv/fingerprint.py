"""What two engines must have in common before one may use the other's KV blocks."""

from __future__ import annotations

import hashlib

import msgspec
from msgspec import Struct

TOKEN_BYTES = 4
"""Of one token id at the head of a block's image."""
OPAQUE = "opaque"
"""Layout of a block whose inside only an equal build can read (vLLM's CPU kernels pack it
for the instruction set): it moves whole or not at all."""
HEADS = "heads"
"""Layout `[kv_head][block_size][2 * head_size]`: it can be cut between heads."""
TOKENS = "tokens"
"""Layout `[block_size][kv_head][2 * head_size]`: it moves whole."""


class Fingerprint(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, kw_only=True):
    """Everything the bytes of a KV block depend on, beside the tokens.

    `model`: digest of weights and configuration; `build`: of engine, kernels and ISA;
    `piece_bytes`: bytes of one block in one layer on one rank; `layers` and `kv_heads`
    of the whole model. `layout`: the order of bytes within these; where blocks and layers lie
    in memory does not matter.
    """

    model: str
    build: str
    dtype: str
    block_size: int
    layers: int
    kv_heads: int
    head_size: int
    piece_bytes: int
    tp: int = 1
    pp: int = 1
    layout: str = OPAQUE

    @property
    def image_bytes(self) -> int:
        """Of one block of one rank as it travels: its token ids and all its layers."""
        return image_bytes(self.block_size, self.layers, self.piece_bytes)

    @property
    def digest(self) -> bytes:
        """16 bytes; equal digests mean bytes that can be used as they are."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=16).digest()

    @property
    def family(self) -> bytes:
        """16 bytes. Blocks of equal families serve each other's engines as they are, so plans
        compare it. Tensor and pipeline sizes are part of it: no restore converts blocks."""
        common = msgspec.structs.replace(self, piece_bytes=0)
        return hashlib.blake2b(msgspec.msgpack.encode(common), digest_size=16).digest()

    @property
    def unsplit(self) -> Fingerprint:
        """Of the whole model's blocks, over however many ranks they lie."""
        return msgspec.structs.replace(self, tp=1, pp=1, piece_bytes=0)


def image_bytes(block_size: int, layers: int, piece_bytes: int) -> int:
    """Size of a block's image: its token ids, then its bytes layer by layer."""
    return TOKEN_BYTES * block_size + layers * piece_bytes


def usable(mine: Fingerprint, theirs: Fingerprint) -> str:
    """How blocks of `theirs` serve an engine of `mine`: `same`, `convert`, or empty (not)."""
    if mine == theirs:
        return "same"
    if mine.unsplit == theirs.unsplit and mine.layout == HEADS:
        return "convert"
    return ""
