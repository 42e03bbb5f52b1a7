"""Sets of whole numbers as sorted, disjoint, half-open spans `(start, end)`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Span = tuple[int, int]
Spans = tuple[Span, ...]


def normal(spans: Iterable[Span]) -> Spans:
    """Sorted, without empty ones, touching and overlapping ones joined."""
    joined: list[Span] = []
    for start, end in sorted(span for span in spans if span[0] < span[1]):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return tuple(joined)


def size(spans: Iterable[Span]) -> int:
    """How many numbers disjoint `spans` hold."""
    return sum(end - start for start, end in spans)


def common(first: Sequence[Span], second: Sequence[Span]) -> Spans:
    """What both hold; both normal."""
    found: list[Span] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            found.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return tuple(found)


def without(spans: Sequence[Span], taken: Sequence[Span]) -> Spans:
    """What `spans` hold and `taken` do not; both normal."""
    left: list[Span] = []
    for start, end in spans:
        for cut, resume in taken:
            if resume <= start or cut >= end:
                continue
            if start < cut:
                left.append((start, cut))
            start = max(start, resume)
        if start < end:
            left.append((start, end))
    return tuple(left)


def cut(spans: Sequence[Span], count: int) -> tuple[Spans, Spans]:
    """The first `count` numbers of `spans`, and the others."""
    head: list[Span] = []
    tail: list[Span] = []
    for start, end in spans:
        taken = max(0, min(end - start, count))
        count -= taken
        if taken:
            head.append((start, start + taken))
        if start + taken < end:
            tail.append((start + taken, end))
    return tuple(head), tuple(tail)
