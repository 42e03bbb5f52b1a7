"""Which records may be written before every replica reads them."""

from __future__ import annotations

from typing import get_args

import pytest

from relume.events.log import codec
from relume.events.log.errors import UnknownEvent
from relume.events.log.feature_levels import (
    FIRST_LEVEL,
    LEVEL,
    AboveFeatureLevel,
    level_of,
    lowered,
    require,
)
from relume.events.vocabulary import AnyEvent, Tick
from tests.mixed_versions.next_build import NEXT, NoteWritten, WeatherReported, next_build


def test_a_tag_has_the_level_that_it_names() -> None:
    assert level_of(Tick(1, 2)) == FIRST_LEVEL
    assert level_of(WeatherReported(sky="grey")) == NEXT


@pytest.mark.parametrize(
    ("note", "level"),
    [
        (NoteWritten(text="a"), 1),
        (NoteWritten(text="a", mood=""), 1),
        (NoteWritten(text="a", mood="b"), NEXT),
        (NoteWritten(text="a", words=("c",)), NEXT + 1),
        (NoteWritten(text="a", mood="b", words=("c",)), NEXT + 1),
    ],
)
def test_a_newer_field_counts_if_it_says_something(note: NoteWritten, level: int) -> None:
    assert level_of(note) == level


def test_a_record_is_lowered_to_what_older_builds_read() -> None:
    note = NoteWritten(text="a", mood="b", words=("c",))
    assert lowered(note, NEXT + 1) is note
    assert lowered(note, NEXT) == NoteWritten(text="a", mood="b")
    assert lowered(note, 1) == NoteWritten(text="a")
    assert lowered(WeatherReported(sky="grey"), NEXT - 1) is None
    assert lowered(Tick(1, 2), 1) == Tick(1, 2)


def test_a_writer_that_did_not_ask_for_the_level_is_stopped() -> None:
    require(WeatherReported(sky="grey"), NEXT)
    require(NoteWritten(text="a"), 1)
    with pytest.raises(AboveFeatureLevel, match=f"weather_reported/1 needs feature level {NEXT}"):
        require(WeatherReported(sky="grey"), NEXT - 1)
    with pytest.raises(AboveFeatureLevel, match="the fleet has level 1"):
        require(NoteWritten(text="a", mood="b"), 1)


def test_this_build_cannot_read_the_next_one_and_the_next_one_can() -> None:
    record = codec.encode(WeatherReported(sky="grey"))
    with pytest.raises(UnknownEvent):
        codec.decode(record)
    with next_build():
        assert codec.decode(record) == WeatherReported(sky="grey")
        assert codec.decode_all((record, codec.encode(Tick(1, 2))))[1] == Tick(1, 2)


@pytest.mark.parametrize("kind", get_args(AnyEvent))
def test_this_build_announces_every_level_that_it_has(kind: type) -> None:
    levels = (kind.tag_level, *kind.field_levels.values())  # type: ignore[attr-defined]
    assert FIRST_LEVEL <= min(levels) and max(levels) <= LEVEL
    names = kind.__struct_fields__[-len(kind.field_levels) or len(kind.__struct_fields__) :]  # type: ignore[attr-defined]
    assert set(kind.field_levels) <= set(names), "newer fields come last"  # type: ignore[attr-defined]
