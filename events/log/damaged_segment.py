"""Segments that no reader uses: damaged bytes, or a segment that does not continue its stream.

That holds for the streams of workers. Anything else in the log can still be read, and one worker, or one
damaged key, must not end all replicas. The stream stands until a segment continues what was read of it.

In any other stream such a segment raises CorruptSegment or BrokenChain: a log without what replicas and
their leader wrote is another log. Only a stray key is skipped there too. It holds no segment, and it was
written when its number was not the stream's next one. The writer of a stream writes the next number
alone, and only where there is no key. So no segment ever stood there, and no decision is missing.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from relume.events.log.errors import BrokenChain
from relume.events.log.segment import Chain, Segment


class DamagedSegment(Struct, frozen=True, kw_only=True):
    """Segment `seq` of `stream` is skipped. The stream is read up to segment `after` (0: nothing of
    it), until one follows that."""

    stream: str
    seq: int
    after: int
    reason: str


OnDamage = Callable[[str, int, str], None]
"""Called with stream, number and reason."""


def may_be_skipped(stream: str) -> bool:
    """Whether the log can be read without some segments of the stream."""
    return stream.startswith("w.")


def unless_skipped(stream: str) -> OnDamage | None:
    """For a reader that ignores stray keys of the stream, unless damaged segments of it may be skipped."""
    return None if may_be_skipped(stream) else ignore_damage


def ignore_damage(stream: str, seq: int, reason: str) -> None:
    """An `OnDamage` of readers beside the fold: the log reader of each replica names what is skipped."""


def is_stray(seq: int, last: int) -> bool:
    """Whether number `seq` cannot be the next one of a stream that ends at segment `last`, nor one that
    was there before."""
    return not seq or seq > last + 1


def continues(chain: Chain, segment: Segment, on_damage: OnDamage) -> bool:
    """Whether the segment continues its stream; False if it is skipped. Raises BrokenChain."""
    try:
        chain.check(segment)
    except BrokenChain as error:
        if not may_be_skipped(segment.stream):
            raise
        on_damage(segment.stream, segment.seq, error.detail)
        return False
    return True
