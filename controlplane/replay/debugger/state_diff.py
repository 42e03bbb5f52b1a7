"""What is different between two states of the fold, field by field."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
from msgspec import Struct

from relume.policies.state.fleet import Fleet

_LEFT_OUT = ("order", "revision")
"""Different after every transaction, and no help."""


class Change(Struct, frozen=True):
    """A field, by its path (`workers.w0.engine`), before and after. None: not there."""

    path: str
    before: Any
    after: Any


def diff(before: Fleet, after: Fleet) -> list[Change]:
    """The changes from one state to the other, in the order of the state's fields. What appeared or
    disappeared is shown whole. Heads of streams are shown by their positions."""
    return list(_changes("", _plain(before), _plain(after)))


def _plain(fleet: Fleet) -> dict[str, Any]:
    plain = msgspec.to_builtins(fleet)
    plain["streams"] = {name: head.position for name, head in fleet.streams.items()}
    return {name: value for name, value in plain.items() if name not in _LEFT_OUT}


def _changes(path: str, before: Any, after: Any) -> Iterator[Change]:
    if before == after:
        return
    if not (isinstance(before, dict) and isinstance(after, dict)):
        yield Change(path, before, after)
        return
    for name in [*before, *(name for name in after if name not in before)]:
        yield from _changes(
            f"{path}.{name}" if path else str(name), before.get(name), after.get(name)
        )
