"""Feature levels: which builds read a record.

Old and new builds run together during an upgrade, and an old one cannot read a tag that it does not
know. So each event says since which level its tag and its newer fields exist (`Event.tag_level`,
`Event.field_levels`). A replica announces the level of its build when it starts. The leader raises
the level of the fleet when each live replica reads it, as etcd does with its cluster version. Until
then no writer uses a tag or a field of a higher level: it asks for the level in force first, and
`require` stops one that did not.

A build that adds a tag or a field raises `LEVEL` by one, once per release, and names it there. All
events before the first release are of the first level. `tests/mixed_versions/levels` lists what each
level has; a test fails if one changes.
"""

from __future__ import annotations

from typing import Any

from msgspec import NODEFAULT
from msgspec.structs import fields, replace

from relume.events.log.errors import RelumeError

FIRST_LEVEL = 1
"""Level of all events that are older than levels; in force until the first raise."""
LEVEL = 3
"""The highest level of which this build reads all events."""


class AboveFeatureLevel(RelumeError):
    """A writer uses a tag or a field before every live replica reads it: an error of ours."""

    def __init__(self, tag: str, level: int, in_force: int) -> None:
        super().__init__(f"{tag} needs feature level {level}, but the fleet has level {in_force}")
        self.tag = tag
        self.level = level
        self.in_force = in_force


def is_newer(kind: type) -> bool:
    """Whether the events of a type, or some of their fields, are of a level above the first."""
    return bool(kind.tag_level > FIRST_LEVEL or kind.field_levels)  # type: ignore[attr-defined]


def level_of(event: Any) -> int:
    """The lowest level at which `event` may be written. A newer field counts if it has another value
    than its default."""
    kind = type(event)
    level = int(kind.tag_level)
    for name, since in kind.field_levels.items():
        if since > level and getattr(event, name) != _default_of(kind, name):
            level = since
    return level


def lowered(event: Any, level: int) -> Any:
    """`event` without what is above `level`; None if that is its tag."""
    kind = type(event)
    if kind.tag_level > level:
        return None
    above = [name for name, since in kind.field_levels.items() if since > level]
    return replace(event, **{name: _default_of(kind, name) for name in above}) if above else event


def require(event: Any, in_force: int) -> None:
    """Raises AboveFeatureLevel if `event` may not be written yet."""
    if is_newer(type(event)) and (level := level_of(event)) > in_force:
        raise AboveFeatureLevel(str(event.__struct_config__.tag), level, in_force)


def _default_of(kind: type, name: str) -> Any:
    (found,) = (field for field in fields(kind) if field.name == name)
    if found.default is not NODEFAULT:
        return found.default
    assert found.default_factory is not NODEFAULT, f"{kind.__name__}.{name} has no default"
    return found.default_factory()
