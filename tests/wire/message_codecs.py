"""Properties of the wire's other codecs. Each takes its module, so that planted bugs can be tried."""

from __future__ import annotations

import enum
import types
import typing
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from relume.events.log.codec import encode
from relume.events.vocabulary import RequestArrived, Tick
from relume.events.vocabulary.enums import Guarantee
from relume.events.wire.errors import (
    CallError,
    EnvelopeError,
    HeaderError,
    NoticeError,
    ReportError,
    WireError,
)
from relume.events.wire.headers import CHECKPOINT, GRACE, encode_record
from tests.wire.properties import some_examples

NUMBER = st.integers(0, 999_999_999)
CUTS = st.lists(st.integers(0, 5000), max_size=8)
DEEP, NO_TEXT = b"\x91" * 20_000, b'"\xff"'
"""What nests deeper than a decoder may recurse, and text that is not UTF-8."""
JUNK = st.one_of(
    st.binary(max_size=60), st.just(DEEP), st.just(b"\x81\xa5hello" * 9000),
    st.just(b"[" * 20_000), st.just(b'{"a":' * 20_000), st.just(NO_TEXT),
)  # fmt: skip


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Values of a field's type."""
    args = typing.get_args(kind)
    origin = typing.get_origin(kind)
    if origin is typing.Annotated:
        (limits,) = kind.__metadata__
        return st.integers(limits.ge, limits.lt - 1)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*map(values_of, args))
    if origin is tuple and args[-1] is ...:
        return st.lists(values_of(args[0]), max_size=3).map(tuple)
    if origin is tuple:
        return st.tuples(*map(values_of, args))
    if origin is dict:
        return st.dictionaries(values_of(args[0]), values_of(args[1]), max_size=3)
    simple = {
        int: st.integers(-(1 << 40), 1 << 40), bool: st.booleans(), bytes: st.binary(max_size=20),
        str: st.text(st.characters(exclude_categories=["Cs"]), max_size=9), type(None): st.none(),
    }  # fmt: skip
    if isinstance(kind, enum.EnumType):
        return st.sampled_from(kind)
    return simple[kind] if kind in simple else values(kind)


def values(kind: Any) -> st.SearchStrategy[Any]:
    """Structs of this class."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {name: values_of(hints[name]) for name in kind.__struct_fields__}
    return st.builds(kind, **fields)


def cut(data: bytes, cuts: list[int]) -> list[bytes]:
    bounds = sorted({0, len(data), *(place % (len(data) + 1) for place in cuts)})
    return [data[low:high] for low, high in pairwise(bounds)]


# --- headers


def header_values_read_as_they_were_written(codec: Any) -> None:
    @some_examples
    @example(1, 2, 3, 4, b"\xfb\xff\xfe~")
    @given(NUMBER, NUMBER, NUMBER, NUMBER, st.binary(max_size=50))
    def check(a: int, b: int, c: int, d: int, record: bytes) -> None:
        grace = codec.Grace(a, b, c, d)
        assert grace.format() == f"{a} {b} {c} {d}"
        assert codec.Grace.parse(grace.format()) == grace
        value = codec.encode_record(record)
        assert not set(value) & set(b"+/=")
        assert codec.decode_dispatch(value) == codec.decode_dispatch(value.decode()) == record
        assert codec.parse_number(GRACE, str(a)) == a

    check()
    holders = ("tcp://10.0.0.1:70", "tcp://[::1]:70", "tcp://host:7", "unix:/run/relume/s")
    assert codec.parse_endpoints(CHECKPOINT, codec.format_endpoints(holders)) == holders
    assert codec.parse_endpoints(CHECKPOINT, "") == ()


def malformed_header_values_raise_header_error(codec: Any) -> None:
    @some_examples
    @example("\u0664" * 3)
    @example("a" * 65)
    @given(st.text(max_size=30))
    def check(text: str) -> None:
        for parse in (
            codec.Grace.parse, codec.decode_dispatch, codec.parse_request,
            lambda text: codec.parse_number(GRACE, text),
            lambda text: codec.parse_endpoints(CHECKPOINT, text),
        ):  # fmt: skip
            try:
                parse(text)
            except HeaderError:
                pass

    check()
    five = ",".join(f"tcp://h{n}:1" for n in range(5))
    for parse, text in (
        (codec.Grace.parse, "1 2 3"), (codec.Grace.parse, "1 2 3 4 5"), (codec.Grace.parse, "1 2 3 x"),
        (codec.parse_request, ""), (codec.parse_request, "a b"), (codec.parse_request, "a" * 65),
        (codec.parse_request, "a\n"), (codec.decode_dispatch, "abcd****"), (codec.decode_dispatch, "a"),
    ):  # fmt: skip
        with pytest.raises(HeaderError):
            parse(text)
    for text in ("-1", "1" * 10, "", "\u0664", "1_0"):
        with pytest.raises(HeaderError):
            codec.parse_number(GRACE, text)
    for text in (five, "tcp://a:1,tcp://a:1", "http://a:1", "unix:relative", "tcp://a:1\r\nx"):
        with pytest.raises(HeaderError):
            codec.parse_endpoints(CHECKPOINT, text)


# --- resumption

TAILS = st.lists(
    st.tuples(st.lists(st.integers(0, 0xFFFFFFFF), max_size=6), st.binary(max_size=9)),
    min_size=1,
    max_size=4,
)


def a_resumption_reads_as_it_was_written(codec: Any) -> None:
    @some_examples
    @example("continue", [([1, 2], b"note"), ([3], b""), ([], b"x"), ([4], b"y")], b"{}")
    @given(st.sampled_from(["continue", "replay"]), TAILS, st.binary(max_size=30))
    def check(mode: str, choices: list[tuple[list[int], bytes]], body: bytes) -> None:
        header, tail = codec.format_resume(mode, choices)
        resume, own = codec.parse_resume(header, body + tail)
        assert own == body and resume.mode == mode
        assert [(list(c.ids), c.note) for c in resume.choices] == choices
        ids = b"".join(token.to_bytes(4, "little") for c in choices for token in c[0])
        assert tail == ids + b"".join(note for _, note in choices)

    check()


def malformed_resumptions_raise_header_error(codec: Any) -> None:
    piece = st.sampled_from(["continue", "replay", " ", "1", "0", ":", ",", "-1", "9" * 9, "x"])

    @some_examples
    @example("continue 9", b"short")
    @example("x 1", bytes(20))
    @given(st.lists(piece, max_size=8).map("".join), st.binary(max_size=20))
    def check(header: str, body: bytes) -> None:
        try:
            codec.parse_resume(header, body)
        except HeaderError:
            pass

    check()
    for header in (
        "continue 6",
        "continue 1:17",
        "continue",
        "again 1",
        "continue 1,",
        "continue 1:",
    ):
        with pytest.raises(HeaderError):
            codec.parse_resume(header, bytes(20))


# --- report socket


def reports_survive_any_cut(codec: Any) -> None:
    control = {codec.Hello: codec.hello_frame, codec.Layout: codec.layout_frame,
               codec.Ready: codec.ready_frame}  # fmt: skip
    message = st.one_of(*map(values, control))

    @some_examples
    @example([codec.Hello(1, "core", 2), b"\x93abc", b"\x93"], list(range(100)))
    @given(st.lists(st.one_of(message, st.binary(max_size=30).map(lambda b: b"\x93" + b))), CUTS)
    def check(messages: list[Any], cuts: list[int]) -> None:
        data = b""
        for item in messages:
            wire = codec.frame(item) if isinstance(item, bytes) else control[type(item)](item)
            assert int.from_bytes(wire[:4], "little") == len(wire) - 4
            data += wire
        reader = codec.ReportReader()
        payloads = [p for piece in cut(data, cuts) for p in reader.feed(piece)]
        assert [codec.parse(payload) for payload in payloads] == messages

    check()


def malformed_reports_raise_report_error(codec: Any) -> None:
    @some_examples
    @example(DEEP)
    @example(NO_TEXT)
    @given(JUNK)
    def check(data: bytes) -> None:
        for payload in (data, b"\x81" + data, b"\x81\xa5ready" + data):
            try:
                codec.parse(payload)
            except ReportError:
                pass
        try:
            codec.ReportReader().feed(data)
        except ReportError:
            pass

    check()
    for payload in (b"\x80", b"\x81\xa1x\x01", b"\x81\xa5hello\xc0"):
        with pytest.raises(ReportError):
            codec.parse(payload)
    head = codec.HEADER.pack(codec.MAX_FRAME_BYTES + 1)
    with pytest.raises(ReportError):
        codec.ReportReader().feed(head)
    reader = codec.ReportReader()
    assert reader.feed(codec.frame(b"x") + head) == [b"x"], "what came before is handed on"
    with pytest.raises(ReportError):
        reader.feed(b"")
    assert codec.ReportReader().feed(codec.HEADER.pack(codec.MAX_FRAME_BYTES)) == []


# --- notices


def notices_survive_any_cut(codec: Any) -> None:
    @some_examples
    @example([(1, 2), (3, 4)], [5, 25, 30])
    @given(st.lists(st.tuples(NUMBER, NUMBER), max_size=5), CUTS)
    def check(deaths: list[tuple[int, int]], cuts: list[int]) -> None:
        died = [codec.DeathNotice(epoch, incarnation) for epoch, incarnation in deaths]
        data = codec.hello_line("w0") + b"".join(d.line() for d in died)
        book = "".join(f"died {epoch} {incarnation}\n" for epoch, incarnation in deaths)
        assert data == b"relume-notice/1 w0\n" + book.encode()
        reader = codec.NoticeReader("w0")
        assert [n for piece in cut(data, cuts) for n in reader.feed(piece)] == died
        assert reader.greeted

    check()


def malformed_notices_raise_notice_error(codec: Any) -> None:
    @some_examples
    @example(b"\xff\n", True)
    @given(st.binary(max_size=40), st.booleans())
    def check(data: bytes, greeted: bool) -> None:
        try:
            codec.NoticeReader("w0").feed((codec.hello_line("w0") if greeted else b"") + data)
        except NoticeError:
            pass

    check()
    with pytest.raises(NoticeError):
        codec.NoticeReader("w0").feed(codec.hello_line("w1"))
    greeted = codec.hello_line("w0")
    with pytest.raises(NoticeError):
        codec.NoticeReader("w0").feed(greeted + greeted)
    long = b"died 1 " + b"0" * codec.MAX_LINE_BYTES + b"1"
    for line in (
        b"died 1\n",
        b"died 1 -2\n",
        b"born 1 2\n",
        b"died 1 2 3\n",
        long,
        long + b"\n",
        b"\n",
        b"died %d 1\n" % 2**63,
        b"died 1 %d\n" % 2**63,
    ):
        with pytest.raises(NoticeError):
            codec.NoticeReader("w0").feed(greeted + line)


# --- envelope and calls


def an_envelope_reads_as_it_was_packed(codec: Any) -> None:
    text = st.text(st.characters(min_codepoint=0x20, max_codepoint=0x7E), max_size=20)

    @some_examples
    @example("/v1/x", "id", "17", b"a\nb\n", "")
    @example("/v1/x", "id", "17", b"", "log AAA")
    @given(text, text, text, st.binary(max_size=20), text)
    def check(path: str, name: str, created: str, body: bytes, origin: str) -> None:
        envelope = codec.Envelope(path, name, created, body, origin)
        assert codec.unpack(envelope.pack()) == envelope
        head = [(b"x-request-id", b"old"), (b"content-length", b"0"), (b"a", b"b")]
        envelope = msgspec.structs.replace(envelope, id="new")
        assert dict(envelope.headers(head)) == {
            b"a": b"b", b"x-request-id": b"new", b"content-length": b"%d" % len(envelope.body),
        }  # fmt: skip

    check()


def malformed_envelopes_raise_envelope_error(codec: Any) -> None:
    @some_examples
    @example(DEEP)
    @example(NO_TEXT)
    @given(JUNK)
    def check(data: bytes) -> None:
        try:
            codec.unpack(data)
        except EnvelopeError:
            pass

    check()
    lines = codec.Envelope("p", "i", "1", b"a\nb\n")
    assert codec.unpack(lines.pack()) == lines
    whole = b'{"path":"p","id":"i","created":"1"}'
    assert codec.unpack(whole + b"\n").body == b""
    for data in (
        whole.replace(b'"p"', b'"p\\r\\nx: y"') + b"\n",
        whole.replace(b'"i"', b'"\\u0664"') + b"\n",
        whole.replace(b'"1"', b'"1","origin":"a\\r\\nb"') + b"\n",
        b"",
        b"{}\n",
        whole,
        b'{"path":"p","id":1,"created":"1"}\n',
    ):
        with pytest.raises(EnvelopeError):
            codec.unpack(data)


ARRIVED = RequestArrived(
    request="q", model="m", route="/v1/completions", stream=True, prompt_tokens=3, max_tokens=9,
    verdict=Guarantee.EXACT, tenant="\u0664", resumable="digest", grace_ticks=30,
)  # fmt: skip


def calls_of(codec: Any) -> tuple[Any, ...]:
    return codec.Retarget, codec.Attach, codec.OriginRequest, codec.Handover


def origins_read_as_they_were_written(codec: Any) -> None:
    for log in ("4f2a", "a.b-c_9", "x" * 64):
        origin = codec.StreamOrigin(log, ARRIVED)
        text = origin.format()
        assert text.isascii() and text.isprintable() and codec.log_of(text) == log
        assert codec.StreamOrigin.parse(text) == origin


def malformed_origins_raise_header_error(codec: Any) -> None:
    @some_examples
    @example("\u0664")
    @given(st.text(max_size=30))
    def check(text: str) -> None:
        for origin in (text, f"log {text}"):
            try:
                codec.StreamOrigin.parse(origin)
            except HeaderError:
                pass

    check()
    whole = codec.StreamOrigin("log", ARRIVED).format()
    others = (Tick(1, 2), msgspec.structs.replace(ARRIVED, resumable=""))
    for text in (
        "", "log", "log ", "log ZZZZ", whole.removeprefix("log"), f"a/{whole}", f"{'x' * 65} {whole[4:]}",
        whole[:-4], *(f"log {encode_record(encode(other)).decode()}" for other in others),
    ):  # fmt: skip
        with pytest.raises(HeaderError):
            codec.StreamOrigin.parse(text)


def calls_read_as_they_were_written(codec: Any) -> None:
    names = st.text("abcXYZ019_.-", min_size=1, max_size=64)

    def named(kind: Any) -> st.SearchStrategy[Any]:
        has_holders = kind in (codec.Retarget, codec.OriginRequest)
        fields = {"holders": ("unix:/run/s", "tcp://h:1")} if has_holders else {}
        change = msgspec.structs.replace
        return st.builds(
            lambda call, request: change(call, request=request, **fields), values(kind), names
        )

    @some_examples
    @example(codec.Handover("a.b-c_9", 1, 2))
    @given(st.one_of(*map(named, calls_of(codec))))
    def check(call: Any) -> None:
        assert codec.decode(codec.encode(call), type(call)) == call

    check()


def malformed_calls_raise_call_error(codec: Any) -> None:
    kinds = calls_of(codec)

    @some_examples
    @example(DEEP)
    @example(NO_TEXT)
    @given(JUNK)
    def check(data: bytes) -> None:
        for kind in kinds:
            try:
                codec.decode(data, kind)
            except CallError:
                pass

    check()
    with pytest.raises(CallError):
        codec.decode(b'{"request":"a b","attempt":1,"incarnation":1}', codec.Handover)
    with pytest.raises(CallError):
        codec.decode(b'{"request":"a","attempt":1,"incarnation":1,"holders":["x"]}', codec.Retarget)
    with pytest.raises(CallError):
        codec.decode(b'{"request":"a","incarnation":1,"holders":["x"]}', codec.OriginRequest)


# --- KV protocol


def kv_messages_read_as_they_were_written(codec: Any) -> None:
    kinds = typing.get_args(codec.AnyMessage)
    assert len(kinds) > 20

    @some_examples
    @example(codec.Keep(1, "r", 2, b"{}"))
    @given(st.one_of(*map(values, kinds)))
    def check(message: Any) -> None:
        again = codec.decode(codec.encode(message))
        assert again == message and type(again) is type(message)

    check()


def malformed_kv_messages_raise_a_wire_error(codec: Any) -> None:
    @some_examples
    @example(DEEP)
    @example(NO_TEXT)
    @given(JUNK)
    def check(data: bytes) -> None:
        for header in (data, b"\x92\xa4keep" + data):
            try:
                codec.decode(header)
            except WireError:
                pass

    check()
    keep = codec.Keep(1, "r", 1, bytes(codec.MAX_HEADER_BYTES - 20))
    assert codec.decode(codec.encode(keep)) == keep
    with pytest.raises(WireError):
        codec.decode(codec.encode(codec.Keep(1, "r", 1, bytes(codec.MAX_HEADER_BYTES))))


def pieces_are_the_chunk_and_within_bounds(codec: Any) -> None:
    good = {
        "request": "r", "child": 0, "rank": 0, "index": 0, "attempt": 1, "offset": 0, "length": 8,
        "total": 16, "digest": bytes(codec.DIGEST_BYTES), "priority": 1, "scope": bytes(16),
    }  # fmt: skip
    codec.check_put(codec.Put(1, (codec.Piece(**good),) * 2), 16)
    codec.check_piece(codec.Piece(**good | {"offset": 8}))
    for wrong in (
        {"request": ""}, {"request": "r" * 129}, {"child": -1}, {"child": codec.MAX_CHILD},
        {"rank": -1}, {"rank": codec.MAX_CHILD}, {"index": -1}, {"index": codec.MAX_INDEX},
        {"offset": -1}, {"offset": 9}, {"length": 0}, {"length": 17}, {"attempt": -1},
        {"total": codec.MAX_IMAGE_BYTES + 1}, {"digest": b"x"}, {"priority": -1},
        {"priority": 1_000_001}, {"scope": b"x"},
    ):  # fmt: skip
        with pytest.raises(WireError):
            codec.check_piece(codec.Piece(**good | wrong))
            raise AssertionError(wrong)
    with pytest.raises(WireError):
        codec.check_put(codec.Put(1, (codec.Piece(**good | {"index": -1}),)), 8)
    many = (codec.Piece(**good),) * (codec.MAX_PIECES + 1)
    for pieces, size in (((), 0), (many, 8 * len(many)), (many[:1], 7), (many[:1], 9)):
        with pytest.raises(WireError):
            codec.check_put(codec.Put(1, pieces), size)


def local_frames_read_as_they_were_packed(codec: Any) -> None:
    chunk = st.integers(0, codec.MAX_CHUNK_BYTES)

    @some_examples
    @example(b"head", 5, 1, 7)
    @given(st.binary(max_size=50), chunk, st.integers(0, 1), st.integers(0, (1 << 64) - 1))
    def check(header: bytes, chunk: int, place: int, offset: int) -> None:
        data = codec.pack(header, chunk, place, offset)
        assert data[codec.FRAME.size :] == header
        assert codec.unpack(data[: codec.FRAME.size]) == (len(header), chunk, place, offset)

    check()
    most = codec.MAX_HEADER_BYTES
    for head in (
        codec.FRAME.pack(most + 1, 0, 0, 0), codec.FRAME.pack(0, codec.MAX_CHUNK_BYTES + 1, 0, 0),
        codec.FRAME.pack(0, 0, 2, 0), b"short",
    ):  # fmt: skip
        with pytest.raises(WireError):
            codec.unpack(head)
    assert codec.unpack(codec.FRAME.pack(most, codec.MAX_CHUNK_BYTES, 1, 0))[0] == most
