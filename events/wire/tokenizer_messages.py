"""What a gateway and its tokenising process say to one another: frames of a uint32 LE length,
then msgpack."""

from __future__ import annotations

import struct

import msgspec
from msgspec import Struct

HEADER = struct.Struct("<I")


class CountRequest(Struct, frozen=True, array_like=True, kw_only=True):
    """How many tokens is the prompt of `body`, a completion's or (`chat`) a chat's, and which
    marks has it in blocks of `block_tokens` (0: none are wanted)?"""

    number: int
    model: str
    chat: bool
    block_tokens: int
    body: bytes


class CountReply(Struct, frozen=True, array_like=True):
    """`tokens` of all prompts of the body (-1: unknown, `why`), marks of the first."""

    number: int
    tokens: int
    prefix: bytes = b""
    why: str = ""


def frame(message: Struct) -> bytes:
    """The message with its length in front."""
    data = msgspec.msgpack.encode(message)
    return HEADER.pack(len(data)) + data
