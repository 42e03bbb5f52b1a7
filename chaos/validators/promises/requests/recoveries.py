"""Attempts that were cut, and when their requests continued, by the log."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from msgspec import Struct

from relume.chaos.validators.records import Course, Entry, courses, events_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import RequestOutcome

TICK_MS = 1000


class Recovery(Struct, frozen=True, kw_only=True):
    """One attempt that was cut. It was lost at `begun_ms`; the request continued at `back_ms` (its
    next first token, else the next cut or its end); -1: never. `resumed_on`: the worker of that
    token, if there is one, or of the attempt that ended then, if that one gave its client tokens: the
    report of the first is missing. `again_ms`: when its client's tokens had been generated again at the
    latest, where they were in doubt; else `back_ms`. `sent_ms`: the time of the decision for that
    attempt, `sent_by`: its stream; `queued_ms`: from when to when it was in its engine's queue.
    `lost_ms`: as `begun_ms`, or before that if the engine reported the lost attempt before its replica
    wrote of the dispatch. Wall times as in `Segment.at_ms`."""

    request: str
    attempt: int
    worker: str
    kind: str
    begun_ms: int
    lost_ms: int
    back_ms: int
    again_ms: int
    resumed_on: str
    sent_ms: int
    sent_by: str
    queued_ms: tuple[int, int]


def _is_left(course: Course) -> bool:
    """Whether it was resumable and its client did not return, or gave up before the log had its
    return, according to its owner, or to the leader after the owner's death."""
    arrived, end = course.arrived, course.end
    if arrived is None or not arrived.event.resumable or end is None:
        return False
    return (
        end.outcome == RequestOutcome.CANCELLED
        or end.tokens < 0  # no client saw it
        or all(at.stream == "fleet" for at in course.ends)
    )


def _left_ms(course: Course, end_ms: int) -> int:
    """When its client left for the last time, of a stream that its owner ended for that."""
    arrived, end = course.arrived, course.end
    if arrived is None or end is None or end.outcome != RequestOutcome.CANCELLED:
        return end_ms
    return end_ms - TICK_MS * arrived.event.grace_ticks


def _delivers(course: Course, sent: v.RouteDecided, place: int, end: Entry) -> bool:
    """Whether the attempt that was sent at that place of its course, and of which `end` is the cut or the
    request's end, gave its client any token. A client that returns may have more than its replica knew."""
    count = sent.delivered
    for at in itertools.takewhile(lambda at: at is not end, course.events[place + 1 :]):
        if type(at.event) is v.ClientReturned:
            count = max(count, at.event.tokens)
    if type(end.event) is v.RequestEnded:
        return bool(end.event.tokens > count)
    return bool(end.event.attempt == sent.attempt and end.event.delivered > count)


class _Reports:
    """What engines reported of attempts, by (request, attempt)."""

    def __init__(self, groups: Sequence[RevisionGroup]) -> None:
        self._first_tokens: dict[tuple[str, int], Entry] = {}
        self._queued: dict[tuple[str, int], int] = {}
        self._admitted: dict[tuple[str, int], int] = {}
        self._died: dict[tuple[str, int], int] = {}
        self._lost: dict[tuple[str, int], list[int]] = {}
        """When an engine, by worker and incarnation, had lost reports."""
        for at in events_of(groups, "w."):
            if type(at.event) is v.EngineDied:
                self._died[at.event.worker, at.event.incarnation] = at.at_ms
            elif type(at.event) is v.EngineStep:
                self._take(at, at.event)

    def _take(self, at: Entry, step: v.EngineStep) -> None:
        if step.lost:
            place = at.stream.removeprefix("w."), step.incarnation
            self._lost.setdefault(place, []).append(at.at_ms)
        for change in step.changes:
            key = change.request, change.attempt
            if type(change) is v.FirstToken:
                self._first_tokens[key] = at
            elif type(change) is v.RequestQueued:
                self._queued[key] = at.at_ms
            elif type(change) is v.RequestAdmitted:
                self._admitted[key] = at.at_ms

    def cut_ms(self, cut: Entry) -> int:
        """When the attempt was cut, at the latest."""
        place = cut.event.worker, cut.event.incarnation
        return min(cut.at_ms, self._died.get(place, cut.at_ms))

    def back(
        self, of: tuple[str, int], sent: v.RouteDecided | None, sent_ms: int, following_ms: int
    ) -> tuple[int, str]:
        """When the attempt had its first token, and on which worker: that of its report, or of the first
        report that may have been lost; else what followed on no worker."""
        if (first := self._first_tokens.get(of)) is not None:
            back_ms, worker = first.at_ms, first.stream.removeprefix("w.")
        else:
            place = (sent.worker, sent.incarnation) if sent is not None else ("", 0)
            unread = (ms for ms in self._lost.get(place, ()) if ms >= sent_ms)
            back_ms, worker = min([following_ms, *unread]), ""
        if 0 <= following_ms < back_ms:
            back_ms = following_ms  # its worker was cut from the log and told of it late
        return back_ms, worker

    def queued_ms(self, of: tuple[str, int], back_ms: int) -> tuple[int, int]:
        """From when to when the attempt was in the queue of its engine."""
        return self._queued.get(of, back_ms), self._admitted.get(of, back_ms)


def recoveries(groups: Sequence[RevisionGroup]) -> Iterator[Recovery]:
    """Every attempt in the log that was cut, and the time at which its request continued."""
    reports = _Reports(groups)
    for course in courses(groups).values():
        cuts = [at for at in course.events if type(at.event) is v.TransportObserved]
        end_ms = course.ends[0].at_ms if course.ends else -1
        returns = [
            (place, at.at_ms) for place, at in enumerate(course.events)
            if type(at.event) is v.ClientReturned
        ]  # fmt: skip
        sent = {
            at.event.attempt: (place, at) for place, at in enumerate(course.events)
            if type(at.event) is v.RouteDecided and at.event.worker
        }  # fmt: skip
        is_left = _is_left(course)
        for index, cut in enumerate(cuts):
            event, begun = cut.event, reports.cut_ms(cut)
            lost = begun
            if event.attempt in sent:
                at_ms = sent[event.attempt][1].at_ms
                queued = reports.queued_ms((course.request, event.attempt), at_ms)[0]
                # Its engine may have been dead before.
                begun, lost = max(begun, at_ms), max(begun, min(at_ms, queued))
            next_end = next(iter([*cuts[index + 1 :], *course.ends]), None)
            following = -1 if next_end is None else next_end.at_ms
            after = min((n for n in sent if n > event.attempt), default=event.attempt + 1)
            place_sent, next_one = sent.get(after, (-1, None))
            sent_ms, decision = (-1, None) if next_one is None else (next_one.at_ms, next_one.event)
            of = course.request, after
            back, resumed_on = reports.back(of, decision, sent_ms, following)
            if decision is not None and next_end is not None and not resumed_on:
                delivers = _delivers(course, decision, place_sent, next_end)
                resumed_on = decision.worker if delivers else ""
            if is_left and (back == end_ms or back > _left_ms(course, end_ms)):
                continue  # nobody waited for it
            is_again = decision is not None and decision.doubted and decision.delivered > 0
            # A return before the dispatch came before its first token, however late the log has it.
            came = [min(ms, back) for n, ms in returns if ms <= back or n < place_sent]
            begun, lost = max([begun, *came]), max([lost, *came])
            yield Recovery(
                request=course.request,
                attempt=event.attempt,
                worker=event.worker,
                kind=event.kind,
                begun_ms=begun,
                lost_ms=lost,
                back_ms=back,
                again_ms=max(back, following) if is_again else back,
                resumed_on=resumed_on,
                sent_ms=sent_ms if sent_ms >= 0 else begun,
                sent_by=(next_one or cut).stream,
                queued_ms=reports.queued_ms(of, back),
            )
