"""What a replica of an older build reads is written down: a tag or a field that is added without a
feature level of its own fails here."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, ClassVar

import pytest
from msgspec import Struct

from relume.events.log.feature_levels import FIRST_LEVEL, LEVEL
from relume.events.vocabulary.base import Event
from tests.mixed_versions.level_lists import FOLDER, KINDS, listing, path_of
from tests.mixed_versions.next_build import NEXT, NoteWritten, WeatherReported

DIGESTS = {
    1: "b78c52f7b42022c0",
    2: "8a704be4dee8dd72",
    3: "83e920800a6d56c4",
}
"""Of the list of each level. That of a released level never changes."""

REMEDY = """
A list in tests/mixed_versions/levels changed. Builds that run already do not read what you add. Raise `LEVEL`,
name it at the new tag (`tag_level`) or field (`field_levels`), and write the list of that level:
python -m tests.mixed_versions.level_lists. A part of an event has no level: add a field to the event instead.
"""


def digest_of(level: int) -> str:
    return blake2b(path_of(level).read_bytes(), digest_size=8).hexdigest()


def test_each_level_has_a_list_and_each_list_is_as_it_was_written() -> None:
    """Not even the highest level may gain something unnoticed."""
    levels = range(FIRST_LEVEL, LEVEL + 1)
    assert sorted(path.name for path in FOLDER.iterdir()) == sorted(f"{n}.txt" for n in levels)
    assert {level: digest_of(level) for level in levels} == DIGESTS, REMEDY


@pytest.mark.parametrize("level", range(FIRST_LEVEL, LEVEL + 1))
def test_this_build_writes_at_a_level_what_its_list_has(level: int) -> None:
    assert listing(level).splitlines() == path_of(level).read_text().splitlines(), REMEDY


class Cloud(Struct, frozen=True, array_like=True):
    """A part of an event."""

    height: int


class SkySeen(Event, frozen=True, tag="sky_seen/1", kw_only=True):
    """The event that the others below differ from."""

    where: str
    clouds: tuple[Cloud, ...] = ()


class WiderCloud(Struct, frozen=True, array_like=True):
    height: int
    width: int = 0


class Unnamed(Event, frozen=True, tag="sky_seen/1", kw_only=True):
    """Its new field has no level."""

    where: str
    clouds: tuple[Cloud, ...] = ()
    wind: int = 0


class Named(Event, frozen=True, tag="sky_seen/1", kw_only=True):
    """Its new field has one."""

    field_levels: ClassVar[Mapping[str, int]] = {"wind": NEXT}

    where: str
    clouds: tuple[Cloud, ...] = ()
    wind: int = 0


class Turned(Event, frozen=True, tag="sky_seen/1", kw_only=True):
    """Another order."""

    clouds: tuple[Cloud, ...] = ()
    where: str = ""


class Retyped(Event, frozen=True, tag="sky_seen/1", kw_only=True):
    where: int
    clouds: tuple[Cloud, ...] = ()


class Defaulted(Event, frozen=True, tag="sky_seen/1", kw_only=True):
    """Records of today would say another thing."""

    where: str = "here"
    clouds: tuple[Cloud, ...] = ()


class Reversioned(Event, frozen=True, tag="sky_seen/2", kw_only=True):
    """The version of its tag is raised, and no level."""

    where: str
    clouds: tuple[Cloud, ...] = ()


class Parted(Event, frozen=True, tag="sky_seen/1", kw_only=True):
    """A part has a new field."""

    where: str
    clouds: tuple[WiderCloud, ...] = ()


WiderCloud.__name__ = "Cloud"


class UnnamedTag(Event, frozen=True, tag="storm_seen/1", kw_only=True):
    where: str


@pytest.mark.parametrize(
    "kinds",
    [(Unnamed,), (Turned,), (Retyped,), (Defaulted,), (Reversioned,), (Parted,), (), (SkySeen, UnnamedTag)],
)  # fmt: skip
def test_a_change_without_a_level_changes_the_list(kinds: tuple[Any, ...]) -> None:
    assert listing(FIRST_LEVEL, (*KINDS, SkySeen)) != listing(FIRST_LEVEL, (*KINDS, *kinds))


@pytest.mark.parametrize("kinds", [(Named,), (SkySeen, WeatherReported)])
def test_a_tag_or_a_field_with_a_level_leaves_the_lists_below_it(kinds: tuple[Any, ...]) -> None:
    assert listing(FIRST_LEVEL, (*KINDS, SkySeen)) == listing(FIRST_LEVEL, (*KINDS, *kinds))
    assert listing(NEXT, (*KINDS, SkySeen)) != listing(NEXT, (*KINDS, *kinds))


def test_a_list_names_types_defaults_and_parts() -> None:
    assert listing(NEXT, (NoteWritten, SkySeen)).splitlines() == [
        "note_written/1",
        "    text: str",
        "    mood: str = ''",
        "sky_seen/1",
        "    where: str",
        "    clouds: tuple[Cloud, ...] = ()",
        "part Cloud",
        "    height: int",
    ]
