"""The frame parser: any split of the bytes gives the same frames, garbage gives errors."""

from __future__ import annotations

import time
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.controlplane.gateway.errors import FrameError
from relume.controlplane.gateway.frames import MAX_HEADER_BYTES, MAX_PAYLOAD_BYTES, FrameParser


class Sink:
    """Notes what it gets; runs are taken apart into tokens and joined bytes."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, int]] = []
        self.shown = b""
        self.others: list[tuple] = []

    def on_tokens(self, start, ids, shown):
        self.tokens += [(start + i, token) for i, token in enumerate(ids)]
        if not ids:
            self.others.append(("bare", start, len(self.tokens)))
        self.shown += b"".join(shown)

    def on_choice(self, choice, start, ids, shown):
        self.others.append(("choice", choice, start, tuple(ids), shown))

    def on_whole(self, status, payload):
        self.others.append(("whole", status, payload))

    def on_end(self, reason):
        self.others.append(("end", reason))

    def on_broken(self, kind, message):
        self.others.append(("broken", kind, message))


payloads = st.binary(max_size=60)
token = st.integers(0, 0xFFFFFFFF)


@st.composite
def bodies(draw):
    """(bytes of a body, tokens, shown bytes)."""
    out, tokens, shown = b"", [], b""
    for ids, payload in draw(
        st.lists(st.tuples(st.lists(token, max_size=4), payloads), max_size=12)
    ):
        start = len(tokens) if ids or draw(st.booleans()) else -1
        kind = b":r"
        if draw(st.booleans()) and draw(st.booleans()):
            kind = b":c %d" % draw(st.integers(0, 9))
        out += b" ".join([kind, b"%d" % start, b"%d" % len(payload), *(b"%d" % i for i in ids)])
        out += b"\n" + payload
        if kind == b":r":
            tokens += ids
            shown += payload
    ending = draw(st.sampled_from([b":e stop\n", b":x engine 3\nbad", b":w 200 4\n{\n\n}:e -\n"]))
    return out + ending, tokens, shown


@settings(max_examples=300, deadline=None)
@given(bodies(), st.lists(st.integers(0, 2000), max_size=12))
def test_any_split_gives_the_same_frames(body, cuts):
    data, tokens, shown = body
    whole, pieces = Sink(), Sink()
    FrameParser(whole).feed(data)
    parser = FrameParser(pieces)
    bounds = sorted({0, len(data), *(c for c in cuts if c < len(data))})
    for low, high in pairwise(bounds):
        parser.feed(data[low:high])
    assert whole.tokens == pieces.tokens == list(enumerate(tokens))
    assert whole.shown == pieces.shown == shown
    assert whole.others == pieces.others


@settings(max_examples=300, deadline=None)
@given(bodies(), st.data())
def test_a_cut_body_hands_on_whole_frames_only(body, data):
    raw, tokens, shown = body
    cut = data.draw(st.integers(0, len(raw)))
    sink = Sink()
    FrameParser(sink).feed(raw[:cut])
    assert sink.tokens == list(enumerate(tokens))[: len(sink.tokens)]
    assert shown.startswith(sink.shown)


@settings(max_examples=500, deadline=None)
@given(st.binary(max_size=200), st.integers(1, 50))
def test_garbage_is_an_error_or_waits_but_never_anything_else(raw, piece):
    parser = FrameParser(Sink())
    try:
        for at in range(0, len(raw), piece):
            parser.feed(raw[at : at + piece])
    except FrameError:
        pass


@settings(max_examples=300, deadline=None)
@given(bodies(), st.data())
def test_a_flipped_byte_never_breaks_the_parser(body, data):
    raw = bytearray(body[0])
    raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
    try:
        FrameParser(Sink()).feed(bytes(raw))
    except FrameError:
        pass


@pytest.mark.parametrize(
    "raw",
    [
        b"nothing",
        b":r 0 -1 5\n",
        b":r 0 %d 5\n" % (MAX_PAYLOAD_BYTES + 1),
        b":w 200 %d\n" % (MAX_PAYLOAD_BYTES + 1),
        b":w 99 0\n",
        b":w 200 -3\n",
        b":e\n",
        b":c 0 0\n",
        b":c -1 0 0 5\n",
        b":c 0 0 -1 5\n",
        b":c 0 0 1 x\nx",
        b":c 0 0 %d 5\n" % (MAX_PAYLOAD_BYTES + 1),
        b":r 0 " + b"9" * 5000 + b" 1\n",
        b":r " + b"9" * 5000 + b" 1 1\nx",
        b":r 0 1 " + b"9" * 5000 + b"\nx",
        b":x engine " + b"9" * 5000 + b"\n",
        b":e \n",
        b":e " + b"x" * 65 + b"\n",
        b":x engine\n",
        b":r 0 1 1.5\nx",
        b":r  0 1 1\nx",
        b":e stop\n:e stop\n",
        b"\xff\xfe\n",
    ],
)
def test_what_is_no_frame_raises(raw):
    with pytest.raises(FrameError):
        FrameParser(Sink()).feed(raw)


def test_frames_before_the_garbage_are_handed_on():
    sink = Sink()
    with pytest.raises(FrameError):
        FrameParser(sink).feed(b":r 0 2 7\nab:r 1 2 8\ncdgarbage\n")
    assert sink.tokens == [(0, 7), (1, 8)] and sink.shown == b"abcd"


def test_bytes_after_the_end_raise_also_in_a_later_read():
    parser = FrameParser(Sink())
    parser.feed(b":e stop\n")
    with pytest.raises(FrameError):
        parser.feed(b":r 0 0 1\n")


def test_header_without_end_is_bounded():
    parser = FrameParser(Sink())
    with pytest.raises(FrameError):
        for _ in range(MAX_HEADER_BYTES // 1000 + 2):
            parser.feed(b":" + b"1" * 999)


def test_large_payload_in_small_pieces_takes_linear_time():
    body = b"x" * (8 << 20)
    raw = b":w 200 %d\n" % len(body) + body
    sink = Sink()
    parser = FrameParser(sink)
    began = time.process_time()
    for at in range(0, len(raw), 1024):
        parser.feed(raw[at : at + 1024])
    assert sink.others[0][2] == body
    assert time.process_time() - began < 1.0
