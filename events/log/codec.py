"""Events to bytes and back.

Records are msgpack arrays headed by their tag. Decoding validates types, and that each integer is in
`INTEGERS`. A tag of an older version is upcast through `UPCASTS`; `decode` refuses an unknown tag by
name. Readers of a log go on after such a record (`decode_all`).
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import Any, get_args

import msgspec

from relume.events.decode_errors import UNREADABLE
from relume.events.log.errors import LogError, MalformedRecord, UnknownEvent
from relume.events.vocabulary import AnyEvent, Event

TAGS: dict[str, type[Event]] = {str(t.__struct_config__.tag): t for t in get_args(AnyEvent)}

# Old tag -> function from the old record's fields to an event of today. An entry is
# added when a tag's version is raised, and is never removed.
UPCASTS: dict[str, Callable[[list[Any]], Any]] = {}

INTEGERS = range(-(2**48), 2**48)
"""What an integer of a record may be: microseconds of 8 years, bytes of 256 TiB. The fold adds such
numbers, and its state has to be written with 64 bits."""

MOST_REASON = 200
"""Maximum length of the reason why a record cannot be read."""

_ARRAY32 = struct.Struct(">BI")  # msgpack's header of a long array
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyEvent)
_many = msgspec.msgpack.Decoder(list[AnyEvent])
_plain = msgspec.msgpack.Decoder()

encode: Callable[[Any], bytes] = _encoder.encode


class UnreadableRecord(msgspec.Struct, frozen=True, tag="unreadable_record"):
    """Stands for a record that this build cannot read; nobody writes it."""

    digest: str
    """Of its bytes: BLAKE2b, 8 bytes, as hex digits."""
    reason: str


class CachedRecords(tuple[bytes, ...]):
    """Records of a segment that caches its decoded events, for logs that are read several times."""

    events: list[Any] | None = None


def decode(record: bytes) -> Any:
    """The event in `record`.

    Raises UnknownEvent for a tag of no version we know, MalformedRecord for the rest.
    """
    try:
        event = _decoder.decode(record)
    except UNREADABLE as error:
        return _decode_slowly(record, error)
    if _may_be_large(record) and (field := _large_field(event)):
        raise MalformedRecord(f"{tag_of(event)}: {field} is beyond 48 bits")
    return event


def decode_all(records: Sequence[bytes]) -> list[Any]:
    """The events in `records`, in one call of the decoder; not to be altered. In place of one that
    cannot be read stands an `UnreadableRecord`."""
    if type(records) is CachedRecords:
        if records.events is None:
            records.events = decode_all(tuple(records))
        return records.events
    if len(records) < 2:
        return [_decode_or_name(record) for record in records]
    joined = b"".join((_ARRAY32.pack(0xDD, len(records)), *records))
    if _may_be_large(joined):
        return [_decode_or_name(record) for record in records]
    try:
        events = _many.decode(joined)
    except UNREADABLE:
        return [_decode_or_name(record) for record in records]
    return events


def _decode_or_name(record: bytes) -> Any:
    try:
        return decode(record)
    except LogError as error:
        digest = blake2b(record, digest_size=8).hexdigest()
        return UnreadableRecord(digest, str(error)[:MOST_REASON])


def _may_be_large(data: bytes) -> bool:
    """Whether `data` has what may be an integer beyond `INTEGERS`: msgpack's mark of a long integer,
    and then two bytes that are not its sign alone. It may be inside a string, too."""
    for mark, signs in ((b"\xcf", (b"\0\0",)), (b"\xd3", (b"\0\0", b"\xff\xff"))):
        at = data.find(mark)
        while at >= 0:
            if data[at + 1 : at + 3] not in signs:
                return True
            at = data.find(mark, at + 1)
    return False


def _large_field(value: Any) -> str:
    """The name of a field with an integer beyond `INTEGERS`; empty if there is none."""
    for name in value.__struct_fields__:
        parts = [getattr(value, name)]
        while parts:
            part = parts.pop()
            if type(part) is int and part not in INTEGERS:
                return str(name)
            if type(part) is tuple:
                parts += part
            elif isinstance(part, msgspec.Struct) and (inner := _large_field(part)):
                return f"{name}.{inner}"
    return ""


def _decode_slowly(record: bytes, error: Exception) -> Any:
    try:
        fields = _plain.decode(record)
    except UNREADABLE as broken:
        raise MalformedRecord(str(broken)) from None
    if not isinstance(fields, list) or not fields or not isinstance(fields[0], str):
        raise MalformedRecord("not an array headed by a tag")
    tag = fields[0]
    if tag in UPCASTS:
        return UPCASTS[tag](fields[1:])
    if tag not in TAGS:
        raise UnknownEvent(tag)
    raise MalformedRecord(f"{tag}: {error}")


def tag_of(event: Event) -> str:
    """The tag under which `event` is written, e.g. `engine_step/1`."""
    return str(event.__struct_config__.tag)


def to_json(event: Any) -> dict[str, Any]:
    """The event as a mapping for people and HTTP: `type` and the fields by name.

    Bytes become hex; nothing here is read back.
    """
    return {"type": tag_of(event).split("/")[0], **_named(event)}


def _named(value: Any) -> Any:
    if isinstance(value, msgspec.Struct):
        named = {name: _named(getattr(value, name)) for name in value.__struct_fields__}
        tag = value.__struct_config__.tag
        a_part = tag is not None and "/" not in str(tag)  # of an event
        return {"type": type(value).__name__, **named} if a_part else named
    if isinstance(value, tuple | list):
        return [_named(item) for item in value]
    return value.hex() if isinstance(value, bytes) else value
