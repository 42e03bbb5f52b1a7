"""I4: one live epoch per request: one gateway owns it at a time (another one after its client
returned there), and one attempt of it is live.

Attempts are numbered 1, 2, ... The gateway dispatches a further one only after it has given up
the one before. It dispatches nothing after the end. An engine accepts an attempt only if the
dispatch named it and its incarnation.

A killed gateway may have sent attempts that it never wrote (`UnwrittenDecisions`); nobody reads
their answers. The next owner, which may not know of them, skips their numbers or uses them again.
The same holds for what a replica sent before it had read that its client went to another one, also if
the client came back meanwhile. A return that another replica wrote before it had read of a dispatch ends
that attempt: its owner reads that it is none any more. Numbers of dispatches that an owner had not read
are free to it.

A stream that began in a former log arrives in this one when its client returns. Until then an engine
alone reports its attempt, without a dispatch. That attempt is live like any other. An engine that had
finished it before this log began reports nothing: then the return alone names the attempt.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from relume.chaos.validators.records import (
    ClientRecord,
    Course,
    Violation,
    courses,
    events_of,
)
from relume.chaos.validators.unwritten_decisions import UnwrittenDecisions, broken_replicas
from relume.events import vocabulary as v
from relume.events.log.entries import Entry
from relume.events.log.interface import RevisionGroup

PROMISE = "I4"


def check(groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord]) -> list[Violation]:
    """Requests with two owners, two live attempts, or an engine that was never chosen."""
    out = []
    found = courses(groups)
    broken, lost = broken_replicas(groups)
    unwritten = UnwrittenDecisions(groups, lost) if broken else None
    held = _held(groups) if any(len(course.owners) > 1 for course in found.values()) else {}
    returned = {
        name: course.events[1].event.attempt for name, course in found.items() if _is_former(course)
    }
    former = returned | _former(groups, returned)
    for course in found.values():
        began = former.get(course.request, 0)
        known = {change.attempt for _, change in course.queued} | held.get(course.request, set())
        known |= set(range(1, began + 1))
        texts = [*_owners(course), *_attempts(course, known, began), *_engines(course, unwritten)]
        out += [Violation(PROMISE, course.request, text) for text in texts]
    return out


def _held(groups: Sequence[RevisionGroup]) -> dict[str, set[int]]:
    """Attempts by request of which a holder has blocks. An engine that was cut from the log may
    have sent them."""
    found: dict[str, set[int]] = {}
    for at in events_of(groups, "w."):
        if type(at.event) is v.CheckpointsAcknowledged:
            for held in at.event.held:
                found.setdefault(held.request, set()).add(held.attempt)
        elif type(at.event) is v.CheckpointAcknowledged:
            found.setdefault(at.event.request, set()).add(at.event.attempt)
    return found


def _is_former(course: Course) -> bool:
    """Whether its client returned before it was dispatched in this log."""
    kinds = [type(at.event) for at in course.events[:2]]
    return kinds == [v.RequestArrived, v.ClientReturned]


def _former(groups: Sequence[RevisionGroup], requests: Collection[str]) -> dict[str, int]:
    """The latest attempt of each of these that an engine reported without a dispatch."""
    found: dict[str, int] = {}
    for at in events_of(groups, "w.") if requests else ():
        for change in at.event.changes if type(at.event) is v.EngineStep else ():
            if type(change) is v.RequestQueued and not change.dispatch:
                if change.request in requests:
                    found[change.request] = max(change.attempt, found.get(change.request, 0))
    return found


def _is_orphan(at: Entry, change: v.RequestQueued, unwritten: UnwrittenDecisions | None) -> bool:
    """Whether a gateway that was killed sent this attempt to this engine and never wrote it."""
    sent = unwritten.of(change.dispatch) if unwritten is not None else None
    if sent is None:
        return False
    there = sent.request, sent.attempt, sent.worker, sent.incarnation
    return there == (change.request, change.attempt, at.stream[2:], at.event.incarnation)


def _owners(course: Course) -> list[str]:
    streams = {at.stream for at in course.events if at.stream != "fleet"}
    if len(streams) > 1 and streams - set(course.owners):
        return [f"has events of {' and '.join(sorted(streams))}"]
    leader = [at for at in course.events if at.stream == "fleet"]
    if any(type(at.event) is not v.RequestEnded for at in leader):
        return ["is served by the leader's stream"]
    return []


def _attempts(course: Course, known: set[int], former: int) -> list[str]:
    """`known`: attempts that engines or holders reported, whose numbers a new owner skips. `former`: the
    one that was live when the request arrived in this log; 0: none."""
    texts = []
    live = 0
    owner, over = "", False
    sent = list[tuple[int, str, int]]()
    known = known | {decision.attempt for decision in course.unaware}
    for at in course.events:
        event = at.event
        if type(event) is v.RequestEnded:
            over = over or at.stream != "fleet"
        elif type(event) is v.TransportObserved:
            if event.attempt == live:
                live = 0
        elif type(event) is v.ClientReturned:
            if event.attempt < live and at.stream != owner:
                live = 0  # it had not read that dispatch, and its owner reads the return
            elif former and event.attempt == former and not sent:
                live, owner = former, at.stream
                sent.append((former, at.stream, at.revision))
        elif type(event) is v.RouteDecided and event.worker and event not in course.unaware:
            if over:
                texts.append(f"attempt {event.attempt} was dispatched after the end")
            if live:
                texts.append(f"attempt {event.attempt} was dispatched while {live} was live")
            read = event.basis.revision
            last = max(
                (n for n, by, revision in sent if by == at.stream or revision <= read), default=0
            )
            skipped = set(range(last + 1, event.attempt))
            may_skip = at.stream in course.owners[1:] and skipped <= known
            if event.attempt <= last or (skipped and not may_skip):
                texts.append(f"attempt {event.attempt} follows attempt {last}")
            live, owner = event.attempt, at.stream
            sent.append((event.attempt, at.stream, at.revision))
    return texts


def _engines(course: Course, unwritten: UnwrittenDecisions | None) -> list[str]:
    chosen = {
        d.attempt: (d.worker, d.incarnation) for d in course.decisions if d not in course.unaware
    }
    unaware = {(d.attempt, d.worker, d.incarnation) for d in course.unaware}
    takers: dict[int, set[tuple[str, int]]] = {}
    for at, change in course.queued:
        is_unaware = (change.attempt, at.stream[2:], at.event.incarnation) in unaware
        if not is_unaware and not _is_orphan(at, change, unwritten):
            takers.setdefault(change.attempt, set()).add((at.stream[2:], at.event.incarnation))
    texts = []
    for attempt, engines in takers.items():
        for worker, incarnation in sorted(engines):
            if attempt in chosen and chosen[attempt] != (worker, incarnation):
                name, life = chosen[attempt]
                texts.append(
                    f"attempt {attempt} was sent to {name}:{life} "
                    f"and taken by {worker}:{incarnation}"
                )
        if len(engines) > 1:
            texts.append(f"attempt {attempt} was taken by {len(engines)} engines")
    return texts
