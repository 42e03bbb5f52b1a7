"""A value that changes along the log, and what it was at any place."""

from __future__ import annotations

from bisect import bisect_right
from typing import Generic, TypeVar

T = TypeVar("T")


class History(Generic[T]):
    """A value that changes at places: revisions, or positions of one stream. Places come in order;
    of several changes at one place the last counts."""

    __slots__ = ("_places", "_values")

    def __init__(self, first: T) -> None:
        self._places = [-1]
        self._values = [first]

    def set(self, place: int, value: T) -> None:
        """The value from `place` on."""
        self._places.append(place)
        self._values.append(value)

    def at(self, place: int) -> T:
        """The value that is known at this place."""
        if place >= self._places[-1]:  # as almost always
            return self._values[-1]
        return self._values[bisect_right(self._places, place) - 1]

    @property
    def last(self) -> T:
        """The value at the end."""
        return self._values[-1]
