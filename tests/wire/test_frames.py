"""What the frame parser does besides its properties (`frame_codec`)."""

from __future__ import annotations

import time

import pytest

from relume.events.wire.errors import FrameError
from relume.events.wire.frames import FrameParser
from tests.wire.frame_codec import Sink


def test_frames_before_the_garbage_are_handed_on():
    sink = Sink()
    with pytest.raises(FrameError):
        FrameParser(sink).feed(b":r 0 2 7\nab:r 1 2 8\ncdgarbage\n")
    assert sink.tokens == [(0, 7), (1, 8)] and sink.shown == b"abcd"


def test_large_payload_in_small_pieces_takes_linear_time():
    body = b"x" * (8 << 20)
    raw = b":w 200 %d\n" % len(body) + body
    sink = Sink()
    parser = FrameParser(sink)
    began = time.process_time()
    for at in range(0, len(raw), 1024):
        parser.feed(raw[at : at + 1024])
    assert sink.frames == [("response", 200, body)]
    assert time.process_time() - began < 1.0
