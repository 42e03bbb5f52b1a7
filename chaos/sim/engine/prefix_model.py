"""Marks of simulated prompts, whose tokens are segments with ids: the marks that a gateway would
compute from token ids, and those that an engine would report of its prefix cache."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import NamedTuple

from relume.events.wire import prefix


class SegmentMove(NamedTuple):
    """A segment of `blocks` blocks, after `before` others of its prompt, entered a prefix cache,
    or left it."""

    segment: int
    before: int
    blocks: int
    gained: bool


@lru_cache(1 << 14)
def marks_of(segment: int, before: int, blocks: int) -> tuple[int, ...]:
    """Hashes of the prefixes that end within a segment."""
    return tuple(
        int.from_bytes(blake2b(f"{segment}:{at}".encode(), digest_size=8).digest(), "little")
        for at in range(before + 1, before + blocks + 1)
        if prefix.is_mark(at)
    )


def of_prompt(
    segments: Sequence[int], segment_tokens: int, prompt_tokens: int, block_tokens: int
) -> bytes:
    """The marks of a prompt's leading segments; later segments are not shared."""
    if not block_tokens or segment_tokens < block_tokens:
        return b""
    size = segment_tokens // block_tokens
    found: list[int] = []
    most = prefix.marks_in(max(prompt_tokens - 1, 0) // block_tokens)
    for depth, segment in enumerate(segments):
        found += marks_of(segment, depth * size, size)
        if len(found) >= most:
            break
    return prefix.pack(found[: min(most, prefix.MAX_MARKS)])


def changed(moves: Iterable[SegmentMove]) -> tuple[bytes, bytes]:
    """(stored, removed) after moves in their order."""
    stored: dict[int, None] = {}
    removed: dict[int, None] = {}
    for move in moves:
        into, out = (stored, removed) if move.gained else (removed, stored)
        for one in marks_of(*move[:3]):
            if one in out:
                del out[one]
            else:
                into[one] = None
    return prefix.pack([*stored]), prefix.pack([*removed])
