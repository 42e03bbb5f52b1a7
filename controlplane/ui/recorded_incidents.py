"""The incidents of a stored log, as they were known at any of its places.

The fold of incidents goes forward only. Copies of it are stored at intervals; a place is reached from the
nearest copy before it.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Sequence

from relume.controlplane.incidents.incident import Incident
from relume.controlplane.incidents.incident_fold import IncidentFold
from relume.events.log.entries import Entry

MOST_COPIES = 64


class RecordedIncidents:
    """Fed with the entries that the fold wants, in order; then it gives those of any revision."""

    def __init__(self) -> None:
        self._entries: list[Entry] = []
        self._copies: list[tuple[int, IncidentFold]] = [(0, IncidentFold())]
        self._whole = IncidentFold(most=100_000)

    def take(self, entry: Entry) -> None:
        """The next event of the log."""
        if self._whole.wants(entry.stream, entry.event):
            self._entries.append(entry)
            self._whole.take(entry)

    @property
    def all(self) -> list[Incident]:
        """Those of the whole log, oldest first."""
        return self._whole.incidents

    def at(self, revision: int) -> list[Incident]:
        """The latest incidents as they were known at `revision`, oldest first."""
        end = bisect_right(self._entries, revision, key=lambda entry: entry.revision)
        start, fold = self._nearest(end)
        fold = copy.deepcopy(fold)
        spacing = max(len(self._entries) // MOST_COPIES, 1)
        for at in range(start, end):
            fold.take(self._entries[at])
            if (at + 1) % spacing == 0:
                self._keep_copy(at + 1, fold)
        return fold.incidents

    def _nearest(self, end: int) -> tuple[int, IncidentFold]:
        at = bisect_right(self._copies, end, key=_place_of) - 1
        return self._copies[at]

    def _keep_copy(self, place: int, fold: IncidentFold) -> None:
        at = bisect_right(self._copies, place, key=_place_of)
        if self._copies[at - 1][0] != place:
            self._copies.insert(at, (place, copy.deepcopy(fold)))


def _place_of(known: Sequence[object]) -> int:
    place = known[0]
    assert isinstance(place, int)
    return place


def first_revisions(incidents: list[Incident]) -> dict[str, int]:
    """By id of an incident, the revision of the event that it begins with."""
    return {record.id: int(record.id.partition(".")[0]) for record in incidents}
