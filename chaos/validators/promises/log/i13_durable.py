"""I13: every acknowledged append is readable, with the same hash.

`landed` has the appends acknowledged to writers as durable (`StreamWriter.on_landed`), as the runner
recorded them. The hash follows from the chain: I6 has checked the chain with the acknowledged
segment to the end of its stream.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from relume.chaos.validators.records import ClientRecord, Violation
from relume.events.log.interface import LandedSegment, RevisionGroup
from relume.events.log.segment import Segment

PROMISE = "I13"


def check(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    landed: Iterable[LandedSegment] = (),
) -> list[Violation]:
    """Acknowledged segments that are missing or differ."""
    held: dict[tuple[str, int], tuple[int, Segment]] = {
        (segment.stream, segment.seq): (group.revision, segment)
        for group in groups
        for segment in group.segments
    }
    out = []
    for ack in landed:
        found = held.get((ack.stream, ack.seq))
        if found is None:
            text = f"segment {ack.seq} was acknowledged and is gone"
            out.append(Violation(PROMISE, ack.stream, text, ack.revision))
            continue
        revision, segment = found
        acknowledged = ack.revision, ack.first, ack.last
        here = revision, segment.first, segment.last
        if acknowledged != here:
            text = f"segment {ack.seq} was acknowledged as {acknowledged}, it is {here}"
            out.append(Violation(PROMISE, ack.stream, text, ack.revision))
    return out
