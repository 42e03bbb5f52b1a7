"""Properties of the frame codec. Each takes the codec's module, so that planted bugs can be tried."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relume.events.wire.errors import FrameError
from tests.wire.properties import some_examples

INDEX = st.integers(0, 999_999_999)
TOKEN = st.integers(0, 0xFFFFFFFF)
PAYLOAD = st.one_of(
    st.binary(max_size=40),
    st.sampled_from([b"", b"\n", b":e stop\n", b":r 0 0 5\n", b"data: {}\n\n", b"x" * 3000]),
)
WORD = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=64)

Shown = tuple[Any, ...]


def tokens(choices: st.SearchStrategy[int]) -> st.SearchStrategy[Shown]:
    """(tokens, choice, start, ids, payload)."""
    ids = st.lists(TOKEN, max_size=5).map(tuple)
    return st.tuples(st.just("tokens"), choices, INDEX, ids, PAYLOAD)


@st.composite
def decoding(draw: st.DrawFn) -> list[Shown]:
    """What a decoding engine sends: a token a frame, or several, numbered in order; now and then
    one that leaves a gap or overlaps."""
    start = draw(st.integers(10, 1000))
    most = draw(st.sampled_from([1, 3]))
    found = []
    for gap in draw(st.lists(st.sampled_from([0, 0, 0, 1, -1, -1]), max_size=10)):
        start += gap
        ids = draw(st.lists(st.integers(0, 999_999_999), min_size=1, max_size=most))
        found.append(("tokens", -1, start, tuple(ids), draw(PAYLOAD)))
        start += len(ids)
    return found


ANY = st.one_of(
    tokens(st.just(-1)),
    tokens(st.integers(0, 999)),
    st.tuples(st.just("tokens"), st.just(-1), st.just(-1), st.just(()), PAYLOAD),
    st.tuples(st.just("response"), st.integers(200, 599), PAYLOAD),
    st.tuples(st.just("envelope"), PAYLOAD),
)
LAST = st.one_of(
    st.tuples(st.just("end"), WORD), st.tuples(st.just("failure"), WORD, st.text(max_size=20))
)
BODIES = st.builds(
    lambda head, run, rest, last: [*head, *run, *rest, last],
    st.lists(ANY, max_size=3),
    decoding(),
    st.lists(ANY, max_size=3),
    LAST,
)


def run(start: int, ids: tuple[int, ...], payload: bytes = b"abc") -> Shown:
    return ("tokens", -1, start, ids, payload)


# Bodies that are always tried: each kind of frame, runs that go on, overlap and leave gaps, after
# frames of one token and of several, and payloads that look like frames.
OF_EACH_KIND: list[Shown] = [
    ("envelope", b'{"path":"p"}\n'),
    run(10, (1,)), run(11, (2,)), run(11, (3,)), run(12, (4,)), run(20, (5,)),
    run(31, (6, 7)), run(33, (8, 9)), run(34, (10,)), run(35, (11,), b""), run(36, (12, 13, 14)),
    run(37, (15,)), run(39, (16,)), run(40, (17,), b":r 0 0 5\n"), run(-1, ()), run(7, ()),
    ("tokens", 0, 5, (1,), b"x"), ("tokens", 3, 8, (1, 2), b""), ("tokens", 12, 0, (), b":e stop\n"),
    ("response", 200, b"{}"), ("response", 599, b""),
    ("failure", "engine", "\u00e9nde"),
]  # fmt: skip
SINGLE: list[Shown] = [
    run(10, (1,)), run(11, (2,)), run(12, (3,)), run(12, (4,)), run(13, (5,)), run(15, (6,)),
    run(16, (7,), b""), run(17, (8,)), ("end", "stop"),
]  # fmt: skip
LARGE: list[Shown] = [run(1, (5,), b"x" * 3000), run(2, (6, 0xFFFFFFFF)), ("end", "stop")]
EVERY_THIRD = list(range(0, 10_000, 3))


def by_the_book(frame: Shown) -> bytes:
    """The frame's bytes, written down from docs/reference/worker-protocol.md."""
    match frame:
        case ("tokens", choice, start, ids, payload):
            kind = [":c", choice] if choice >= 0 else [":r"]
            words = [*kind, start, len(payload), *ids]
        case ("response", status, payload):
            words = [":w", status, len(payload)]
        case ("envelope", payload):
            words = [":v", len(payload)]
        case ("end", reason):
            words, payload = [":e", reason], b""
        case ("failure", kind, message):
            payload = message.encode()
            words = [":x", kind, len(payload)]
    return " ".join(map(str, words)).encode() + b"\n" + payload


def encoded(codec: Any, frame: Shown) -> bytes:
    match frame:
        case ("tokens", choice, start, ids, payload):
            return codec.encode_tokens(start, ids, payload, choice)
        case ("response", status, payload):
            return codec.encode_response(status, payload)
        case ("envelope", payload):
            return codec.encode_envelope(payload)
        case ("end", reason):
            return codec.encode_end(reason)
        case ("failure", kind, message):
            return codec.encode_failure(kind, message)
    raise AssertionError(frame)


class Sink:
    """Notes frames as `BODIES` has them; a run of tokens token by token, with its joined bytes."""

    def __init__(self) -> None:
        self.frames: list[Shown] = []
        self.tokens: list[tuple[int, int]] = []
        self.shown = b""

    def on_tokens(self, start: int, ids: list[int], shown: list[bytes]) -> None:
        self.tokens += [(start + index, token) for index, token in enumerate(ids)]
        self.shown += b"".join(shown)
        if len(shown) > 1:
            for index, payload in enumerate(shown):
                self.frames.append(("tokens", -1, start + index, (ids[index],), payload))
        else:
            self.frames.append(("tokens", -1, start, tuple(ids), b"".join(shown)))

    def on_choice(self, choice: int, start: int, ids: list[int], shown: bytes) -> None:
        self.frames.append(("tokens", choice, start, tuple(ids), shown))

    def on_whole(self, status: int, payload: bytes) -> None:
        self.frames.append(("response", status, payload))

    def on_envelope(self, payload: bytes) -> None:
        self.frames.append(("envelope", payload))

    def on_end(self, reason: str) -> None:
        self.frames.append(("end", reason))

    def on_broken(self, kind: str, message: str) -> None:
        self.frames.append(("failure", kind, message))


def feed(codec: Any, data: bytes, cuts: list[int], merge: bool = False) -> Sink:
    """What comes of `data`, cut at these places."""
    sink = Sink()
    parser = codec.FrameParser(sink, merge)
    bounds = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for low, high in pairwise(bounds):
        parser.feed(data[low:high])
    assert not parser.is_incomplete
    return sink


CUTS = st.lists(st.integers(0, 10_000), max_size=10)


def the_encoder_writes_what_the_protocol_says(codec: Any) -> None:
    @some_examples
    @example(OF_EACH_KIND)
    @example(SINGLE)
    @example(LARGE)
    @given(BODIES)
    def check(body: list[Shown]) -> None:
        for frame in body:
            assert encoded(codec, frame) == by_the_book(frame)

    check()


def any_cut_gives_the_same_frames(codec: Any) -> None:
    @some_examples
    @example(OF_EACH_KIND, [], False)
    @example(SINGLE, [], False)
    @example(SINGLE, [15, 45], False)
    @example(OF_EACH_KIND, [], True)
    @example(OF_EACH_KIND, EVERY_THIRD, False)
    @example(LARGE, [20, 500], False)
    @given(BODIES, CUTS, st.booleans())
    def check(body: list[Shown], cuts: list[int], bytewise: bool) -> None:
        data = b"".join(map(by_the_book, body))
        cuts = list(range(len(data))) if bytewise and len(data) < 500 else cuts
        assert feed(codec, data, cuts).frames == body
        merged = feed(codec, data, cuts, merge=True)
        plain = [frame for frame in body if frame[0] == "tokens" and frame[1] < 0]
        numbered = [(f[2] + i, token) for f in plain for i, token in enumerate(f[3])]
        assert merged.tokens == numbered
        assert merged.shown == b"".join(frame[4] for frame in plain)
        assert [f for f in merged.frames if f[0] != "tokens" or f[1] >= 0] == [
            f for f in body if f[0] != "tokens" or f[1] >= 0
        ]

    check()


def a_cut_body_gives_its_whole_frames_only(codec: Any) -> None:
    @some_examples
    @example(OF_EACH_KIND, 13)
    @example(OF_EACH_KIND, 40)
    @example(LARGE, 100)
    @given(BODIES, st.integers(0, 10_000))
    def check(body: list[Shown], cut: int) -> None:
        frames = list(map(by_the_book, body))
        data = b"".join(frames)
        cut %= len(data) + 1
        whole, at = 0, 0
        while whole < len(frames) and at + len(frames[whole]) <= cut:
            at += len(frames[whole])
            whole += 1
        sink = Sink()
        parser = codec.FrameParser(sink, False)
        parser.feed(data[:cut])
        assert sink.frames == body[:whole]
        assert parser.is_incomplete == (at < cut)
        if at < cut:
            with pytest.raises(FrameError):
                codec.read_frames(data[:cut])

    check()


def what_is_read_is_what_was_written(codec: Any) -> None:
    """The frames as values, written anew, give the same bytes."""

    @some_examples
    @example(OF_EACH_KIND)
    @example(SINGLE)
    @example(LARGE)
    @given(BODIES)
    def check(body: list[Shown]) -> None:
        data = b"".join(map(by_the_book, body))
        again = b""
        for frame in codec.read_frames(data):
            match frame:
                case codec.Tokens(start, ids, payload, choice):
                    again += codec.encode_tokens(start, ids, payload, choice)
                case codec.Response(status, payload):
                    again += codec.encode_response(status, payload)
                case codec.Envelope(payload):
                    again += codec.encode_envelope(payload)
                case codec.End(reason):
                    again += codec.encode_end(reason)
                case codec.Failure(kind, message):
                    again += codec.encode_failure(kind, message)
        assert again == data

    check()


def malformed_bytes_raise_frame_error_alone(codec: Any) -> None:
    piece = st.sampled_from(
        [b":r", b":c", b":w", b":e", b":x", b" ", b"0", b"7", b"-1", b"1_0", b"+1", b"99999999999",
         b"\n", b"\xff", b"stop", "\u0664".encode(), b"4" * 5000]
    )  # fmt: skip

    @some_examples
    @example(b":r 0 0 1_0", [])
    @example(b":e stop", [3])
    @given(st.one_of(st.binary(max_size=60), st.lists(piece, max_size=9).map(b"".join)), CUTS)
    def check(data: bytes, cuts: list[int]) -> None:
        try:
            feed(codec, data + b"\n", cuts)
        except FrameError:
            pass
        except AssertionError:
            pass  # incomplete

    check()


def only_the_grammar_is_accepted(codec: Any) -> None:
    wrong = (
        b":r 0 0 1_0\n", b":r +1 0\n", b":r -2 0\n", b":r 0 0  1\n", b":r 0 0 1 \n", b":r  0 0\n",
        b":r 0 1234567890\n", b":r 0 -1\n", b":c -1 0 0\n", b":c 0 0\n", b":w 99 0\n", b":w 600 0\n",
        b":w 200 -1\n", b":e \n", b":e a b\n", b":x engine\n", b":x  0\n", b":v\n", b":v x\n", b":y 1\n",
        b"r 0 0\n", b"\n", b":e " + b"s" * 65 + b"\n", b":r 0 0 " + b"9" * 5000 + b"\n",
    )  # fmt: skip
    for line in wrong:
        for data in ([line], [line[i : i + 1] for i in range(len(line))]):
            parser = codec.FrameParser(Sink())
            with pytest.raises(FrameError):
                for piece in data:
                    parser.feed(piece)
                raise AssertionError(line)
    with pytest.raises(FrameError):
        codec.FrameParser(Sink()).feed(b"garbage without a line end")


def nothing_follows_the_last_frame(codec: Any) -> None:
    @some_examples
    @example(("end", "stop"), run(1, (2,)), [])
    @example(("end", "stop"), run(1, (2,)), [8])
    @example(("failure", "engine", "over"), run(1, (2,)), [16])
    @given(LAST, ANY, CUTS)
    def check(last: Shown, after: Shown, cuts: list[int]) -> None:
        data = by_the_book(last) + by_the_book(after)
        with pytest.raises(FrameError):
            feed(codec, data, cuts)

    check()


def sizes_are_bounded(codec: Any) -> None:
    for head in (b":r 0 %d\n", b":c 0 0 %d\n", b":w 200 %d\n", b":v %d\n", b":x engine %d\n"):
        parser = codec.FrameParser(Sink())
        parser.feed(head % codec.MAX_PAYLOAD_BYTES)
        assert parser.is_incomplete
        with pytest.raises(FrameError):
            codec.FrameParser(Sink()).feed(head % (codec.MAX_PAYLOAD_BYTES + 1))
    endless = b":r 0 0" + b" 1" * (codec.MAX_HEADER_BYTES // 2)
    with pytest.raises(FrameError):
        codec.FrameParser(Sink()).feed(endless + b"\n")
    parser = codec.FrameParser(Sink())
    with pytest.raises(FrameError):
        for at in range(0, len(endless), 4096):
            parser.feed(endless[at : at + 4096])
        raise AssertionError("no bound")


def the_head_of_a_token_chunk_is_what_the_encoder_writes(codec: Any) -> None:
    @some_examples
    @example(10, 1, b"abc")
    @example(999_999_999, 999_999_999, b"")
    @given(st.integers(0, 999_999_999), st.integers(0, 999_999_999), PAYLOAD)
    def check(start: int, token: int, payload: bytes) -> None:
        frame = by_the_book(run(start, (token,), payload))
        head = codec.TOKEN_CHUNK_HEAD % (len(frame), start, len(payload))
        assert b"%x\r\n%b" % (len(frame), frame) == b"%b%d\n%b" % (head, token, payload)

    check()


PROPERTIES = (
    the_encoder_writes_what_the_protocol_says,
    any_cut_gives_the_same_frames,
    a_cut_body_gives_its_whole_frames_only,
    what_is_read_is_what_was_written,
    malformed_bytes_raise_frame_error_alone,
    only_the_grammar_is_accepted,
    nothing_follows_the_last_frame,
    sizes_are_bounded,
    the_head_of_a_token_chunk_is_what_the_encoder_writes,
)
