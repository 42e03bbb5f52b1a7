"""What the debugger stops at: a type of event, a request, a worker."""

from __future__ import annotations

import difflib
from collections.abc import Callable

from msgspec import Struct

from relume.controlplane.replay.debugger.debug_commands import BadQuestion
from relume.controlplane.replay.debugger.folded_log import Timeline
from relume.events.log.entries import KINDS, Entry


class Match(Struct, frozen=True):
    """`text` is for people; `event(entry)`: whether this entry is meant."""

    text: str
    event: Callable[[Entry], bool]


def match(kind: str, value: str) -> Match:
    """A match by `kind`: type, request, worker. Raises BadQuestion."""
    text = f"{kind} {value}"
    if kind == "type":
        name = known_kind(value)
        return Match(text, lambda entry: entry.kind == name)
    if kind == "request":
        return Match(text, lambda entry: value in entry.requests)
    if kind == "worker":
        return Match(text, lambda entry: value in entry.workers)
    raise BadQuestion(f"{kind!r}: say type, request or worker; other questions: --sqlite")


def known_kind(name: str) -> str:
    """`name`, if there is such a type of event. Raises BadQuestion with the nearest."""
    names = set(KINDS.values())
    if name in names:
        return name
    close = difflib.get_close_matches(name, names, 3)
    raise BadQuestion(
        f"no event type {name!r}; " + (", ".join(close) or "`relume events --help` shows some")
    )


def kinds() -> list[str]:
    """All types of events and of changes inside engine steps, for completion."""
    return sorted(KINDS.values())


Found = tuple[list[Entry], Match | None]
"""What a search came upon: the entries, and which match they are. Nothing and None: none."""


def next_match(timeline: Timeline, wanted: list[Match]) -> Found:
    """Go to the first place after the cursor that one of `wanted` means, else to the end."""
    return _search(timeline, wanted, range(timeline.at + 1, timeline.end + 1))


def last_match(timeline: Timeline, wanted: list[Match]) -> Found:
    """Go to the last place before the cursor that one of `wanted` means, else to the
    beginning."""
    return _search(timeline, wanted, range(timeline.at - 1, 0, -1))


def _search(timeline: Timeline, wanted: list[Match], places: range) -> Found:
    for place in places:
        entries = timeline.entries(place)
        for one in wanted:
            if meant := [entry for entry in entries if one.event(entry)]:
                timeline.seek(place)
                return meant, one
    timeline.seek(timeline.end if places.step > 0 else 0)
    return [], None
