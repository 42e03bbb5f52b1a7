"""The fold of a log at any of its revisions, forward and back.

The log's unit is the transaction: a place is the number of revision groups folded. While
the fold goes forward it is saved at intervals; going back starts from the
nearest of these, so a step back costs the records since then and not the whole log.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable

from msgspec.structs import replace

from relume.controlplane.replay.recorded_log import History
from relume.events import vocabulary as v
from relume.events.log.entries import Entry, entries_of
from relume.policies.state.fleet import Fleet, dump, load
from relume.policies.state.fold import apply_group

SPACING = 10_000
"""Records between two states put down: about 50 ms of folding."""

MOST = 256
"""States kept; with more of them every other one goes and the spacing doubles."""


class Timeline:
    """A cursor over a log in memory. `at` counts the groups folded into `fleet`, which
    belongs to the timeline: it moves with it, and only the timeline changes it."""

    def __init__(
        self, history: History, spacing: int = SPACING, known: Iterable[Fleet] = ()
    ) -> None:
        self.groups = history.groups
        self.revisions = [group.revision for group in history.groups]
        self.at = 0
        self.folded = 0
        """Groups folded so far, repetitions counted."""
        self._spacing = spacing
        self._since = 0
        self._start = history.base.revision if history.base is not None else 0
        self._states = {0: dump(history.base or Fleet())}
        self.fleet = load(self._states[0])
        for fleet in known:
            if self.revisions and self._start < fleet.revision <= self.revisions[-1]:
                self._states[self.place(fleet.revision)] = dump(fleet)

    @property
    def end(self) -> int:
        """The last place."""
        return len(self.groups)

    @property
    def revision(self) -> int:
        """The revision of the present place."""
        return self.revision_at(self.at)

    def revision_at(self, place: int) -> int:
        """The revision of `place`: of the last group folded there."""
        return self.revisions[place - 1] if place else self._start

    def place(self, revision: int) -> int:
        """The place after all groups up to `revision`."""
        return bisect_right(self.revisions, revision)

    def seek(self, place: int) -> Fleet:
        """Go to `place` (held within the log), by the shortest fold there is.

        Raises UnknownEvent, MalformedRecord.
        """
        place = max(0, min(place, self.end))
        best = max((at for at in self._states if at <= place), default=0)
        if self.at > place or best > self.at:
            self.at, self._since = best, 0
            self.fleet = load(self._states[best])
        while self.at < place:
            group = self.groups[self.at]
            apply_group(self.fleet, group)
            self.at += 1
            self.folded += 1
            self._since += sum(len(segment.records) for segment in group.segments)
            if self._since >= self._spacing:
                self._put_down()
        return self.fleet

    def copy(self, revision: int) -> Fleet:
        """The state at `revision`, of its own. The cursor ends where it was."""
        back = self.at
        fleet = load(dump(self.seek(self.place(revision))))
        self.seek(back)
        return fleet

    def entries(self, place: int) -> list[Entry]:
        """The events of the group that led to `place`, each engine step before the changes
        inside it; none for the beginning.

        Raises UnknownEvent, MalformedRecord.
        """
        found: list[Entry] = []
        if 0 < place <= self.end:
            for entry in entries_of(self.groups[place - 1]):
                found.append(entry)
                if type(entry.event) is v.EngineStep:
                    found += [replace(entry, event=change) for change in entry.event.changes]
        return found

    def _put_down(self) -> None:
        self._since = 0
        self._states[self.at] = dump(self.fleet)
        if len(self._states) > MOST:
            places = sorted(self._states)
            for at in places[1::2]:
                del self._states[at]
            self._spacing *= 2
