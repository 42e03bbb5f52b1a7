"""Keys of a stream that have no segment of it: damaged bytes, or one that does not continue it.

No reader uses such a segment of a worker's stream. Anything else in the log can still be read, and one
worker, or one damaged key, must not end all replicas. The stream stands until a segment continues what
was read of it. In any other stream the segment raises CorruptSegment or BrokenChain: a log without
what replicas and their leader wrote is another log.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct


class DamagedSegment(Struct, frozen=True, kw_only=True):
    """Segment `seq` of `stream` cannot be used. Nothing after segment `after` is read (0: nothing)
    until one follows it."""

    stream: str
    seq: int
    after: int
    reason: str


OnDamage = Callable[[str, int, str], None]
"""Called with stream, number and reason."""


def may_be_skipped(stream: str) -> bool:
    """Whether the log can be read without such a segment of the stream."""
    return stream.startswith("w.")
