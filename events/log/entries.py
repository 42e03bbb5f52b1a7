"""The events of a log, each with its place: what readers of a whole log walk through."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any, get_args

from msgspec import Struct

from relume.events.log.codec import TAGS, UnreadableRecord, decode_all
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary import AdminCommanded
from relume.events.vocabulary.enums import AdminCommand
from relume.events.vocabulary.step_changes import AnyChange

KINDS: dict[type, str] = {
    **{kind: tag.partition("/")[0] for tag, kind in TAGS.items()},
    **{
        kind: re.sub(r"(?<=.)([A-Z])", r"_\1", kind.__name__).lower()
        for kind in get_args(AnyChange)
    },
    UnreadableRecord: str(UnreadableRecord.__struct_config__.tag),
}
"""The names of the types of events, of changes inside engine steps, and of records that cannot be read."""


class Entry(Struct, frozen=True, gc=False, kw_only=True):
    """An event and its place. (`revision`, `index` within its group, from 0) is the total order;
    `position` counts in `stream`, from 1; `epoch` is its writer's. `at_ms` is the writer's wall
    clock, for people. `event` is a record's event, or one change inside an engine step."""

    revision: int
    index: int
    stream: str
    epoch: int
    position: int
    at_ms: int
    event: Any

    @property
    def kind(self) -> str:
        """The name of the event's type as the log has it, e.g. engine_died, first_token."""
        return KINDS[type(self.event)]

    @property
    def requests(self) -> set[str]:
        """The requests the event is about."""
        event = self.event
        named = {getattr(event, "request", "")}
        for field in ("choices", "changes", "held"):
            parts = getattr(event, field, ())
            if type(parts) is tuple:  # of a judgement `held` is a number
                named |= {part.request for part in parts}
        named |= set(getattr(event, "requests", ()))
        return {name.partition("#")[0] for name in named} - {""}

    @property
    def workers(self) -> set[str]:
        """The workers the event is about, holders among them; candidates are not."""
        event = self.event
        named = {getattr(event, field, "") for field in ("worker", "primary", "holder")}
        named |= set(getattr(event, "holders", ()))
        named |= {effect.worker for effect in getattr(event, "effects", ())}
        if type(event) is AdminCommanded and event.command not in _OF_FLEET:
            named.add(event.target)
        if self.stream.startswith("w."):
            named.add(self.stream[2:])
        return named - {""}


_OF_FLEET = (AdminCommand.CONFIG, AdminCommand.RESIGN)
"""Commands that are about no worker."""


def entries_of(group: RevisionGroup, stream: str = "") -> Iterator[Entry]:
    """The events of a group: all, or those of `stream`, or of every stream whose name begins
    with it when it ends in a dot (`r.`). Raises UnknownEvent, MalformedRecord."""
    index = 0
    for segment in group.segments:
        if _is_wanted(segment.stream, stream):
            for number, event in enumerate(decode_all(segment.records)):
                yield Entry(
                    revision=group.revision,
                    index=index + number,
                    stream=segment.stream,
                    epoch=segment.epoch,
                    position=segment.first + number,
                    at_ms=segment.at_ms,
                    event=event,
                )
        index += len(segment.records)


def entries(groups: Iterable[RevisionGroup], stream: str = "") -> Iterator[Entry]:
    """The events of all `groups`, in order, as `entries_of` gives them."""
    for group in groups:
        yield from entries_of(group, stream)


def _is_wanted(name: str, stream: str) -> bool:
    return name.startswith(stream) if stream.endswith(".") else stream in ("", name)
