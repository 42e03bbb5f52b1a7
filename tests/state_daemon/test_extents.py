"""The allocator never overlaps, never loses bytes, and accounts for whole pages."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.engine_shim.checkpoints.daemon.store.arena import overlaps
from relume.engine_shim.checkpoints.daemon.store.extents import PAGE, Extents, rounded


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 64),
    st.lists(st.tuples(st.booleans(), st.integers(1, 6 * PAGE), st.integers(0, 99)), max_size=80),
)
def test_extents_are_disjoint_and_add_up(pages: int, steps: list[tuple[bool, int, int]]) -> None:
    extents = Extents(pages * PAGE)
    held: dict[int, int] = {}
    for release, length, pick in steps:
        if release and held:
            start = sorted(held)[pick % len(held)]
            assert extents.release(start) == held.pop(start)
        else:
            start = extents.allocate(length)
            need = rounded(length)
            if start is None:
                assert extents.largest_free < need
                continue
            assert all(start + need <= s or s + n <= start for s, n in held.items())
            assert 0 <= start <= extents.capacity - need
            held[start] = need
        assert extents.used == sum(held.values()) <= extents.capacity
        free = extents.free_ranges()
        assert extents.used + sum(n for _, n in free) == extents.capacity
        assert all(a + n < b for (a, n), (b, _) in itertools.pairwise(free)), "coalesced"


def test_a_double_free_is_an_error() -> None:
    extents = Extents(4 * PAGE)
    start = extents.allocate(1)
    assert start is not None
    extents.release(start)
    with pytest.raises(KeyError):
        extents.release(start)


def test_only_what_is_free_and_was_written_is_given_back() -> None:
    free = [(0, 10), (20, 10), (50, 5)]
    assert list(overlaps(free, [(5, 20), (28, 4), (52, 100)])) == [
        (5, 10), (20, 25), (28, 30), (52, 55),
    ]  # fmt: skip
