"""Any moment of a stored log, in the shape of the live ones.

A place is a transaction of the log, as in the debugger: its number of revision groups. The fleet there
is folded by the debugger's timeline. One pass at the start notes where decisions are, which requests there
are, and what failed.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from itertools import islice

from msgspec import Struct

from relume.controlplane.admin import models as m
from relume.controlplane.admin.events_api import DECISIONS, TYPES
from relume.controlplane.admin.request_book import RequestBook, RequestHistory, requests_of
from relume.controlplane.cli.log_events import NOISE
from relume.controlplane.incidents.incident import Incident
from relume.controlplane.incidents.sentences import summary
from relume.controlplane.replay import rendering
from relume.controlplane.replay.debugger.folded_log import Timeline
from relume.controlplane.replay.recorded_log import History
from relume.controlplane.replay.story import Story, story_of
from relume.controlplane.replay.why import why
from relume.controlplane.ui.moment import (
    SHOWN_REQUESTS,
    Head,
    Moment,
    RecordedPlace,
    moment_of,
)
from relume.controlplane.ui.recorded_incidents import RecordedIncidents, first_revisions
from relume.events import vocabulary as v
from relume.events.log.entries import Entry, entries_of
from relume.policies.routing.eligibility import excluded_at
from relume.policies.state.overlay.view import View

STEPS = (
    *DECISIONS,
    v.RecoveryPlanned,
    v.MigrationPlanned,
    v.HolderChosen,
    v.HealthDecided,
    v.CrossCheckDecided,
)
"""Events that one steps by."""
FREQUENT = frozenset(TYPES[name] for name in NOISE.split(","))
BINS = 240
SHOWN_EVENTS = 12
"""Events of a place that are shown with it."""
SEARCH_S = 5.0
"""Time to look for frequent events before a place."""


class Mark(Struct, frozen=True, kw_only=True):
    """An incident on the scale: the place where it begins."""

    place: int
    id: str
    summary: str


class Recording(Struct, frozen=True, kw_only=True):
    """A stored log. `origin`: where it comes from. It has `places`, from 0 (before its first transaction)
    on, and `decisions` at some of them. `density`: decisions in equal parts of the places.
    `has_report`: there is a report of the run that made it."""

    origin: str
    places: int
    first_revision: int
    last_revision: int
    decisions: int
    density: list[int]
    incidents: list[Mark]
    has_report: bool = False


class RecordedFleet:
    """A log in memory, and its moments. Raises LogError for a log that does not fold."""

    def __init__(self, history: History) -> None:
        self._history = history
        self.timeline = Timeline(history, known=history.snapshots())
        self._book = RequestBook(limit=1 << 60)
        self._failures = RecordedIncidents()
        self._seldom: list[Entry] = []
        self._steps: list[int] = []
        self._times: list[int] = [0]
        """By place, the latest time up to it."""
        self._read()
        self._names = [(name, _first(c)) for name, c in self._book.courses.items()]
        self._names.sort(key=_revision)

    def _read(self) -> None:
        for place, group in enumerate(self.timeline.groups, 1):
            times = [segment.at_ms for segment in group.segments]
            self._times.append(max(self._times[-1], *times, 0))
            for entry in entries_of(group):
                self._book.note(entry)
                self._failures.take(entry)
                kind = type(entry.event)
                if kind not in FREQUENT:
                    self._seldom.append(entry)
                if kind in STEPS and self._steps[-1:] != [place]:
                    self._steps.append(place)

    @property
    def incidents(self) -> list[Incident]:
        """All failures of the log, oldest first."""
        return self._failures.all

    def recording(self) -> Recording:
        """What the scale shows."""
        end = self.timeline.end
        density = [0] * min(BINS, max(end, 1))
        for place in self._steps:
            density[min((place - 1) * len(density) // max(end, 1), len(density) - 1)] += 1
        begins = first_revisions(self.incidents)
        return Recording(
            origin=self._history.origin,
            places=end,
            first_revision=self.timeline.revision_at(min(1, end)),
            last_revision=self.timeline.revision_at(end),
            decisions=len(self._steps),
            density=density,
            incidents=[
                Mark(
                    place=self.timeline.place(begins[record.id]),
                    id=record.id,
                    summary=summary(record),
                )
                for record in self.incidents
            ],
        )

    def step(self, place: int, forward: bool) -> int:
        """The next place with a decision, or the one before; the end or the beginning if none is."""
        if forward:
            at = bisect_right(self._steps, place)
            return self._steps[at] if at < len(self._steps) else self.timeline.end
        at = bisect_right(self._steps, place - 1)
        return self._steps[at - 1] if at else 0

    def place_at(self, at_ms: int) -> int:
        """The last place of this time or before."""
        return max(bisect_right(self._times, at_ms) - 1, 0)

    def moment(self, place: int) -> Moment:
        """The fleet as it was after the transaction at `place`."""
        timeline = self.timeline
        fleet = timeline.seek(place)
        view = View(f"r.{fleet.leader}", fleet)
        known = m.degradation_of(fleet)
        here = timeline.entries(timeline.at)
        head = Head(
            replica="",
            leader=fleet.leader,
            revision=timeline.revision,
            at_ms=max((entry.at_ms for entry in here), default=0),
            serving=any(not excluded_at(view, w, w.model) for w in fleet.workers.values()),
            log_healthy=True,
            log_silent_ms=0,
            unwritten=0,
            live_requests=len(fleet.requests),
            arrived=fleet.arrived,
            ended=fleet.ended,
            decisions=fleet.decisions,
            degradation=known.mode,
            requests_known=bisect_right(self._names, timeline.revision, key=_revision),
            recorded=RecordedPlace(
                place=timeline.at,
                decision=bisect_right(self._steps, timeline.at),
                events=[
                    m.event_info(entry, rendering.brief(entry.event))
                    for entry in islice(
                        (e for e in here if type(e.event) not in FREQUENT), SHOWN_EVENTS
                    )
                ],
            ),
        )
        return moment_of(
            view,
            head,
            islice(self.requests(), SHOWN_REQUESTS),
            self._failures.at(timeline.revision),
            known.models,
        )

    def requests(self, search: str = "") -> Iterator[m.RequestInfo]:
        """Requests at the present place, newest first."""
        return requests_of(self._courses(), self.timeline.fleet, search)

    def _courses(self) -> Iterator[tuple[str, RequestHistory]]:
        revision = self.timeline.revision
        end = bisect_right(self._names, revision, key=_revision)
        for name, _ in reversed(self._names[:end]):
            yield name, self._book.courses[name].until(revision)

    def story(self, request: str) -> Story | None:
        """Why a request went where it went, by the whole log."""
        found = why(self.timeline.groups, request)
        return story_of(found, since=self.timeline.revision_at(0) + 1) if found else None

    def events(self, limit: int, wanted: Callable[[Entry], bool], seldom: bool) -> list[Entry]:
        """The newest `limit` events up to the present place, oldest first. `seldom`: none of the frequent
        types is wanted."""
        found: list[Entry] = []
        for entry in self._before() if seldom else self._all_before():
            if wanted(entry):
                found.append(entry)
                if len(found) == limit:
                    break
        return found[::-1]

    def _before(self) -> Iterator[Entry]:
        end = bisect_right(self._seldom, self.timeline.revision, key=lambda e: e.revision)
        return reversed(self._seldom[:end])

    def _all_before(self) -> Iterator[Entry]:
        until = time.monotonic() + SEARCH_S
        for place in range(self.timeline.at, 0, -1):
            if time.monotonic() > until:
                return
            yield from reversed(list(entries_of(self.timeline.groups[place - 1])))


def _first(course: RequestHistory) -> int:
    if course.entries:
        return course.entries[0].revision
    return min(entry.revision for entry, _ in course.journalled.values())


def _revision(known: tuple[str, int]) -> int:
    return known[1]
