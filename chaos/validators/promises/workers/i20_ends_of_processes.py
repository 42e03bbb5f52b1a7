"""I20: no record, request or client ends a process that it does not own, or keeps others' streams
waiting beyond a bound.

The log shows the ends of engines, state daemons and replicas. Each has a cause that may end it: a
fault that strikes this very process, or what it needs to own its stream; an order for this worker; or
its agent, which stops. Faults of records, requests and clients end nothing. Between two tokens of a
stream pass at most `WAIT_MS`, and its time in the queue of a full engine, while no fault is felt by its
workers, its replicas, or the log.

Exceptions: a run whose faults are unknown, and logs that begin after a process did, show no cause. In
real runs an engine that its agent finds hung counts as such, and waits are not judged: a busy machine
is a cause that no fault names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from msgspec import Struct

from relume.chaos.validators.ground_truth import GroundTruth
from relume.chaos.validators.records import (
    ClientRecord,
    Entry,
    Violation,
    courses,
    events_of,
    of_clients,
)
from relume.chaos.validators.strikes import (
    DEATHS_OF_REPLICAS,
    FELT_MS,
    THE_LOG,
    Strike,
    is_struck,
)
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import DeathReason, EffectKind, RequestOutcome

PROMISE = "I20"
WAIT_MS = 250
ORDER_MS = 60_000
"""Time after an order in which it may end an engine, which its requests leave first."""

OF_CLOCKS = frozenset(
    (
        "clock-jump",
        "clock-back",
        "clock-drift",
        "replica-clock-jump",
        "replica-clock-back",
        "replica-clock-drift",
    )
)
FAILS_STARTS = "reload-fails"
"""It strikes later starts of an engine, however long it serves before."""
_OF_HOSTS = frozenset(
    (
        "agent-kill",
        "agent-terminate",
        "agent-stop",
        "agent-spool-torn",
        "primary-and-holder-kill",
        "domain-loss",
        "cut",
        "cut-one-way",
        "cpu-limit",
    )
)
"""Faults that end an engine and a state daemon, or cost their agent its stream, and it ends both."""
CAUSES: Mapping[str, frozenset[str]] = {
    "engine": _OF_HOSTS | {"engine-kill", "engine-stop", "worker-slow", FAILS_STARTS},
    "state daemon": _OF_HOSTS | {"holder-kill", "holder-stop"},
    "replica": DEATHS_OF_REPLICAS
    | {
        "leader-stop",
        "gateway-cpu-limit",
        "replica-cut",
        "replica-calls-lost",
        "replica-answers-lost",
    },
}
"""Faults that may end a process, by its kind. Without etcd a replica ends by itself as well."""


Span = tuple[int, int]
"""From when to when, wall ms."""


class End(Struct, frozen=True, kw_only=True):
    """The end of a process. `owner`: its worker or replica. It ended between the last segment of its
    stream before, and the segment that says so (wall ms)."""

    process: str
    owner: str
    since_ms: int
    until_ms: int
    revision: int
    detail: str


def check(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    strikes: Sequence[Strike] | None = None,
    truth: GroundTruth | None = None,
) -> list[Violation]:
    """Ends and waits without a cause. `strikes` None: unknown."""
    if strikes is None:
        return []
    is_real = truth is None
    ends = [*_of_engines(groups, is_real), *_of_state_daemons(groups), *_of_replicas(groups)]
    out = [
        Violation(
            PROMISE,
            end.owner,
            f"its {end.process} ended without a cause: {end.detail}",
            end.revision,
        )
        for end in _without_cause(ends, strikes)
    ]
    return out if is_real else [*out, *_waits(groups, clients, strikes)]


def _without_cause(ends: Sequence[End], strikes: Sequence[Strike]) -> Iterator[End]:
    """A fault that is over at once ends each process of its target once."""
    spent: set[tuple[int, str, str]] = set()
    wrong = {name for strike in strikes if strike.what in OF_CLOCKS for name in strike.targets}
    for end in ends:
        causes = [
            (strike.until_ms == strike.since_ms and strike.what != FAILS_STARTS, number)
            for number, strike in enumerate(strikes)
            if _may_end(strike, end, end.owner not in wrong)
            and (number, end.process, end.owner) not in spent
        ]
        if not causes:
            yield end
        elif (cause := min(causes))[0]:
            spent.add((cause[1], end.process, end.owner))


def _may_end(strike: Strike, end: End, is_timed: bool) -> bool:
    """`is_timed`: whether the clock of its host was right, so that times mean something."""
    is_target = strike.what in CAUSES[end.process] and end.owner in strike.targets
    is_log = end.process == "replica" and THE_LOG in strike.targets
    felt_ms = end.since_ms if strike.what == FAILS_STARTS else FELT_MS
    is_on = not is_timed or strike.is_on(end.since_ms - felt_ms, end.until_ms)
    return is_on and (is_target or is_log)


def _of_engines(groups: Sequence[RevisionGroup], is_real: bool) -> Iterator[End]:
    """Without those that an order or a leaving agent ended."""
    leaving: set[str] = set()
    ordered: dict[str, tuple[int, int]] = {}
    for at, span in _timed(groups):
        event = at.event
        _note_leaving(event, leaving)
        if type(event) is v.EffectsDecided:
            restarts = [e for e in event.effects if e.kind == EffectKind.RESTART]
            ordered |= {e.worker: (at.at_ms, e.incarnation) for e in restarts}
        elif type(event) is v.EngineDied and event.worker not in leaving:
            ordered_ms, incarnation = ordered.get(event.worker, (-ORDER_MS - 1, 0))
            is_ordered = span[0] - ordered_ms <= ORDER_MS and incarnation in (0, event.incarnation)
            if not (is_ordered or (is_real and event.reason == DeathReason.HUNG)):
                yield _end("engine", event.worker, at, span, f"{event.reason}, {event.detail}")


def _of_state_daemons(groups: Sequence[RevisionGroup]) -> Iterator[End]:
    """Without those that a leaving agent ended."""
    leaving: set[str] = set()
    for at, span in _timed(groups, "w."):
        event = at.event
        _note_leaving(event, leaving)
        if type(event) is v.StateDaemonLost and event.worker not in leaving:
            yield _end("state daemon", event.worker, at, span, event.reason)


def _note_leaving(event: Any, leaving: set[str]) -> None:
    if type(event) is v.WorkerLeaving:
        leaving.add(event.worker)
    elif type(event) is v.WorkerRegistered:
        leaving.discard(event.worker)


def _of_replicas(groups: Sequence[RevisionGroup]) -> Iterator[End]:
    """Replicas that started again and had not stopped on purpose."""
    boots: dict[str, str] = {}
    for at, span in _timed(groups, "r."):
        event = at.event
        if type(event) is v.ReplicaStarted:
            if boots.get(event.replica, event.boot) != event.boot:
                yield _end("replica", event.replica, at, span, "it started again")
            boots[event.replica] = event.boot
        elif type(event) is v.ReplicaStopped:
            boots.pop(event.replica, None)


def _timed(groups: Sequence[RevisionGroup], stream: str = "") -> Iterator[tuple[Entry, Span]]:
    """As `events_of`, with the time since the segment before of the same stream: the log may have been
    away in between. Then the corrected time of a segment may be that of before, so both count."""
    written = {(g.revision, s.stream): s.at_ms for g in groups for s in g.segments}
    spans: dict[str, tuple[int, Span]] = {}
    for at in events_of(groups, stream):
        revision, span = spans.get(at.stream, (0, (at.at_ms, at.at_ms)))
        if revision != at.revision:
            times = at.at_ms, written[at.revision, at.stream]
            span = min(span[1], *times), max(times)
            spans[at.stream] = at.revision, span
        yield at, span


def _end(process: str, owner: str, at: Entry, span: Span, detail: str) -> End:
    since_ms, until_ms = span
    return End(
        process=process,
        owner=owner,
        since_ms=since_ms,
        until_ms=until_ms,
        revision=at.revision,
        detail=detail,
    )


def _waits(
    groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord], strikes: Sequence[Strike]
) -> Iterator[Violation]:
    """Streams that waited although no fault was felt where they were."""
    queued_ms: dict[str, int] | None = None
    for client, course in of_clients(courses(groups), clients):
        longest = max(client.gaps_ms, default=0.0)
        if longest <= WAIT_MS or course is None or client.outcome != RequestOutcome.COMPLETED:
            continue
        workers = {decision.worker for decision in course.decisions}
        replicas = {owner.removeprefix("r.") for owner in course.owners}
        began_ms, ended_ms = course.events[0].at_ms, course.events[-1].at_ms
        if is_struck(strikes, {*workers, *replicas, THE_LOG}, began_ms - FELT_MS, ended_ms):
            continue
        if queued_ms is None:
            queued_ms = _queued_ms(groups)
        bound = WAIT_MS + queued_ms.get(course.request, 0)
        if longest > bound:
            text = f"waited {longest:.0f} ms for a token, bound {bound} ms, and no fault was felt"
            yield Violation(PROMISE, client.request, text)


def _queued_ms(groups: Sequence[RevisionGroup]) -> dict[str, int]:
    """By request, the time in queues of engines that were full: before each admission, since the last
    report about the attempt. That of its preemption may be lost."""
    total: dict[str, int] = {}
    seen_ms: dict[tuple[str, int], int] = {}
    for at in events_of(groups, "w."):
        if type(at.event) is v.EngineStep:
            for change in at.event.changes:
                request = change.request
                before_ms = seen_ms.get((request, change.attempt), at.at_ms)
                seen_ms[request, change.attempt] = at.at_ms
                if type(change) is v.RequestAdmitted:
                    total[request] = total.get(request, 0) + at.at_ms - before_ms
    return total
