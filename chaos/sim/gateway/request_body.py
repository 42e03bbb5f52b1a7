"""The body of a simulated request: what its prompt stands for, and its lengths.

Gateways pass it on unread. The process that counts prompts reads it, and so does an engine that gets
nothing but the body (`relume.chaos.sim.second_answers`).
"""

from __future__ import annotations

import zlib

import msgspec
from msgspec import Struct


class RequestBody(Struct, frozen=True, omit_defaults=True, kw_only=True):
    """As `message_ports.Ask` has them."""

    content_id: str
    prompt_tokens: int
    output_tokens: int
    model: str = ""


encode = msgspec.json.encode
_DECODER = msgspec.json.Decoder(RequestBody)
decode = _DECODER.decode


def may_keep(content_id: str) -> bool:
    """Whether its prompt may be kept after its end; one in sixteen clients says no."""
    return zlib.crc32(f"{content_id}:store".encode()) % 16 != 0
