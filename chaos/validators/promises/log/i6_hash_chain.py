"""I6: the hash chain holds, across archive and etcd.

Every segment has the hash that it states, and names the hash of the one before it.
"""

from __future__ import annotations

from collections.abc import Sequence

from relume.chaos.validators.records import ClientRecord, Violation
from relume.events.log.errors import BrokenChain, CorruptSegment
from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import Chain, Segment, repack

PROMISE = "I6"


def check(groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord]) -> list[Violation]:
    """Segments with a wrong hash, and broken links (the first per stream)."""
    out = []
    chain = Chain()
    broken: set[str] = set()
    for group in groups:
        for segment in group.segments:
            if not _sound(segment):
                text = f"segment {segment.seq} is not what it hashes to"
                out.append(Violation(PROMISE, segment.stream, text, group.revision))
            if segment.stream in broken:
                continue
            try:
                chain.check(segment)
            except BrokenChain as error:
                broken.add(segment.stream)
                out.append(Violation(PROMISE, segment.stream, str(error), group.revision))
    return out


def _sound(segment: Segment) -> bool:
    try:
        repack(segment)
    except CorruptSegment:
        return False
    return True
