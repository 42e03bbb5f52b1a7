"""I5: no append by a fenced epoch, no gap in a stream.

Segments of a stream are numbered without gap, and their positions join. Where the log shows owners,
their epoch is that of the live owner key. An epoch never writes after a later one.

In simulated runs, one order of the calls to etcd explains what clients saw of each owner key and
manifest (`chaos.call_recorder`): an append that etcd took from a fenced epoch, or an owner that was
read from the past, has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from relume.chaos.validators.ground_truth import GroundTruth
from relume.chaos.validators.records import THE_RUN, ClientRecord, Violation
from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import Segment

PROMISE = "I5"


def check(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    truth: GroundTruth | None = None,
) -> list[Violation]:
    """Appends that etcd should have refused, holes, and answers of etcd that fit no order of calls."""
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
    if truth is not None and truth.etcd_keys is not None:
        out.extend(_impossible(truth.etcd_keys))
    return out


def _impossible(keys: Mapping[str, str | None]) -> Iterator[Violation]:
    if not keys:
        yield Violation(PROMISE, THE_RUN, "no client wrote an owner key or a manifest", 0)
    for key, why in keys.items():
        if why is None:
            yield Violation(PROMISE, THE_RUN, f"too many orders of the calls on {key}", 0)
        elif why:
            yield Violation(PROMISE, key, why, 0)


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
