"""Input of validators: the flat log, and the clients' records."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from relume.chaos.validators.known_facts import KnownFacts
from relume.events import vocabulary as v
from relume.events.log.codec import CachedRecords
from relume.events.log.entries import Entry, entries
from relume.events.log.interface import RevisionGroup
from relume.policies.state.fleet import Fleet
from relume.policies.state.fold import apply_group

THE_RUN = "the run"
"""Subject of a violation that only reports a lack of evidence."""


class Violation(Struct, frozen=True):
    """A broken promise: which, its subject, and the evidence."""

    promise: str
    about: str
    detail: str
    revision: int = 0

    def __str__(self) -> str:
        at = f" (revision {self.revision})" if self.revision else ""
        return f"{self.promise} {self.about}: {self.detail}{at}"


class ClientRecord(Struct, kw_only=True):
    """One request as its client saw it.

    `request` is the x-request-id it sent, unique in the run. `content_id` is equal for requests that
    must get equal answers. `undisturbed` marks those that ran without faults.
    `outcome`: completed, cancelled (it left), failed or rejected (it got an error), cut (the
    connection broke without an end), gone (it returned to a stream that no longer existed).
    `status` 0: no answer came. `tokens` are ids, if the request wants them; `token_count` counts
    them in any case; `other_tokens` counts those of further choices. `starts`: index of the first
    token of each chunk, if known. `gaps_ms` lie between chunks.
    """

    request: str
    status: int = 0
    outcome: str = "completed"
    text: str = ""
    token_count: int = 0
    finish: str = ""
    tokens: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    gaps_ms: list[float] = field(default_factory=list)
    content_id: str = field(default="", name="asked")
    undisturbed: bool = False
    other_tokens: int = 0


class Course(Struct, kw_only=True):
    """All events of replicas and the leader about one request, in order, and the engines' records
    of queued attempts. `owners`: streams that owned it, in order; a returning client changes the
    owner. Later events of an earlier owner are void and left out. They count again if the client
    returns to that owner, and no other replica dispatched the request meanwhile."""

    request: str
    arrived: Entry | None = None
    events: list[Entry] = field(default_factory=list)
    ends: list[Entry] = field(default_factory=list)
    queued: list[tuple[Entry, v.RequestQueued]] = field(default_factory=list)
    owners: list[str] = field(default_factory=list)
    void: list[Entry] = field(default_factory=list)
    late_ends: list[Entry] = field(default_factory=list)
    """Ends that an earlier owner wrote."""
    unaware: list[v.RouteDecided] = field(default_factory=list)
    """Dispatches of a replica before it had read that another one owned the request: of an earlier
    owner, or of one to which the client returned before it had read that."""
    owned_at: int = 0
    """Revision at which the last owner became that."""
    other_owned_at: int = 0
    """Revision of the last return to another replica, which dispatched the request, if the last owner
    had it before that too."""

    def add(self, at: Entry) -> None:
        """Add the next event of this request."""
        kind = type(at.event)
        if kind is v.ClientReturned and self.ends:
            if self.owners[-1:] == [at.stream]:
                self.events.append(at)  # what follows of this replica counts from there
            return  # too late to own it
        if kind in (v.RequestArrived, v.ClientReturned):
            if at.stream in self.owners[:-1] and self._is_dispatched_by_another(at.stream):
                self.other_owned_at = self.owned_at
            self.owners.append(at.stream)
            self.owned_at = at.revision
            self.events += [void for void in self.void if void.stream == at.stream]
            self.void = [void for void in self.void if void.stream != at.stream]
        elif at.stream in self.owners and at.stream != self.owners[-1]:
            self._add_of_earlier_owner(at)
            return
        if kind is v.RouteDecided and at.event.worker and len(self.owners) > 1:
            self.void.clear()
            if at.event.basis.revision < self.other_owned_at:
                self.unaware.append(at.event)
        self.events.append(at)
        if kind is v.RequestArrived:
            self.arrived = at
        elif kind is v.RequestEnded:
            self.ends.append(at)

    def _add_of_earlier_owner(self, at: Entry) -> None:
        kind = type(at.event)
        if kind is v.RequestEnded:
            self.late_ends.append(at)
        is_unaware = kind is v.RouteDecided and at.event.basis.revision < self.owned_at
        if is_unaware and at.event.worker:
            self.unaware.append(at.event)
        if not self.is_dispatched_anew:
            self.void.append(at)

    def _is_dispatched_by_another(self, stream: str) -> bool:
        return any(
            type(at.event) is v.RouteDecided and at.event.worker and at.stream != stream
            for at in self.events
        )

    @property
    def is_dispatched_anew(self) -> bool:
        """Whether the last owner has dispatched it."""
        last = [i for i, at in enumerate(self.events) if type(at.event) is v.ClientReturned][-1]
        return any(
            type(at.event) is v.RouteDecided and at.event.worker for at in self.events[last:]
        )

    @property
    def decisions(self) -> list[v.RouteDecided]:
        """Its dispatches, in order, without decisions that chose no worker."""
        events = (at.event for at in self.events)
        return [e for e in events if type(e) is v.RouteDecided and e.worker]

    @property
    def end(self) -> v.RequestEnded | None:
        """The terminal event that matches the client: the owner's, if there is one."""
        own = [at for at in self.ends if at.stream != "fleet"]
        chosen = own or self.ends
        return chosen[0].event if chosen else None


def events_of(groups: Iterable[RevisionGroup], stream: str = "") -> Iterator[Entry]:
    """Every event, in order; `stream`: of that stream, or of its kind if it ends in a dot."""
    clock = groups.clock if isinstance(groups, Log) else {}
    for entry in entries(groups, stream):
        at_ms = clock.get((entry.revision, entry.stream)) if clock else None
        yield entry if at_ms is None else replace(entry, at_ms=at_ms)


class Log(list[RevisionGroup]):
    """A log for several validators: decoded once, folded once, grouped by request once, and with
    jumps of clocks corrected (`Entry.at_ms`). `clock_ms`: as in `GroundTruth`. Do not alter it."""

    def __init__(
        self, groups: Iterable[RevisionGroup], clock_ms: Mapping[tuple[int, str], int] | None = None
    ) -> None:
        super().__init__(
            replace(
                group,
                segments=tuple(
                    replace(s, records=CachedRecords(s.records)) for s in group.segments
                ),
            )
            for group in groups
        )
        self._end: Fleet | None = None
        self._watchers: list[Callable[[Fleet, RevisionGroup], None]] = []
        known = _by_truth(self, clock_ms) if clock_ms else {}
        self.clock = {**known, **_clock(self, known)}

    @cached_property
    def courses(self) -> dict[str, Course]:
        """As `courses`."""
        return _courses(self)

    def watch(self, watcher: Callable[[Fleet, RevisionGroup], None]) -> None:
        """Have the next fold call `watcher` with each group after its fold."""
        self._watchers.append(watcher)

    @cached_property
    def known(self) -> KnownFacts:
        """What decisions in the log could know."""
        return KnownFacts(self)

    def fold(
        self,
        before: Callable[[Fleet, RevisionGroup], None],
        seen: Callable[[Fleet, str, Any], None],
    ) -> Fleet:
        """Fold it all. Calls `before` with each group ahead of its fold, and `seen` with the stream
        and each event after its fold. Caches the final fold."""
        fleet, watchers = Fleet(), self._watchers
        self._watchers = []
        for group in self:
            before(fleet, group)
            apply_group(fleet, group, lambda stream, _, event: seen(fleet, stream, event))
            for watcher in watchers:
                watcher(fleet, group)
        self._end = fleet
        return fleet

    @property
    def end(self) -> Fleet:
        """The final fold."""
        if self._end is None or self._watchers:
            self._end = self.fold(lambda fleet, group: None, lambda fleet, stream, event: None)
        return self._end


_MOST_AHEAD_MS = 2000
_MOST_BEHIND_MS = 300_000
"""A worker's clock beyond these limits, relative to the control plane's, has jumped. A segment that
lags less waited for etcd."""
_MOST_BACK_MS = 1000
"""A worker's clock that shows less than before, by more than this, has jumped back."""


def _by_truth(
    groups: Sequence[RevisionGroup], clock_ms: Mapping[tuple[int, str], int]
) -> dict[tuple[int, str], int]:
    """Corrected times of segments of replicas whose clocks were wrong. A segment that was stamped before
    its clock changed and landed after that has the error of before: of both, the one counts that gives
    the time nearest to the latest one so far."""
    times: dict[tuple[int, str], int] = {}
    errors: dict[str, int] = {}
    reached = 0
    for group in groups:
        for segment in group.segments:
            key, stream = (group.revision, segment.stream), segment.stream
            if stream.startswith("w."):
                continue
            before = errors.get(stream, 0)
            now = errors[stream] = clock_ms.get(key, before)
            found = min(
                (segment.at_ms - error for error in {before, now}), key=lambda t: abs(t - reached)
            )
            reached = max(reached, found) if reached else segment.at_ms - now
            if found != segment.at_ms:
                times[key] = found
    return times


def _clock(
    groups: Sequence[RevisionGroup], known: Mapping[tuple[int, str], int]
) -> dict[tuple[int, str], int]:
    """Corrected times of segments whose worker's clock had jumped, by revision and stream: that of
    the control plane's next segment, or of the one before. `known`: corrected times of replicas."""
    times = _ahead(groups, known)
    before = reached = 0
    latest: dict[str, int] = {}
    for group in groups:
        for segment in group.segments:
            key = group.revision, segment.stream
            if not segment.stream.startswith("w."):
                before = known.get(key, segment.at_ms)
                reached = max(reached, before)
                continue
            if key in times:
                times[key] = max(times[key], reached)
            own = latest.get(segment.stream, 0)
            if segment.at_ms < max(before - _MOST_BEHIND_MS, min(before, own) - _MOST_BACK_MS):
                times[key] = before
            latest[segment.stream] = max(own, times.get(key, segment.at_ms))
    return times


def _ahead(
    groups: Sequence[RevisionGroup], known: Mapping[tuple[int, str], int]
) -> dict[tuple[int, str], int]:
    """Segments of workers whose clock had jumped ahead, with the time of the control plane's next one.

    That one may have been stamped long before it landed, because etcd took no writes. But a writer has
    one append under way: the second segment of a stream was stamped after the first one had landed. So the
    earliest second one bounds the time from above."""
    times: dict[tuple[int, str], int] = {}
    after, firsts, seconds = 0, dict[str, int](), dict[str, int]()
    for group in reversed(groups):
        for segment in reversed(group.segments):
            key, stream = (group.revision, segment.stream), segment.stream
            if not stream.startswith("w."):
                after = known.get(key, segment.at_ms)
                if stream in firsts:
                    seconds[stream] = firsts[stream]
                firsts[stream] = after
            elif after:
                latest_ms = min(seconds.values(), default=max(firsts.values()))
                if segment.at_ms > latest_ms + _MOST_AHEAD_MS:
                    times[key] = after
    return times


def log_of(groups: Sequence[RevisionGroup]) -> Log:
    """`groups` as a `Log`, itself if it is one."""
    return groups if isinstance(groups, Log) else Log(groups)


def courses(groups: Iterable[RevisionGroup]) -> dict[str, Course]:
    """The course of every request in the log, by its id there."""
    return groups.courses if isinstance(groups, Log) else _courses(groups)


def _courses(groups: Iterable[RevisionGroup]) -> dict[str, Course]:
    found: dict[str, Course] = {}
    for at in events_of(groups):
        event = at.event
        kind = type(event)
        if kind is v.EngineStep:
            for change in event.changes:
                if type(change) is v.RequestQueued and change.request in found:
                    found[change.request].queued.append((at, change))
        elif kind in OF_REQUEST:
            found.setdefault(event.request, Course(request=event.request)).add(at)
    return found


OF_REQUEST = (
    v.RequestArrived,
    v.RouteDecided,
    v.TransportObserved,
    v.ClientReturned,
    v.RequestEnded,
)


def of_clients(
    found: dict[str, Course], clients: Sequence[ClientRecord]
) -> list[tuple[ClientRecord, Course | None]]:
    """Each client's record with its request's course; None: not in the log."""
    by_client: dict[str, Course] = {}
    for course in found.values():
        if course.arrived is not None and course.arrived.event.client_id:
            by_client[course.arrived.event.client_id] = course
    return [(c, by_client.get(c.request) or found.get(c.request)) for c in clients]


def has_unnamed_tokens(end: v.RequestEnded) -> bool:
    """Whether its client had a first token, and none was counted: they came without ids."""
    return not end.tokens and end.ttft_us >= 0
