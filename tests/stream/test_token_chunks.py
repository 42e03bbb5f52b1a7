"""The hot path takes a chunk only if the parser reads the same in it."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relume.controlplane.stream.answer import DONE, Answer
from relume.controlplane.stream.event_ids import Stamp
from relume.events.wire.frames import Tokens, encode_tokens, read_frames

EVENT = b'data: {"text":" a"}\n\n'
AT = 12


def chunk_of(frame: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(frame), frame)


def answers() -> list[Answer]:
    """With `AT` tokens held: one whose events carry no ids, and one whose events do."""
    plain, stamped = Answer(), Answer(Stamp("r", "t"))
    for answer in (plain, stamped):
        answer.add(answer.ids, list(range(AT)))
    return [plain, stamped]


@pytest.mark.parametrize("with_ids", [False, True])
def test_a_frame_of_one_token_is_taken(with_ids: bool) -> None:
    answer = answers()[with_ids]
    take = answer.take_with_id if with_ids else answer.take
    line = b"id: r:t:13\n" if with_ids else b""
    shown = take(chunk_of(encode_tokens(AT, [7], EVENT)), 1.0)
    assert shown == chunk_of(line + EVENT)
    assert answer.ids[-1] == 7 and len(answer.ids) == AT + 1


GOOD = chunk_of(encode_tokens(AT, [123], EVENT))
NEAR = (
    chunk_of(encode_tokens(AT + 1, [7], EVENT)),
    chunk_of(encode_tokens(AT, [7], b"")),
    chunk_of(encode_tokens(AT, [7, 8], EVENT)),
    chunk_of(encode_tokens(AT, [7], EVENT, 0)),
    chunk_of(encode_tokens(AT, [1_234_567_890], EVENT)),
    chunk_of(encode_tokens(AT, [7], EVENT + DONE)),
    chunk_of(encode_tokens(AT, [7], EVENT)) + chunk_of(encode_tokens(AT + 1, [8], EVENT)),
    chunk_of(b":r 12 9 7")[:-2],
    b"9\r\n:r 12 -1 7\n\n",
    b"b\r\n:r 12 0 7\n\r\n",
    b"e\r\n:r 12 13 1234",
    GOOD[:-1],
    GOOD.replace(b" 123", b" +12"),
    GOOD.replace(b" 123", b" 1_2"),
    GOOD.replace(b" 123", b"  12"),
)


@pytest.mark.parametrize("with_ids", [False, True])
@pytest.mark.parametrize("data", NEAR)
def test_what_is_not_just_so_is_left_to_the_parser(data: bytes, with_ids: bool) -> None:
    answer = answers()[with_ids]
    take = answer.take_with_id if with_ids else answer.take
    assert take(data, 1.0) is None
    assert len(answer.ids) == AT


@given(
    st.integers(0, len(GOOD) - 1),
    st.integers(0, 3),
    st.lists(st.sampled_from([*b"0129 :rc-+_\n\r"]), max_size=3).map(bytes),
)
@example(0, 0, b"")
def test_what_is_taken_is_what_the_parser_reads(at: int, dropped: int, put: bytes) -> None:
    data = GOOD[:at] + put + GOOD[at + dropped :]
    for answer in answers():
        take = answer.take if answer.stamp is None else answer.take_with_id
        shown = take(data, 1.0)
        if shown is None:
            assert len(answer.ids) == AT
            continue
        size, _, rest = data.partition(b"\r\n")
        assert int(size, 16) == len(rest) - 2
        (frame,) = read_frames(rest[:-2])
        assert frame == Tokens(AT, (answer.ids[-1],), rest[rest.index(b"\n") + 1 : -2])
        assert shown.endswith(frame.payload + rest[-2:])
