"""Alter a log so well that every crc, hash and chain holds again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from relume.events.log.interface import RevisionGroup
from relume.events.log.segment import GENESIS, Segment, pack, unpack

Place = tuple[int, int, int]
"""Index of the group, of the segment in it, of the record in that."""


def places(groups: Iterable[RevisionGroup], stream: str = "") -> Iterator[tuple[Place, Segment]]:
    """Every record of the log (or of one stream), in total order."""
    for g, group in enumerate(groups):
        for s, segment in enumerate(group.segments):
            if not stream or segment.stream == stream:
                for r in range(len(segment.records)):
                    yield (g, s, r), segment


def edited(
    groups: list[RevisionGroup], place: Place, edit: Callable[[list[bytes], int], None]
) -> list[RevisionGroup]:
    """The log with `edit(records, index)` done to the segment at `place`, chained anew."""
    contents = [[list(s.records) for s in g.segments] for g in groups]
    edit(contents[place[0]][place[1]], place[2])
    return rechained(groups, contents)


def dropped(groups: list[RevisionGroup], place: Place) -> list[RevisionGroup]:
    """The log without one event."""
    return edited(groups, place, lambda records, index: records.__delitem__(index))


def swapped(groups: list[RevisionGroup], place: Place) -> list[RevisionGroup]:
    """The log with an event and the next one of its segment in exchanged order."""

    def swap(records: list[bytes], index: int) -> None:
        records[index], records[index + 1] = records[index + 1], records[index]

    return edited(groups, place, swap)


def replaced(groups: list[RevisionGroup], place: Place, record: bytes) -> list[RevisionGroup]:
    """The log with another event in one place."""
    return edited(groups, place, lambda records, index: records.__setitem__(index, record))


def exchanged(groups: list[RevisionGroup], index: int) -> list[RevisionGroup]:
    """The log with transactions `index` and `index` + 1 in exchanged order."""
    one, two = groups[index], groups[index + 1]
    first = RevisionGroup(one.revision, two.segments, two.owners)
    second = RevisionGroup(two.revision, one.segments, one.owners)
    return [*groups[:index], first, second, *groups[index + 2 :]]


def rechained(
    groups: list[RevisionGroup], contents: list[list[list[bytes]]]
) -> list[RevisionGroup]:
    """`groups` with other records; numbers, positions, hashes made right throughout."""
    heads: dict[str, tuple[int, bytes, int]] = {}
    out = []
    for group, listed in zip(groups, contents, strict=True):
        segments = []
        for old, records in zip(group.segments, listed, strict=True):
            if old.records and not records:
                continue
            seq, previous, first = heads.get(old.stream, (0, GENESIS, 1))
            packed = pack(old.stream, old.epoch, seq + 1, first, previous, records, old.at_ms)
            segment = unpack(packed)
            heads[old.stream] = (segment.seq, segment.hash, segment.last + 1)
            segments.append(segment)
        if segments or group.owners:
            out.append(RevisionGroup(group.revision, tuple(segments), group.owners))
    return out
