"""Runs in which one log ends and another begins in its place (`relume log begin`).

The validators judge the present log. Of requests that were sent before it began, it may know nothing:
these are compared with their undisturbed answers, and not looked for in the log (`of_present_log`). The
former log is judged by itself (`violations`): it has no gap, it replays, and the present one has adopted the
engines that ran at its end, with the requests that they had.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

from msgspec.structs import replace

from relume.chaos.outcome import FiredFault, History
from relume.chaos.validators import check_all
from relume.chaos.validators.records import THE_RUN, Violation, events_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup

RENEWAL = "etcd-restored"
"""The fault with which a new log begins, at its end."""
JUDGED = ("I5", "I6", "I7")
"""Promises that a log keeps up to any moment, also if it is cut off there."""
STATED_MS = 3000
"""Time after the beginning of an engine in the new log within which it reports the requests that it has. Reports
that were on their way come before that."""


def of_present_log(
    histories: Iterable[History], fired: Iterable[FiredFault], known: Collection[str]
) -> list[History]:
    """Requests that were sent before the present log began, and that it does not know, have status 0, as
    undisturbed answers of another fleet have. `known`: x-request-ids in the present log."""
    begun_ns = max((f.until_ns or f.at_ns for f in fired if f.what == RENEWAL), default=0)
    return [
        replace(history, record=replace(history.record, status=0))
        if history.sent_ns < begun_ns and history.record.request not in known
        else history
        for history in histories
    ]


def violations(
    former: Sequence[RevisionGroup], present: Sequence[RevisionGroup]
) -> Iterator[Violation]:
    """What is wrong with a log that ended, and with the beginning of the one in its place."""
    for found in check_all(former, (), JUDGED):
        is_lack = found.about == THE_RUN
        yield found if is_lack else replace(found, about=f"former log, {found.about}")
    engines = _engines(former)
    adopted = _first_engines(present)
    for worker, engine in sorted(engines.items()):
        if worker not in adopted:
            yield Violation(
                "I20", worker, f"its engine {engine[0]} ran when the new log began, which lacks it"
            )
        elif adopted[worker] != engine:
            was, now = (f"engine {number} (pid {pid})" for number, pid in (engine, adopted[worker]))
            yield Violation(
                "I20", worker, f"its {was} ended with the former log; the new one has {now}"
            )

    yield from _uncounted(former, present)


def _uncounted(
    former: Sequence[RevisionGroup], present: Sequence[RevisionGroup]
) -> Iterator[Violation]:
    """Attempts that an engine had at the end of the former log and continues to report, and that the present
    one does not count."""
    held = _attempts_at_end(former)
    begun_ms: dict[str, int] = {}
    for at in events_of(present, "w."):
        left = held.get(at.stream, set())
        if type(at.event) is v.EngineStarted and at.stream in begun_ms:
            left.clear()  # another engine
        elif type(at.event) is v.EngineStarted:
            begun_ms[at.stream] = at.at_ms + STATED_MS
        for change in at.event.changes if left and type(at.event) is v.EngineStep else ():
            attempt = change.request, change.attempt
            is_late = at.at_ms > begun_ms.get(at.stream, at.at_ms)
            if attempt in left and is_late and type(change) is not v.RequestQueued:
                text = f"runs on {at.stream[2:]} as attempt {change.attempt}, and the new log does not count it"
                yield Violation("I21", change.request, text)
            if is_late or type(change) in (v.RequestQueued, v.EngineFinished):
                left.discard(attempt)


def _attempts_at_end(log: Sequence[RevisionGroup]) -> dict[str, set[tuple[str, int]]]:
    """By stream of a worker, what its engine has."""
    found: dict[str, set[tuple[str, int]]] = {}
    for at in events_of(log, "w."):
        held = found.setdefault(at.stream, set())
        if type(at.event) is v.EngineStarted:
            held.clear()
        for change in at.event.changes if type(at.event) is v.EngineStep else ():
            if type(change) is v.RequestQueued and change.attempt:
                held.add((change.request, change.attempt))
            elif type(change) is v.EngineFinished:
                held.discard((change.request, change.attempt))
    return found


def _engines(log: Sequence[RevisionGroup]) -> dict[str, tuple[int, int]]:
    """Incarnation and pid of the engine that each worker has at the end."""
    found: dict[str, tuple[int, int]] = {}
    for at in events_of(log):
        if type(at.event) is v.EngineStarted:
            found[at.event.worker] = at.event.incarnation, at.event.pid
        elif type(at.event) is v.EngineDied:
            found.pop(at.event.worker, None)
    return found


def _first_engines(log: Sequence[RevisionGroup]) -> dict[str, tuple[int, int]]:
    found: dict[str, tuple[int, int]] = {}
    for at in events_of(log):
        if type(at.event) is v.EngineStarted:
            found.setdefault(at.event.worker, (at.event.incarnation, at.event.pid))
    return found
