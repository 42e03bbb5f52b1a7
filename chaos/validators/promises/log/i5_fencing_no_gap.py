"""I5: no append by a fenced epoch, no gap in a stream.

Segments of a stream are numbered without gap, and their positions join. Where the log shows owners,
their epoch is that of the live owner key. An epoch never writes after a later one.
"""

from __future__ import annotations

from collections.abc import Sequence

from relume.chaos.validators.records import ClientRecord, Violation
from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import Segment

PROMISE = "I5"


def check(groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord]) -> list[Violation]:
    """Appends that etcd should have refused, and holes."""
    out: list[Violation] = []
    owners: dict[str, int] = {}
    last: dict[str, Segment] = {}
    for group in groups:
        # An owner creates its key before its first segment, so in a transaction that does both,
        # the key counts.
        owners.update((stream, epoch) for stream, epoch in group.owners if epoch)
        for segment in group.segments:
            wrong = _wrong(segment, last.get(segment.stream), owners.get(segment.stream))
            out.extend(Violation(PROMISE, segment.stream, text, group.revision) for text in wrong)
            last[segment.stream] = segment
        owners.update((stream, 0) for stream, epoch in group.owners if not epoch)
    return out


def _wrong(segment: Segment, before: Segment | None, owner: int | None) -> list[str]:
    texts = []
    seq, position, epoch = (
        (before.seq, before.last, before.epoch) if before is not None else (0, 0, 0)
    )
    if segment.seq != seq + 1:
        texts.append(f"segment {segment.seq} follows segment {seq}")
    if segment.first != position + 1:
        texts.append(f"position {segment.first} follows position {position}")
    if segment.epoch < epoch:
        texts.append(f"epoch {segment.epoch} wrote after epoch {epoch}")
    if owner is not None and segment.epoch != owner:
        holder = f"epoch {owner} owned it" if owner else "it had no owner"
        texts.append(f"epoch {segment.epoch} wrote while {holder}")
    return texts
