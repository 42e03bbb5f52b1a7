"""Records: round trips, unknown tags, old tags."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import msgpack
import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from relume.events.log import codec
from relume.events.log.errors import MalformedRecord, UnknownEvent
from relume.events.vocabulary import (
    AnyChange,
    AnyEvent,
    EngineStep,
    PrefillChunkDone,
    RequestEnded,
    Tick,
)
from relume.events.vocabulary.enums import Word

EVENTS = get_args(AnyEvent)
texts = st.text(max_size=20)
integers = st.integers(min_value=codec.INTEGERS[0], max_value=codec.INTEGERS[-1])
too_large = st.integers(min_value=2**48, max_value=2**64 - 1) | st.integers(
    min_value=-(2**63), max_value=-(2**48) - 1
)


def values_of(kind: Any) -> st.SearchStrategy[Any]:
    """Any value a field of type `kind` may hold."""
    plain = {
        int: integers,
        str: texts,
        bool: st.booleans(),
        bytes: st.binary(max_size=40),
        float: st.floats(allow_nan=False),
    }
    if kind in plain:
        return plain[kind]
    arguments = get_args(kind)
    if arguments and getattr(kind, "__origin__", None) is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(values_of(arguments[0]), max_size=3).map(tuple)
        return st.tuples(*map(values_of, arguments))
    if arguments:
        return st.one_of(*map(values_of, arguments))
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return structs_of(kind)
    if isinstance(kind, type) and issubclass(kind, Word):  # also words of a newer build
        return st.one_of(st.sampled_from(kind), texts.map(kind))
    raise AssertionError(f"the vocabulary grew a type the test does not know: {kind}")


def structs_of(kind: type) -> st.SearchStrategy[Any]:
    hints = get_type_hints(kind)
    fields = {name: values_of(hints[name]) for name in kind.__struct_fields__}
    return st.fixed_dictionaries(fields).map(lambda f: kind(**f))


@settings(max_examples=150, deadline=None)
@given(st.one_of(*map(structs_of, EVENTS)))
def test_every_event_comes_back_equal(event: Any) -> None:
    record = codec.encode(event)
    assert codec.decode(record) == event
    assert codec.encode(codec.decode(record)) == record


@settings(max_examples=100, deadline=None)
@given(st.one_of(*map(structs_of, EVENTS)))
def test_any_msgpack_reader_reads_a_record(event: Any) -> None:
    """A record is a plain msgpack array, headed by its tag: the fields in their order."""
    tag, *fields = msgpack.unpackb(codec.encode(event), use_list=False)
    assert tag == codec.tag_of(event)
    assert len(fields) == len(event.__struct_fields__)
    assert fields[0] == getattr(event, event.__struct_fields__[0])


def with_integer(value: Any, number: int, data: st.DataObject) -> Any:
    """`value` with `number` in place of one of its integers; None if it has none."""
    if type(value) is int:
        return number
    if isinstance(value, list):
        changed = [(at, with_integer(part, number, data)) for at, part in enumerate(value)]
        found = [(at, part) for at, part in changed if part is not None]
        if not found:
            return None
        at, part = data.draw(st.sampled_from(found))
        return [*value[:at], part, *value[at + 1 :]]
    return None


@settings(max_examples=200, deadline=None)
@given(st.one_of(*map(structs_of, EVENTS)), too_large, st.data())
def test_a_record_with_a_number_too_large_for_the_fold_is_malformed(
    event: Any, number: int, data: Any
) -> None:
    fields = with_integer(msgspec.msgpack.decode(codec.encode(event)), number, data)
    assume(fields is not None)
    record = msgspec.msgpack.encode(fields)
    with pytest.raises(MalformedRecord, match=fields[0]):
        codec.decode(record)
    healthy = codec.encode(Tick(1, 2))
    first, unreadable, last = codec.decode_all((healthy, record, healthy))
    assert first == last == Tick(1, 2)
    assert type(unreadable) is codec.UnreadableRecord


@pytest.mark.parametrize("number", [codec.INTEGERS[0], codec.INTEGERS[-1], -1, 2**32, -(2**40)])
def test_a_number_within_the_bound_is_read(number: int) -> None:
    record = codec.encode(Tick(number, number))
    assert codec.decode(record) == Tick(number, number)
    assert codec.decode_all((record, record)) == [Tick(number, number)] * 2


def test_the_reason_names_the_field_that_is_too_large() -> None:
    chunk = PrefillChunkDone("q1", 1, 5, 2**48)
    step = EngineStep(
        incarnation=1, step=7, duration_us=100, batch=2, sum_context=300, prefill_tokens=0,
        waiting=0, kv_used=9, changes=(chunk,),
    )  # fmt: skip
    with pytest.raises(MalformedRecord, match=r"engine_step/1: changes.computed is beyond 48 bits"):
        codec.decode(codec.encode(step))


@settings(max_examples=150, deadline=None)
@given(st.binary(max_size=60))
def test_arbitrary_bytes_are_refused_by_type(record: bytes) -> None:
    try:
        codec.decode(record)
    except (MalformedRecord, UnknownEvent):
        pass


@settings(max_examples=200, deadline=None)
@given(st.one_of(*map(structs_of, EVENTS)), st.data())
def test_damaged_records_are_refused_or_decode_to_an_event(event: Any, data: Any) -> None:
    record = bytearray(codec.encode(event))
    at = data.draw(st.integers(0, len(record) - 1))
    record[at] ^= data.draw(st.integers(1, 255))
    try:
        decoded = codec.decode(bytes(record))
    except (MalformedRecord, UnknownEvent):
        return
    assert isinstance(decoded, EVENTS)


def test_tags_are_unique_and_versioned() -> None:
    tags = [t.__struct_config__.tag for t in EVENTS]
    assert len(set(tags)) == len(tags) == len(codec.TAGS)
    for tag in tags:
        name, _, version = tag.partition("/")
        assert name and version.isdigit()
    changes = [t.__struct_config__.tag for t in get_args(AnyChange)]
    assert len(set(changes)) == len(changes)


def test_unknown_tag_is_refused_by_name() -> None:
    record = msgspec.msgpack.encode(["engine_levitated/1", "w0", 3])
    with pytest.raises(UnknownEvent) as refused:
        codec.decode(record)
    assert refused.value.tag == "engine_levitated/1"
    assert "engine_levitated/1" in str(refused.value)


def test_newer_version_of_a_known_event_is_refused_by_name() -> None:
    with pytest.raises(UnknownEvent) as refused:
        codec.decode(msgspec.msgpack.encode(["tick/2", 1, 2]))
    assert refused.value.tag == "tick/2"


def test_unknown_change_inside_a_step_is_malformed_and_says_so() -> None:
    record = msgspec.msgpack.encode(["engine_step/1", 1, 1, 1, 1, 1, 1, 1, 1, [["zz", "r", 1]], 0])
    with pytest.raises(MalformedRecord, match="engine_step/1"):
        codec.decode(record)


def test_wrong_type_in_a_field_is_malformed() -> None:
    with pytest.raises(MalformedRecord, match="tick/1"):
        codec.decode(msgspec.msgpack.encode(["tick/1", "one", 2]))


@pytest.mark.parametrize("plain", [{}, [], ["tick/1"], [1, 2], "tick/1", None, [["tick/1"]]])
def test_shapes_that_are_no_events_are_malformed(plain: Any) -> None:
    with pytest.raises(MalformedRecord):
        codec.decode(msgspec.msgpack.encode(plain))


def test_record_without_the_newest_fields_takes_their_defaults() -> None:
    """A field may be appended with a default: old records must still decode."""
    old = ["engine_step/1", 1, 7, 100, 2, 300, 0, 0, 9]
    assert codec.decode(msgspec.msgpack.encode(old)) == EngineStep(
        incarnation=1,
        step=7,
        duration_us=100,
        batch=2,
        sum_context=300,
        prefill_tokens=0,
        waiting=0,
        kv_used=9,
    )


def test_record_with_fields_we_do_not_know_yet_still_decodes() -> None:
    newer = ["tick/1", 5, 6, "a field of tomorrow"]
    assert codec.decode(msgspec.msgpack.encode(newer)) == Tick(5, 6)


def test_old_tag_is_upcast(monkeypatch: pytest.MonkeyPatch) -> None:
    """tick/0 counted in seconds and had no number."""
    monkeypatch.setitem(codec.UPCASTS, "tick/0", lambda fields: Tick(0, 1000 * fields[0]))
    assert codec.decode(msgspec.msgpack.encode(["tick/0", 12])) == Tick(0, 12_000)


def test_no_upcast_hides_a_tag_of_today() -> None:
    assert not set(codec.UPCASTS) & set(codec.TAGS)


def test_json_names_type_and_fields() -> None:
    event = RequestEnded(
        request="q1",
        outcome="completed",
        status=200,
        tokens=16,
        finish="stop",
        attempts=1,
        verdict="exact",
    )
    shown = codec.to_json(event)
    assert shown["type"] == "request_ended"
    assert (shown["request"], shown["tokens"], shown["verdict"]) == ("q1", 16, "exact")
