"""What became of recent requests: live ones, and the last few thousand that ended."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from msgspec.structs import replace

from relume.controlplane.admin.models import DecisionInfo, RequestInfo, event_info
from relume.controlplane.replay.why import OF_REQUEST, RESPONSE_PREFIXES
from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.log.entries import Entry
from relume.events.log.errors import LogError
from relume.events.vocabulary.enums import Guarantee, RequestState
from relume.policies.state.fleet import Fleet, Request

MAX_ENDED = 4096
DECISIONS = (v.RouteDecided, v.RequestHeld, v.RequestShed)


class RequestHistory:
    """One request's events, in order; `journalled` holds dispatches that came with an
    admission and whose `RouteDecided` has not been seen."""

    __slots__ = ("arrived", "ended", "entries", "first", "journalled")

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.arrived: v.RequestArrived | None = None
        self.ended: v.RequestEnded | None = None
        self.journalled: dict[int, tuple[Entry, bytes]] = {}
        self.first: dict[int, int] = {}
        """By attempt, when this replica learned of its first token, on its own clock."""

    def add(self, entry: Entry) -> None:
        """Note the next event of this request."""
        event = entry.event
        self.entries.append(entry)
        if type(event) is v.RequestArrived:
            self.arrived = event
        elif type(event) is v.RequestEnded:
            self.ended = event
        elif type(event) is v.RouteDecided:
            self.journalled.pop(event.attempt, None)

    def until(self, revision: int) -> RequestHistory:
        """The part up to `revision`."""
        part = RequestHistory()
        for entry in self.entries:
            if entry.revision <= revision:
                part.add(entry)
        for attempt, (entry, dispatch) in self.journalled.items():
            if entry.revision <= revision:
                part.journalled[attempt] = (entry, dispatch)
        return part

    def decided(self, attempt: int) -> bool:
        """Whether the decision for `attempt` is among the entries."""
        return any(
            type(e.event) is v.RouteDecided and e.event.attempt == attempt for e in self.entries
        )


class RequestBook:
    """Courses by request id, oldest first; at most `kept` ended ones, twice that in all."""

    def __init__(self, limit: int = MAX_ENDED, clock: Callable[[], int] | None = None) -> None:
        self._clock = clock
        self.courses: dict[str, RequestHistory] = {}
        self._of_client: dict[str, str] = {}
        self._ended: dict[str, bool] = {}
        self._limit = limit

    def note(self, entry: Entry) -> None:
        """Take one event of the log; most are none of our business."""
        event = entry.event
        kind = type(event)
        if kind is v.EngineStep:
            for change in event.changes:
                if type(change) is v.RequestQueued and change.dispatch:
                    self._journal(entry, change)
                elif type(change) is v.FirstToken and self._clock is not None:
                    course = self.courses.get(change.request)
                    if course is not None:
                        course.first.setdefault(change.attempt, self._clock())
        elif kind in OF_REQUEST:
            course = self._course(event.request)
            course.add(entry)
            if kind is v.RequestArrived and event.client_id:
                self._of_client[event.client_id] = event.request
            if kind is v.RequestEnded:
                self._forget_old(event.request)

    def find(self, name: str) -> str:
        """The request called `name`: its id, the id in its response, or (the newest with)
        what its client calls it. Empty when it is not here."""
        for bare in (name, *(name.removeprefix(p) for p in RESPONSE_PREFIXES)):
            if bare in self.courses:
                return bare
            request = self._of_client.get(bare, "")
            if request in self.courses:
                return request
        return ""

    def keep(self, request: str, course: RequestHistory) -> None:
        """Hold `course`; the oldest goes when there are too many (some never end here)."""
        self.courses[request] = course
        if len(self.courses) > 2 * self._limit:
            self._forget(next(iter(self.courses)))

    def _course(self, request: str) -> RequestHistory:
        course = self.courses.get(request)
        if course is None:
            course = RequestHistory()
            self.keep(request, course)
        return course

    def _journal(self, entry: Entry, change: v.RequestQueued) -> None:
        course = self._course(change.request)
        if not course.decided(change.attempt):
            course.journalled[change.attempt] = (entry, change.dispatch)

    def _forget_old(self, request: str) -> None:
        self._ended[request] = True
        while len(self._ended) > self._limit:
            oldest = next(iter(self._ended))
            del self._ended[oldest]
            self._forget(oldest)

    def _forget(self, request: str) -> None:
        course = self.courses.pop(request, None)
        client_id = course.arrived.client_id if course and course.arrived else ""
        if self._of_client.get(client_id) == request:
            del self._of_client[client_id]


def request_info(request: str, course: RequestHistory | None, live: Request | None) -> RequestInfo:
    """The request from its course, or, when it arrived before this replica, from the fold."""
    arrived = course.arrived if course else None
    ended = course.ended if course else None
    decisions = (
        [e.event for e in course.entries if type(e.event) is v.RouteDecided] if course else []
    )
    owner = live.owner if live else ""
    if course and course.entries and not owner:
        owner = course.entries[0].stream
    return RequestInfo(
        request=request,
        state=RequestState(ended.outcome) if ended else RequestState.LIVE,
        model=arrived.model if arrived else (live.model if live else ""),
        route=arrived.route if arrived else "",
        stream=arrived.stream if arrived else bool(live and live.stream),
        owner=owner.removeprefix("r."),
        client_id=arrived.client_id if arrived else "",
        verdict=arrived.verdict if arrived else (live.verdict if live else Guarantee.NONE),
        reason=arrived.reason if arrived else "",
        prompt_tokens=arrived.prompt_tokens if arrived else (live.prompt_tokens if live else 0),
        max_tokens=arrived.max_tokens if arrived else 0,
        attempts=ended.attempts
        if ended
        else max([live.attempt if live else 0, *(d.attempt for d in decisions)]),
        workers=[d.worker for d in decisions if d.worker]
        or [worker for worker, _ in (live.places if live else [])],
        status=ended.status if ended else 0,
        tokens=ended.tokens if ended else -1,
        finish=ended.finish if ended else "",
        ttft_us=ended.ttft_us if ended else -1,
        longest_gap_us=ended.longest_gap_us if ended else -1,
        detail=ended.detail if ended else "",
        arrived_ms=course.entries[0].at_ms if course and arrived else -1,
    )


def newest_requests(book: RequestBook, fleet: Fleet, search: str = "") -> Iterator[RequestInfo]:
    """Requests, newest first: the book's, then the fold's live ones that precede this replica. With
    `search`, those whose id or client's id contains it."""
    yield from requests_of(reversed(book.courses.items()), fleet, search)
    for request, live in reversed(fleet.requests.items()):
        if request not in book.courses and (search in request or search in live.client_id):
            yield request_info(request, None, live)


def requests_of(
    courses: Iterable[tuple[str, RequestHistory]], fleet: Fleet, search: str = ""
) -> Iterator[RequestInfo]:
    """The requests of these courses, or of those whose id or client's id contains `search`."""
    for request, course in courses:
        if (course.entries or request in fleet.requests) and _is_named(request, course, search):
            yield request_info(request, course, fleet.requests.get(request))


def _is_named(request: str, course: RequestHistory, search: str) -> bool:
    arrived = course.arrived
    return search in request or (arrived is not None and search in arrived.client_id)


def decisions_of(course: RequestHistory, stream: str = "") -> list[DecisionInfo]:
    """The decisions of a course, with those that only a worker's journal holds; `stream` is
    ours, whose clock the course knows."""
    found = [_decision(e, e.event, "log") for e in course.entries if type(e.event) in DECISIONS]
    for entry, dispatch in course.journalled.values():
        try:
            event = codec.decode(dispatch)
        except LogError:
            continue  # a worker may be handed any bytes; they are no fact of the log
        if type(event) is v.RouteDecided:
            found.append(_decision(entry, event, "admission"))
    found = [replace(d, actual_ttft_us=_actual_us(course, d, stream)) for d in found]
    return sorted(found, key=lambda d: (d.decision.get("attempt", 0), d.revision))


def _actual_us(course: RequestHistory, found: DecisionInfo, stream: str) -> int:
    """When the first token of a dispatch existed; for a first attempt the client's answer shows it
    too."""
    decision = found.decision
    if "attempt" not in decision:
        return -1
    attempt, decided_us = decision["attempt"], decision["at_us"]
    if not decision["worker"]:
        return -1
    if found.stream == stream and decided_us >= 0 and attempt in course.first:
        return course.first[attempt] - decided_us
    ended = course.ended
    return ended.ttft_us if ended is not None and attempt == 1 else -1


def _decision(entry: Entry, event: Any, source: str) -> DecisionInfo:
    shown = event_info(replace(entry, event=event))
    return DecisionInfo(
        id=shown.id,
        revision=entry.revision,
        stream=entry.stream,
        position=entry.position,
        source=source,
        decision=shown.event,
        predicted_ttft_us=getattr(event, "ttft_us", -1),
    )
