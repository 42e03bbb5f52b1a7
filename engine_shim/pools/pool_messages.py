"""What engines and the state daemon say about pools: one message per packet of a Unix socket.

A descriptor goes along with `Filling` and `Opened` (SCM_RIGHTS). The connection is the engine's hold
on what it opened: when it ends, an unfinished pool is dropped, and a finished one may be evicted.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from relume.events.decode_errors import UNREADABLE

MAX_PACKET = 4096
DIGEST_BYTES = 32
Name = Annotated[str, Meta(min_length=1, max_length=200)]
Digest = Annotated[bytes, Meta(min_length=DIGEST_BYTES, max_length=DIGEST_BYTES)]


class Malformed(ValueError):
    """A packet that is none of ours."""


class Open(Struct, frozen=True, tag="open"):
    """The pool of that name and size in bytes, or memory for it."""

    name: Name
    size: Annotated[int, Meta(gt=0)]


class Seal(Struct, frozen=True, tag="seal"):
    """The pool that this connection fills is whole, and has this digest."""

    name: Name
    digest: Digest


class Drop(Struct, frozen=True, tag="drop"):
    """No one shall open the pool any more: it does not have its digest."""

    name: Name


class Filling(Struct, frozen=True, tag="filling"):
    """The asking engine is to fill it."""


class Opened(Struct, frozen=True, tag="opened"):
    """It is sealed."""

    digest: Digest


class Busy(Struct, frozen=True, tag="busy"):
    """Another engine fills it."""


class Done(Struct, frozen=True, tag="done"):
    """Sealed, or dropped."""


class Refused(Struct, frozen=True, tag="refused"):
    """Why not, in words with the remedy."""

    why: str


Request = Open | Seal | Drop
Answer = Filling | Opened | Busy | Done | Refused

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def encode(message: Request | Answer) -> bytes:
    return _encoder.encode(message)


def decode_request(packet: bytes) -> Request:
    """Raises Malformed."""
    try:
        return _requests.decode(packet)
    except UNREADABLE as error:
        raise Malformed(str(error)) from None


def decode_answer(packet: bytes) -> Answer:
    """Raises Malformed."""
    try:
        return _answers.decode(packet)
    except UNREADABLE as error:
        raise Malformed(str(error)) from None
