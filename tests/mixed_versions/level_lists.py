"""What the events of a feature level are on the wire, as lines of text: the lists in `levels/`.

python -m tests.mixed_versions.level_lists    prints the list of this build's level
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, get_args, get_type_hints

import msgspec
from msgspec import NODEFAULT
from msgspec.structs import FieldInfo, fields

from relume.events.log.feature_levels import LEVEL
from relume.events.vocabulary import AnyEvent
from relume.events.vocabulary.enums import Word

FOLDER = Path(__file__).parent / "levels"
KINDS: tuple[type, ...] = get_args(AnyEvent)


def path_of(level: int) -> Path:
    return FOLDER / f"{level}.txt"


def listing(level: int, kinds: Iterable[type] = KINDS) -> str:
    """Tags, fields in their order, types and defaults of all that a record of `level` may have; also of
    the parts of events, which have no level of their own."""
    parts: dict[str, type] = {}
    blocks = []
    for kind in kinds:
        if kind.tag_level <= level:  # type: ignore[attr-defined]
            since = kind.field_levels  # type: ignore[attr-defined]
            present = [f for f in fields(kind) if since.get(f.encode_name, 1) <= level]
            blocks.append(_block(kind, present, parts))
    described: dict[str, str] = {}
    while missing := sorted(parts.keys() - described.keys()):
        part = parts[missing[0]]
        described[missing[0]] = _block(part, list(fields(part)), parts)
    return "\n".join([*sorted(blocks), *(described[name] for name in sorted(described))]) + "\n"


def _block(kind: Any, present: list[FieldInfo], parts: dict[str, type]) -> str:
    hints = get_type_hints(kind)
    tag = kind.__struct_config__.tag
    name = str(tag) if "/" in str(tag) else f"part {kind.__name__} {tag or ''}".rstrip()
    lines = [name]
    for field in present:
        hint = hints[field.encode_name]
        parts.update((part.__name__, part) for part in _parts_in(hint))
        lines.append(f"    {field.encode_name}: {_shown(hint)}{_default(field)}")
    return "\n".join(lines)


def _parts_in(hint: Any) -> Iterator[type]:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        yield hint
    for argument in get_args(hint):
        yield from _parts_in(argument)


def _shown(hint: Any) -> str:
    """The type without the modules of its names."""
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", text)


def _default(field: FieldInfo) -> str:
    default = field.default
    if default is not NODEFAULT:
        return f" = {(default.value if isinstance(default, Word) else default)!r}"
    return "" if field.default_factory is NODEFAULT else f" = {field.default_factory.__name__}()"


if __name__ == "__main__":
    print(listing(LEVEL), end="")
