"""No record is above the feature level in force where it stands, and each raise was announced.

The rule is small and its own: announcements and raises are read from the log, not from the fold.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from relume.events import vocabulary as v
from relume.events.log.codec import TAGS, decode_all
from relume.events.log.feature_levels import FIRST_LEVEL, is_newer, level_of
from relume.events.log.interface import RevisionGroup

_SETTING = "feature_level"


class LevelWatch:
    """Reads a log group by group."""

    def __init__(self) -> None:
        self.in_force = FIRST_LEVEL
        self._announced: dict[str, int] = {}
        """By live replica."""
        self._has_newer = any(map(is_newer, TAGS.values()))

    def folded(self, group: RevisionGroup) -> Iterator[tuple[str, str]]:
        """(stream, what is wrong) in the group. Segments of other streams in one group may rest on
        a raise in it."""
        for segment in sorted(group.segments, key=lambda segment: segment.stream != "fleet"):
            stream = segment.stream
            if not (self._has_newer or stream == "fleet" or stream.startswith("r.")):
                continue
            for event in decode_all(segment.records):
                if text := self._of(stream, event):
                    yield stream, text

    def _of(self, stream: str, event: Any) -> str:
        kind = type(event)
        if kind is v.ReplicaStarted:
            self._announced[event.replica] = int(dict(event.settings).get(_SETTING, "0"))
        elif kind is v.ReplicaStopped or kind is v.ReplicaLost:
            self._announced.pop(event.replica, None)
        elif kind is v.FeatureLevelRaised:
            return self._raised(event)
        if isinstance(event, v.Event) and is_newer(kind) and level_of(event) > self.in_force:
            tag = str(event.__struct_config__.tag)
            return f"{tag} needs feature level {level_of(event)}, in force is {self.in_force}"
        return ""

    def _raised(self, event: v.FeatureLevelRaised) -> str:
        was, self.in_force = self.in_force, max(self.in_force, event.level)
        if event.was != was or event.level < was:
            return f"feature level {event.level} after {event.was}, in force was {was}"
        older = [name for name, level in self._announced.items() if level < event.level]
        if older and event.level > was:
            return f"feature level {event.level} is raised, which {', '.join(older)} do not read"
        return ""
