"""A resumption: how a gateway informs a worker what the client already has of an answer.

The header `x-relume-resume` is `<mode> <n>[:<m>][,<n>[:<m>]...]`, one part per choice. The body
of the call is the client's body, then the n token ids of each choice (uint32, little-endian),
then the m noted bytes of each choice.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Literal

from msgspec import Struct

from relume.events.wire.errors import HeaderError
from relume.events.wire.headers import RESUME, parse_number

Mode = Literal["continue", "replay"]
MODES: dict[str, Mode] = {"continue": "continue", "replay": "replay"}
ID_BYTES = 4


class DeliveredChoice(Struct, frozen=True):
    """What the client has of one choice: its tokens, and of an answer in one piece what the
    engine noted beside them."""

    ids: tuple[int, ...] = ()
    note: bytes = b""


class Resume(Struct, frozen=True):
    """How to take the request up again, and what was delivered of each choice.

    `continue`: compute the next tokens. `replay`: compute all tokens again and compare.
    """

    mode: Mode
    choices: tuple[DeliveredChoice, ...] = ()

    @classmethod
    def of(cls, mode: Mode, ids: Sequence[int]) -> Resume:
        """Of a request with one choice."""
        return cls(mode, (DeliveredChoice(tuple(ids)),))

    def choice(self, index: int) -> DeliveredChoice:
        """What was delivered of choice `index`; nothing of one that is not named."""
        return self.choices[index] if index < len(self.choices) else DeliveredChoice()


def format_resume(
    mode: str, choices: Iterable[tuple[Sequence[int], bytes | bytearray]]
) -> tuple[str, bytes]:
    """The header's value and the bytes that follow the client's body.

    `choices`: token ids and the noted bytes of each.
    """
    counts, tails, notes = [], [], []
    for ids, note in choices:
        counts.append(f"{len(ids)}:{len(note)}" if note else f"{len(ids)}")
        tails.append(struct.pack(f"<{len(ids)}I", *ids))
        notes.append(note)
    return f"{mode} {','.join(counts)}", b"".join([*tails, *notes])


def parse_resume(header: str, body: bytes) -> tuple[Resume, bytes]:
    """The resumption and the client's own body. Raises HeaderError."""
    name, _, counts = header.partition(" ")
    mode = MODES.get(name)
    if mode is None:
        raise HeaderError(RESUME, f"unknown mode {name[:20]!r}")
    sizes = []
    for count in counts.split(","):
        number, colon, length = count.partition(":")
        sizes.append((parse_number(RESUME, number), parse_number(RESUME, length) if colon else 0))
    size = sum(ID_BYTES * ids + note for ids, note in sizes)
    if size > len(body):
        raise HeaderError(RESUME, f"{counts[:80]} tokens in a body of {len(body)} bytes")
    at = split = len(body) - size
    tails = []
    for ids, _ in sizes:
        tails.append(struct.unpack_from(f"<{ids}I", body, at))
        at += ID_BYTES * ids
    choices = []
    for tail, (_, note) in zip(tails, sizes, strict=True):
        choices.append(DeliveredChoice(tail, body[at : at + note]))
        at += note
    return Resume(mode, tuple(choices)), body[:split]
