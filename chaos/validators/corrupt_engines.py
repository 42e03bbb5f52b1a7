"""Engines that a fault made compute wrong results, and the requests that got tokens from them.

The log has these requests (`served`), unless their gateway was killed before it wrote what it had
decided. Then no event names their client, and of a simulated run it is known which request is whose
(`unwritten`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from relume.chaos.validators.ground_truth import GroundTruth
from relume.chaos.validators.records import (
    Course,
    Entry,
    courses,
    events_of,
    has_unnamed_tokens,
)
from relume.chaos.validators.unwritten_decisions import UnwrittenDecisions, broken_replicas
from relume.controlplane.stream.error_codes import NOT_COMPARED
from relume.events import vocabulary as v
from relume.events.log.entries import entries
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import AttemptMode, FailureClass, HealthState, RequestOutcome

Engine = tuple[str, int]
"""Worker and incarnation."""
NEVER = 1 << 62
_NS_PER_MS = 1_000_000


class CorruptSince(NamedTuple):
    """A worker whose engine began to compute wrong results at `since_ms` (wall). `incarnation` 0: which
    one is not known."""

    worker: str
    since_ms: int
    incarnation: int = 0


def verdicts(groups: Sequence[RevisionGroup], corrupt: Sequence[CorruptSince]) -> dict[Engine, int]:
    """The revision at which each corrupt engine was quarantined; NEVER: it was not. `corrupt`:
    where its incarnation is not known, an engine that served then, perhaps before
    its late agent wrote that it was ready. So its start counts, by the time in the log and by the
    corrected one: after a time without etcd, either may be wrong. Of engines whose starts landed together
    after such a time, the one counts that was quarantined."""
    found: dict[Engine, int] = {}
    if not corrupt:
        return found
    quarantined: dict[Engine, int] = {}
    for at in events_of(groups, "fleet"):
        event = at.event
        if type(event) is v.HealthDecided and event.state == HealthState.QUARANTINED:
            if event.failure == FailureClass.CORRUPTION:
                quarantined.setdefault((event.worker, event.incarnation), at.revision)
    known = [(one.worker, one.incarnation) for one in corrupt if one.incarnation]
    found.update((engine, quarantined.get(engine, NEVER)) for engine in known)
    guessed = [(one.worker, one.since_ms) for one in corrupt if not one.incarnation]
    for starts, (worker, since_ms) in product(_starts(groups), guessed):
        of_worker = [(engine, span) for engine, span in starts if engine[0] == worker]
        late = (e for e, (before, at_ms) in of_worker if before <= since_ms < at_ms)
        convicted = [engine for engine in late if engine in quarantined]
        by_then = [engine for engine, (_, at_ms) in of_worker if at_ms <= since_ms]
        for engine in convicted[:1] or by_then[-1:]:
            found[engine] = quarantined.get(engine, NEVER)
    return found


def _starts(groups: Sequence[RevisionGroup]) -> Iterator[list[tuple[Engine, tuple[int, int]]]]:
    """Starts of engines with the time of the segment before of its agent, and the own one: by the
    corrected times, and by those in the log."""
    for all_events in (events_of(groups, "w."), entries(groups, "w.")):
        found = []
        written: dict[str, tuple[int, int, int]] = {}
        for at in all_events:
            revision, before_ms, last_ms = written.get(at.stream, (0, at.at_ms, at.at_ms))
            if revision != at.revision:
                before_ms = last_ms
                written[at.stream] = at.revision, before_ms, at.at_ms
            if type(at.event) is v.EngineStarted:
                found.append(((at.stream[2:], at.event.incarnation), (before_ms, at.at_ms)))
        yield found


def served(
    groups: Sequence[RevisionGroup], engines: Mapping[Engine, int]
) -> dict[str, dict[Engine, Entry]]:
    """Requests that got tokens from one of `engines`, each with the event after which it had them:
    the end of the attempt there, or of the request. A returned client may have none of them; then the
    next attempt generates all of its answer, and none of them is left."""
    if not engines:
        return {}
    found = {name: _served(course, engines) for name, course in courses(groups).items()}
    return {name: by for name, by in found.items() if by}


def _served(course: Course, engines: Mapping[Engine, int]) -> dict[Engine, Entry]:
    found: dict[Engine, Entry] = {}
    place, had = ("", 0), 0
    last = place
    for at in course.events:
        event, kind = at.event, type(at.event)
        if kind is v.RouteDecided and event.worker:
            if event.mode == AttemptMode.NEW and not event.delivered:
                found.clear()
            place, had = (event.worker, event.incarnation), event.delivered
            last = place
            continue
        if kind is v.TransportObserved and (event.worker, event.incarnation) == place:
            tokens = event.delivered
        elif kind is v.RequestEnded:
            is_complete = event.outcome == RequestOutcome.COMPLETED
            tokens = -1 if is_complete else event.tokens  # not all are counted
            is_unnamed = has_unnamed_tokens(event) and not is_complete
            if event.detail.startswith(NOT_COMPARED) or is_unnamed:
                place, tokens = last, -1
        else:
            continue
        if place in engines and (tokens > had or tokens < 0):
            found.setdefault(place, at)
        place = "", 0
    return found


def unwritten(
    groups: Sequence[RevisionGroup],
    corrupt: Sequence[CorruptSince],
    truth: GroundTruth | None,
    began_ms: int = 0,
) -> dict[str, dict[str, Engine]]:
    """By client, its requests in the log with an attempt on a corrupt engine that a gateway dispatched
    and never wrote, as its life ended first. Only an attempt that ran after the fault, and a client that
    had its last token before the verdict: then no part of the fleet could know. `began_ms`: wall time
    of the run's start."""
    found: dict[str, dict[str, Engine]] = {}
    if truth is None or not corrupt:
        return found

    def wall_ms(at_ns: int) -> int:
        return began_ms + (at_ns - truth.began_ns) // _NS_PER_MS

    engines = verdicts(groups, corrupt)
    convicted = set(engines.values())
    verdict_ms = {
        at.revision: at.at_ms for at in events_of(groups, "fleet") if at.revision in convicted
    }
    decisions = UnwrittenDecisions(groups, broken_replicas(groups)[1])
    for name, sent in truth.queued.items():
        engine = sent.worker, sent.incarnation
        if engine not in engines or decisions.of(sent.dispatch) is None:
            continue
        since_ms = min(one.since_ms for one in corrupt if one.worker == sent.worker)
        if wall_ms(truth.ended.get(name, NEVER)) < since_ms:
            continue
        for client in _clients(truth, name):
            if wall_ms(truth.calls[client].last_ns) <= verdict_ms.get(engines[engine], NEVER):
                found.setdefault(client, {})[name.rpartition("/")[0]] = engine
    return found


def _clients(truth: GroundTruth, attempt: str) -> list[str]:
    """Those whose request it was."""
    return [
        client
        for client, attempts in truth.attempts.items()
        if client in truth.calls and any(name == attempt for name, _, _ in attempts)
    ]
