"""I14, about corrupt workers: no token or block of one is used after the verdict on it.

An attempt that was decided with the verdict known restores no blocks that the engine wrote, nor those
that another attempt restored before and wrote again. A
replica that knows the verdict ends no request on that engine as completed, and continues none after
the engine's tokens: it has them compared. An answer with wrong tokens may complete only where its
replica did not know the verdict yet. Then the worker's incident lists the request,
also where its engine alone reported it, because its gateway was killed before it wrote of it.
Nothing follows from wrong answers of an engine without a verdict, unless the log convicts it
(`chaos.validators.convictions`). It may have died before its canaries, no canary may touch the damage,
and a majority needs three engines and enough cross-checks. Where such an engine answered too, it is
unknown whose the wrong tokens are. If the log convicts it, the run proves nothing about this promise,
and is inconclusive.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from relume.chaos.validators.convictions import conviction
from relume.chaos.validators.corrupt_engines import NEVER, CorruptSince, Engine, unwritten, verdicts
from relume.chaos.validators.corrupt_engines import served as served_by
from relume.chaos.validators.ground_truth import GroundTruth
from relume.chaos.validators.records import (
    THE_RUN,
    ClientRecord,
    Course,
    Entry,
    Violation,
    courses,
    events_of,
    of_clients,
)
from relume.controlplane.incidents.incident_fold import incidents_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import AttemptMode, RequestOutcome, TransportKind

PROMISE = "I14"


def check(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    corrupt: Sequence[CorruptSince],
    truth: GroundTruth | None = None,
    began_ms: int = 0,
) -> Iterator[Violation]:
    """`corrupt`: workers whose engines a fault made compute wrong results, and when (wall ms). `truth`
    and `began_ms`: see `corrupt_engines.unwritten`."""
    engines = verdicts(groups, corrupt)
    served = served_by(groups, engines)
    yield from _restored(groups, engines)
    lost = unwritten(groups, corrupt, truth, began_ms)
    yield from _unlisted(groups, clients, lost, engines)
    if not served:
        return
    known = {engine: _known(groups, engine, at) for engine, at in engines.items() if at < NEVER}
    found = courses(groups)
    for name, by in served.items():
        for engine in by:
            yield from _continued(found[name], by[engine], engines[engine])
            yield from _completed_there(found[name], engine, known.get(engine, {}))
    yield from _wrong_answers(groups, clients, served, known)


def _known(groups: Sequence[RevisionGroup], engine: Engine, verdict: int) -> dict[str, int]:
    """By replica's stream, the revision from which its events show that it knows the verdict."""
    found: dict[str, int] = {}
    for at in events_of(groups, "r."):
        event = at.event
        if at.stream in found or at.revision < verdict:
            continue
        basis = getattr(event, "basis", None)
        left = (
            type(event) is v.TransportObserved
            and event.kind == TransportKind.CORRUPT
            and (event.worker, event.incarnation) == engine
        )
        if left or (basis is not None and basis.revision >= verdict):
            found[at.stream] = at.revision
    return found


def _continued(course: Course, last: Entry, verdict: int) -> Iterator[Violation]:
    """Attempts that continue after tokens of the engine, although its verdict was known."""
    after = False
    for at in course.events:
        after = after or (at.revision, at.index) == (last.revision, last.index)
        event = at.event
        if type(event) is not v.RouteDecided or not after or event.basis.revision < verdict:
            continue
        if event.mode == AttemptMode.CONTINUE and event.delivered:
            arrived = course.arrived
            if arrived is None or arrived.event.stream:
                text = f"attempt {event.attempt} continues after tokens of a corrupt worker"
                yield Violation(PROMISE, course.request, text, at.revision)


def _completed_there(
    course: Course, engine: Engine, known: Mapping[str, int]
) -> Iterator[Violation]:
    arrived = course.arrived
    if arrived is None or arrived.event.resumable or not course.decisions:
        return  # the client of a resumable stream may be late to say that it has all
    last = course.decisions[-1]
    for at in course.ends:
        completed = at.event.outcome == RequestOutcome.COMPLETED
        if completed and at.revision > known.get(at.stream, NEVER):
            if (last.worker, last.incarnation) == engine:
                text = f"completed on {engine[0]} after the verdict on it"
                yield Violation(PROMISE, course.request, text, at.revision)


def _wrong_answers(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    served: Mapping[str, Mapping[Engine, Entry]],
    known: Mapping[Engine, Mapping[str, int]],
) -> Iterator[Violation]:
    right = _right(clients)
    listed: dict[str, set[str]] | None = None
    missed: dict[Engine, int] = {}
    for client, course in of_clients(courses(groups), clients):
        if course is None or course.request not in served or client.undisturbed:
            continue
        if client.outcome != RequestOutcome.COMPLETED or client.content_id not in right:
            continue
        if client.tokens == right[client.content_id]:
            continue
        listed = _listed(groups) if listed is None else listed
        unknown = [engine for engine in served[course.request] if engine not in known]
        for engine in unknown:
            missed[engine] = missed.get(engine, 0) + 1
        for engine in served[course.request] if not unknown else ():
            for at in course.ends:
                if at.revision > known[engine].get(at.stream, NEVER):
                    text = f"completed with wrong tokens of {engine[0]} after the verdict on it"
                    yield Violation(PROMISE, client.request, text, at.revision)
            names = listed.get(engine[0], set())
            if course.request not in names and "" not in names:
                text = f"has wrong tokens of {engine[0]}, and its incident does not list it"
                yield Violation(PROMISE, client.request, text)
    for engine, count in missed.items():
        if evidence := conviction(groups, engine):
            text = (
                f"{count} wrong answers have tokens of {engine[0]}:{engine[1]}, which was not "
                f"quarantined, though {evidence}"
            )
            yield Violation(PROMISE, THE_RUN, text)


def _right(clients: Sequence[ClientRecord]) -> dict[str, list[int]]:
    """The right tokens, by content id."""
    return {
        client.content_id: client.tokens
        for client in clients
        if client.undisturbed and client.outcome == RequestOutcome.COMPLETED and client.content_id
    }


def _unlisted(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    lost: Mapping[str, Mapping[str, Engine]],
    engines: Mapping[Engine, int],
) -> Iterator[Violation]:
    """Wrong answers that no gateway wrote of, and whose request the leader ended: the log has it from
    its engine."""
    right = _right(clients) if lost else {}
    listed = _listed(groups) if lost else {}
    found = courses(groups)
    for client in clients:
        expected = right.get(client.content_id, client.tokens)
        if expected[: len(client.tokens)] == client.tokens:
            continue
        for request, engine in lost.get(client.request, {}).items():
            course, names = found.get(request), listed.get(engine[0], set())
            if engines[engine] == NEVER or course is None or not course.ends or course.decisions:
                continue
            if request in names or "" in names:
                continue
            text = f"has wrong tokens of {engine[0]}, and its incident does not list {request}"
            yield Violation(PROMISE, client.request, text)


def _restored(
    groups: Sequence[RevisionGroup], engines: Mapping[Engine, int]
) -> Iterator[Violation]:
    """Restores of blocks that come from a corrupt engine: an attempt there was their last writer, or
    their last writer is an attempt that had restored such blocks of its own request before."""
    names: dict[str, str] = {}  # holders by endpoint
    writers: dict[tuple[str, str], int] = {}  # by holder and request, the attempt
    routes: dict[tuple[str, int], v.RouteDecided] = {}
    origins: dict[tuple[str, int], set[Engine]] = {}  # corrupt engines whose blocks it restored
    for at in events_of(groups) if engines else ():
        event, kind = at.event, type(at.event)
        if kind is v.StateDaemonStarted:
            names |= dict.fromkeys((event.address, event.local, event.worker), event.worker)
        elif kind is v.CheckpointAcknowledged:
            writers[event.holder, event.request] = event.attempt
        elif kind is v.CheckpointsAcknowledged:
            writers |= {(event.holder, one.request): one.attempt for one in event.held}
        elif kind is v.RouteDecided and event.worker:
            routes[event.request, event.attempt] = event
        elif kind is v.RestoreStarted:
            decided = routes.get((event.request, event.attempt))
            owner = event.lender or event.request
            last = owner, writers.get((names.get(event.holder, event.holder), owner), 0)
            wrote = routes.get(last)
            if decided is None or wrote is None or not event.tokens:
                continue
            found = {(wrote.worker, wrote.incarnation)} & engines.keys() | origins.get(last, set())
            if owner == event.request:
                origins.setdefault((event.request, event.attempt), set()).update(found)
            for name, number in sorted(found):
                if decided.basis.revision >= engines[name, number]:
                    text = f"restored {event.tokens} tokens that {name} wrote, which is corrupt"
                    about = f"{event.request}/{event.attempt}"
                    yield Violation(PROMISE, about, text, at.revision)


def _listed(groups: Sequence[RevisionGroup]) -> dict[str, set[str]]:
    """By worker, the requests that its incidents list; with "" where they count more."""
    found: dict[str, set[str]] = {}
    for record in incidents_of(groups):
        names = found.setdefault(record.name, set())
        names.update(one.request for one in record.served_requests)
        if record.served > len(record.served_requests) or record.served_at_least:
            names.add("")
    return found
