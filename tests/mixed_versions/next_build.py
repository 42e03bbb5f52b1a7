"""Events of a build that is newer than this one, for tests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

import msgspec
import pytest

from relume.events.log import codec, entries
from relume.events.log.feature_levels import FIRST_LEVEL, LEVEL
from relume.events.vocabulary import AnyEvent
from relume.events.vocabulary.base import Event

OLD = FIRST_LEVEL
"""The level of the build before this one."""
NEXT = LEVEL + 1
"""The level of the next build."""


class WeatherReported(Event, frozen=True, tag="weather_reported/1", kw_only=True):
    """An event that this build does not have."""

    tag_level: ClassVar[int] = NEXT

    sky: str


class NoteWritten(Event, frozen=True, tag="note_written/1", kw_only=True):
    """An event with a field that builds before the level do not have."""

    field_levels: ClassVar[Mapping[str, int]] = {"mood": NEXT, "words": NEXT + 1}

    text: str
    mood: str = ""
    words: tuple[str, ...] = ()


@contextmanager
def next_build() -> Iterator[None]:
    """Records of both are read and named, as by a build of level `NEXT`."""
    kinds = WeatherReported | NoteWritten
    with pytest.MonkeyPatch.context() as patch:
        for kind in (WeatherReported, NoteWritten):
            tag = str(kind.__struct_config__.tag)
            patch.setitem(codec.TAGS, tag, kind)
            patch.setitem(entries.KINDS, kind, tag.partition("/")[0])
        patch.setattr(codec, "_decoder", msgspec.msgpack.Decoder(AnyEvent | kinds))
        patch.setattr(codec, "_many", msgspec.msgpack.Decoder(list[AnyEvent | kinds]))
        yield
