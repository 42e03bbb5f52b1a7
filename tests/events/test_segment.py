"""Segments and their chain."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.events.log.errors import BrokenChain, CorruptSegment
from relume.events.log.segment import GENESIS, MAX_SEGMENT_BYTES, Chain, pack, unpack

records = st.lists(st.binary(max_size=200), max_size=20)
names = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=30)


@settings(max_examples=200, deadline=None)
@given(
    names,
    st.integers(0, 2**62),
    st.integers(1, 2**62),
    st.integers(1, 2**62),
    st.binary(min_size=16, max_size=16),
    records,
    st.integers(0, 2**62),
)
def test_round_trip(
    stream: str, epoch: int, seq: int, first: int, previous: bytes, held: list[bytes], at_ms: int
) -> None:
    data = pack(stream, epoch, seq, first, previous, held, at_ms)
    s = unpack(data)
    assert (s.stream, s.epoch, s.seq, s.first, s.previous) == (stream, epoch, seq, first, previous)
    assert (list(s.records), s.at_ms, s.last) == (held, at_ms, first + len(held) - 1)
    assert pack(stream, epoch, seq, first, previous, s.records, at_ms) == data


@settings(max_examples=200, deadline=None)
@given(records, st.data())
def test_any_flipped_byte_is_found(held: list[bytes], data: Any) -> None:
    packed = bytearray(pack("w.w0", 5, 1, 1, GENESIS, held))
    at = data.draw(st.integers(0, len(packed) - 1))
    packed[at] ^= data.draw(st.integers(1, 255))
    with pytest.raises(CorruptSegment):
        unpack(bytes(packed))


@settings(max_examples=100, deadline=None)
@given(records, st.data())
def test_any_cut_is_found(held: list[bytes], data: Any) -> None:
    packed = pack("w.w0", 5, 1, 1, GENESIS, held)
    with pytest.raises(CorruptSegment):
        unpack(packed[: data.draw(st.integers(0, len(packed) - 1))])


@given(st.binary(max_size=100))
def test_arbitrary_bytes_are_refused_by_type(data: bytes) -> None:
    with pytest.raises(CorruptSegment):
        unpack(data)


def test_too_large_is_refused() -> None:
    with pytest.raises(CorruptSegment):
        pack("w.w0", 1, 1, 1, GENESIS, [bytes(MAX_SEGMENT_BYTES + 8192)])


def chain_of(count: int) -> list[Any]:
    segments, previous, first = [], GENESIS, 1
    for seq in range(1, count + 1):
        segments.append(unpack(pack("w.w0", 9, seq, first, previous, [b"a", b"b"])))
        previous, first = segments[-1].hash, first + 2
    return segments


def test_chain_accepts_what_follows() -> None:
    chain = Chain()
    for segment in chain_of(5):
        chain.check(segment)
    assert chain.heads["w.w0"][0] == 5


@pytest.mark.parametrize("order", [[1, 2, 4], [1, 3, 2], [1, 1], [2]])
def test_chain_finds_drops_swaps_and_repeats(order: list[int]) -> None:
    segments = chain_of(5)
    chain = Chain()
    with pytest.raises(BrokenChain):
        for seq in order:
            chain.check(segments[seq - 1])


def test_chain_finds_a_replaced_predecessor() -> None:
    one, two = chain_of(2)
    other = unpack(pack("w.w0", 9, 1, 1, GENESIS, [b"a", b"c"]))
    chain = Chain()
    chain.check(other)
    assert one.hash != other.hash
    with pytest.raises(BrokenChain, match="another predecessor"):
        chain.check(two)
