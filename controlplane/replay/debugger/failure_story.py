"""The story of one failure: its first sign, what detected it, what was decided, how each request
continued, and when there was a successor.

Failures are of engines (`w0:1`), of state daemons (`daemon:w0`) and of gateways (`r0`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import Struct, field

from relume.controlplane.replay.debugger.debug_commands import BadQuestion
from relume.events import vocabulary as v
from relume.events.log.entries import Entry, entries
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import PlacementCause
from relume.policies.liveness.suspicious import SUSPICIOUS


class Failure(Struct, frozen=True):
    """`name` asks for its story. `kind`: engine, daemon, gateway. `at` is the event that
    settled it."""

    name: str
    kind: str
    reason: str
    at: Entry


class AffectedRequest(Struct, kw_only=True):
    """How an affected request continued. `delivered` tokens were with its client; `to` names
    the workers it was sent to since (or its new holders), `restored` counts tokens had from
    a holder, `outcome` is empty when the log ends before it does."""

    request: str
    delivered: int = 0
    to: list[str] = field(default_factory=list)
    restored: int = 0
    outcome: str = ""
    longest_gap_us: int = -1


class FailureReport(Struct):
    """The links in the order of the log, and the course of each request touched."""

    failure: Failure
    links: list[Entry] = field(default_factory=list)
    courses: dict[str, AffectedRequest] = field(default_factory=dict)


def failures(groups: list[RevisionGroup]) -> list[Failure]:
    """All failures of the log, in order; of one engine once. Raises UnknownEvent,
    MalformedRecord."""
    found: dict[tuple[str, int], Failure] = {}
    serving: set[str] = set()
    for entry in entries(groups):
        failure = _failure(entry) or _unstopped(entry, serving)
        if failure is not None:
            life = entry.position if failure.kind != "engine" else 0
            found.setdefault((failure.name, life), failure)
    return list(found.values())


def story(groups: list[RevisionGroup], asked: str) -> FailureReport:
    """The story of the failure with this name or number (from 1, as `failures` lists them);
    of several with one name, the last. Raises BadQuestion."""
    known = failures(groups)
    if asked.isdecimal() and 0 < int(asked) <= len(known):
        failure = known[int(asked) - 1]
    else:
        named = [f for f in known if f.name == asked or f.name.startswith(f"{asked}:")]
        if not named:
            names = ", ".join(dict.fromkeys(f.name for f in known)) or "the log has none"
            raise BadQuestion(f"no failure {asked!r}: {names}")
        failure = named[-1]
    told = FailureReport(failure)
    concerns = _CONCERNS[failure.kind](failure, told)
    for entry in entries(groups):
        if concerns(entry):
            told.links.append(entry)
            _follow(told, entry.event)
    return told


def _follow(told: FailureReport, event: Any) -> None:
    """What a link says of the request it is about."""
    course = told.courses.get(getattr(event, "request", ""))
    if course is None:
        return
    kind = type(event)
    if kind is v.TransportObserved:
        course.delivered = event.delivered
    elif kind is v.RouteDecided and event.worker:
        course.to.append(event.worker)
    elif kind is v.HolderChosen and event.cause == PlacementCause.HOLDER_LOST:
        course.to = list(event.holders)
    elif kind in (v.RestoreDone, v.RestoreFailed):
        course.restored += event.tokens
    elif kind is v.RequestEnded and not course.outcome:
        course.outcome, course.longest_gap_us = event.outcome, event.longest_gap_us


def _failure(entry: Entry) -> Failure | None:
    event = entry.event
    kind = type(event)
    if kind is v.EngineDied:
        return Failure(f"{event.worker}:{event.incarnation}", "engine", event.reason, entry)
    if kind is v.EngineHung or (kind is v.StallJudged and event.hung):
        return Failure(f"{event.worker}:{event.incarnation}", "engine", "hung", entry)
    if kind is v.StateDaemonLost:
        return Failure(f"daemon:{event.worker}", "daemon", event.reason, entry)
    return None


def _unstopped(entry: Entry, serving: set[str]) -> Failure | None:
    """A gateway that starts while an earlier life of it was `serving` had died unheard."""
    event = entry.event
    if type(event) is v.ReplicaLost:
        serving.discard(event.replica)
        return Failure(event.replica, "gateway", "lease lapsed", entry)
    if type(event) is v.ReplicaStopped:
        serving.discard(event.replica)
    elif type(event) is v.ReplicaStarted:
        if event.replica in serving:
            return Failure(event.replica, "gateway", "restarted without a stop", entry)
        serving.add(event.replica)
    return None


# --- what belongs to a story -----------------------------------------------------------

_Concerns = Callable[[Entry], bool]


def _engine(failure: Failure, told: FailureReport) -> _Concerns:
    worker, _, life = failure.name.rpartition(":")
    place = worker, int(life)
    again = worker, int(life) + 1
    cut = told.courses

    def concerns(entry: Entry) -> bool:
        event = entry.event
        kind = type(event)
        if kind is v.TransportObserved and (event.worker, event.incarnation) == place:
            if event.kind in SUSPICIOUS:
                cut.setdefault(event.request, AffectedRequest(request=event.request))
            return True
        if kind in _OF_ENGINE:
            return (event.worker, event.incarnation) == place
        if kind in _OF_SUCCESSOR:
            return (event.worker, event.incarnation) == again
        if kind is v.WorkerLost:
            return event.worker == worker
        return kind in _OF_REQUEST and event.request in cut

    return concerns


def _daemon(failure: Failure, told: FailureReport) -> _Concerns:
    worker = failure.at.event.worker
    moved = told.courses

    def concerns(entry: Entry) -> bool:
        event = entry.event
        kind = type(event)
        if entry.revision < failure.at.revision:
            return False
        if kind in (v.StateDaemonLost, v.StateDaemonStarted):
            return event.worker == worker
        if kind is v.HolderChosen and event.cause == PlacementCause.HOLDER_LOST:
            moved.setdefault(event.request, AffectedRequest(request=event.request))
            return True
        if kind is v.RestoreFailed:
            return event.holder == worker
        return kind is v.RequestEnded and event.request in moved

    return concerns


def _gateway(failure: Failure, told: FailureReport) -> _Concerns:
    stream = f"r.{failure.name}"
    served: set[str] = set()
    ended: set[str] = set()

    def concerns(entry: Entry) -> bool:
        event = entry.event
        kind = type(event)
        late = entry.revision >= failure.at.revision
        if kind is v.RequestArrived and entry.stream == stream and not late:
            served.add(event.request)
        elif kind is v.RequestEnded and event.request in served - ended:
            ended.add(event.request)
            if late:
                told.courses.setdefault(event.request, AffectedRequest(request=event.request))
                return True
        elif kind is v.ClientReturned and late and event.request in served - ended:
            told.courses.setdefault(event.request, AffectedRequest(request=event.request))
            return True
        elif kind in (v.ReplicaLost, v.ReplicaStarted):
            return event.replica == failure.name and late
        return kind is v.LeaderElected and late

    return concerns


_OF_ENGINE: tuple[Any, ...] = (
    v.EngineDied,
    v.EngineHung,
    v.EngineRecovered,
    v.StallJudged,
    v.WorkerSuspected,
    v.WorkerCleared,
    v.RecoveryPlanned,
)
_OF_SUCCESSOR: tuple[Any, ...] = (v.EngineRestartScheduled, v.EngineStarted, v.EngineReady)
_OF_REQUEST: tuple[Any, ...] = (
    v.RouteDecided,
    v.HolderChosen,
    v.RestoreStarted,
    v.RestoreDone,
    v.RestoreFailed,
    v.RequestEnded,
)
_CONCERNS: dict[str, Callable[[Failure, FailureReport], _Concerns]] = {
    "engine": _engine,
    "daemon": _daemon,
    "gateway": _gateway,
}
