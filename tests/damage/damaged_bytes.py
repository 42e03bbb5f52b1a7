"""Damage as disks and crashes do it, drawn by hypothesis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Damage = Callable[[bytes], bytes]


@st.composite
def damage(draw: Any) -> Damage:
    """A function that damages bytes: some flip, are cut off, lost from the middle, zeroed or added."""
    kind = draw(st.sampled_from(("flip", "cut", "lose", "zero", "add")))
    at, length = draw(st.floats(0, 1)), draw(st.integers(1, 40))
    mask, more = draw(st.integers(1, 255)), draw(st.binary(min_size=1, max_size=40))

    def damaged(data: bytes) -> bytes:
        place = int(at * max(len(data) - 1, 0))
        if kind == "flip":
            flipped = bytes([data[place] ^ mask]) if data else b""
            return data[:place] + flipped + data[place + 1 :]
        if kind == "cut":
            return data[:place]
        if kind == "lose":
            return data[:place] + data[place + length :]
        if kind == "zero":
            zeroed = min(length, len(data) - place)
            return data[:place] + bytes(zeroed) + data[place + zeroed :]
        return data[:place] + more + data[place:] if draw_in_middle else data + more

    draw_in_middle = draw(st.booleans())
    return damaged
