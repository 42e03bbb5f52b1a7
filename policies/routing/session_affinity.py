"""Which worker a session belongs to: consistent hashing with bounded loads (Mirrokni, Thorup and
Zadimoghaddam, 2018). A worker that joins or leaves moves its share of the sessions only; one
that has too much passes new requests on to the next of the ring.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from hashlib import blake2b

POINTS = 32
"""Of each worker on the ring."""


def place(text: str) -> int:
    """Where `text` lies on the ring."""
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


class Ring:
    """Of workers, numbered in the order given."""

    def __init__(self, names: Iterable[str]) -> None:
        points = [
            (place(f"{name}#{number}"), at)
            for at, name in enumerate(names)
            for number in range(POINTS)
        ]
        points.sort()
        self._places = [where for where, _ in points]
        self._owners = [at for _, at in points]

    def from_(self, session: str) -> Iterator[int]:
        """Workers from where `session` belongs on, each once."""
        begin = bisect_left(self._places, place(session))
        seen = set()
        count = len(self._owners)
        for number in range(begin, begin + count):
            at = self._owners[number % count]
            if at not in seen:
                seen.add(at)
                yield at
