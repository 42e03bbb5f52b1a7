"""I20: no record, request or client ends a process that it does not own, or keeps others' streams
waiting beyond a bound.

The log shows the ends of engines, state daemons and replicas. Each has a cause that may end it: a
fault that strikes this very process, or what it needs to own its stream; an order for this worker; or
its agent, which stops. Faults of records, requests and clients end nothing. Between two tokens of a
stream pass at most `WAIT_MS`, its time in the queue of a full engine, and the time in which by a decision
no worker could take it, while no fault is felt by its workers, its replicas, or the log, and no order
restarts one of its workers. Where reports of an engine were lost, its queue is unknown.

Exceptions: a run whose faults are unknown, and logs that begin after a process did, show no cause. In
real runs an engine that its agent finds hung counts as such, and waits are not judged: a busy machine
is a cause that no fault names.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from msgspec import Struct

from relume.chaos.validators.ground_truth import GroundTruth
from relume.chaos.validators.records import (
    ClientRecord,
    Course,
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
        "agent-spool-corrupt",
        "primary-and-holder-kill",
        "domain-loss",
        "cut",
        "cut-one-way",
        "cpu-limit",
        "segment-damaged",
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


class End(Struct, frozen=True):
    """The end of a process. `owner`: its worker or replica. It ended within `span`: between the last
    segment of its stream before, and the segment that says so."""

    process: str
    owner: str
    span: Span
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
    ends = _Ends(groups, is_real)
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


def _without_cause(ends: Iterable[End], strikes: Sequence[Strike]) -> Iterator[End]:
    """A fault that is over at once ends each process of its target once."""
    spent: set[tuple[int, str, str]] = set()
    outages = sorted((s for s in strikes if THE_LOG in s.targets), key=lambda s: -s.since_ms)
    wrong = {name for strike in strikes if strike.what in OF_CLOCKS for name in strike.targets}
    for end in ends:
        since_ms = _known_to_live_ms(end, outages)
        causes = [
            (strike.until_ms == strike.since_ms and strike.what != FAILS_STARTS, number)
            for number, strike in enumerate(strikes)
            if _may_end(strike, end, since_ms, end.owner not in wrong)
            and (number, end.process, end.owner) not in spent
        ]
        if not causes:
            yield end
        elif (cause := min(causes))[0]:
            spent.add((cause[1], end.process, end.owner))


def _may_end(strike: Strike, end: End, since_ms: int, is_timed: bool) -> bool:
    """Whether it may have ended the process, which lived at `since_ms`. `is_timed`: whether the clock
    of its host was right, so that times mean something."""
    is_target = strike.what in CAUSES[end.process] and end.owner in strike.targets
    is_log = end.process == "replica" and THE_LOG in strike.targets
    since_ms = 0 if strike.what == FAILS_STARTS else since_ms - FELT_MS
    return (is_target or is_log) and (not is_timed or strike.is_on(since_ms, end.span[1] + 1))


def _known_to_live_ms(end: End, outages: Sequence[Strike]) -> int:
    """When the process was known to live. What it wrote while the log was away landed later, perhaps
    by the agent that came after it. `outages`, the last first."""
    since_ms, until_ms = end.span
    for outage in outages:
        if outage.is_on(since_ms - FELT_MS, until_ms):
            since_ms = min(since_ms, outage.since_ms)
    return since_ms


class _Ends:
    """The ends of engines, state daemons and replicas in a log. Without those of a worker whose agent
    leaves, engines that an order ended, and replicas that stopped on purpose."""

    def __init__(self, groups: Sequence[RevisionGroup], is_real: bool) -> None:
        self._groups = groups
        self._is_real = is_real
        self._leaving: set[str] = set()
        self._ordered_ms: dict[tuple[str, int], int] = {}
        """Orders to end an engine, by worker and incarnation; 0: whichever it has."""
        self._boots: dict[str, str] = {}

    def __iter__(self) -> Iterator[End]:
        for at, span in _timed(self._groups):
            if (found := self._ended(at, span)) is not None:
                process, owner, detail = found
                yield End(process, owner, span, at.revision, detail)

    def _ended(self, at: Entry, span: Span) -> tuple[str, str, str] | None:
        """What ended, whose it was, and what the log says."""
        match at.event:
            case v.WorkerLeaving(worker=worker):
                self._leaving.add(worker)
            case v.WorkerRegistered(worker=worker):
                self._leaving.discard(worker)
            case v.EffectsDecided(effects=effects):
                restarts = [e for e in effects if e.kind == EffectKind.RESTART]
                self._ordered_ms |= {(e.worker, e.incarnation): at.at_ms for e in restarts}
            case v.EngineDied() as died if not self._is_meant(died, span):
                return "engine", died.worker, f"{died.reason}, {died.detail}"
            case v.StateDaemonLost(worker=worker, reason=reason) if worker not in self._leaving:
                return "state daemon", worker, reason
            case v.ReplicaStopped(replica=replica):
                self._boots.pop(replica, None)
            case v.ReplicaStarted(replica=replica, boot=boot):
                before, self._boots[replica] = self._boots.get(replica, boot), boot
                if before != boot:
                    return "replica", replica, "it started again"
        return None

    def _is_meant(self, died: v.EngineDied, span: Span) -> bool:
        """Whether the engine was to end. In real runs also because its agent found it hung."""
        orders = ((died.worker, died.incarnation), (died.worker, 0))
        ordered_ms = max(self._ordered_ms.get(order, -ORDER_MS - 1) for order in orders)
        is_hung = self._is_real and died.reason == DeathReason.HUNG
        return died.worker in self._leaving or span[0] - ordered_ms <= ORDER_MS or is_hung


def _timed(groups: Sequence[RevisionGroup]) -> Iterator[tuple[Entry, Span]]:
    """All events, with the time since the segment before of the same stream: the log may have been
    away in between. Then the corrected time of a segment may be that of before, so both count. A
    replica writes what its predecessor left ahead of its own start: that one wrote last in another
    epoch."""
    written = {(g.revision, s.stream): s.at_ms for g in groups for s in g.segments}
    spans: dict[str, tuple[int, Span]] = {}
    epochs: dict[str, int] = {}
    former_ms: dict[str, int] = {}
    for at in events_of(groups):
        revision, span = spans.get(at.stream, (0, (at.at_ms, at.at_ms)))
        if epochs.setdefault(at.stream, at.epoch) != at.epoch:
            epochs[at.stream], former_ms[at.stream] = at.epoch, span[1]
        if revision != at.revision:
            times = at.at_ms, written[at.revision, at.stream]
            span = min(span[1], *times), max(times)
            spans[at.stream] = at.revision, span
        if type(at.event) is v.ReplicaStarted:
            yield at, (min(span[0], former_ms.get(at.stream, span[0])), span[1])
        else:
            yield at, span


def _waits(
    groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord], strikes: Sequence[Strike]
) -> Iterator[Violation]:
    """Streams that waited although no fault, and no order to restart, was felt where they were."""
    felt = [*strikes, *_orders(groups)]
    queues: _Queues | None = None
    for client, course in of_clients(courses(groups), clients):
        longest = max(client.gaps_ms, default=0.0)
        if longest <= WAIT_MS or course is None or client.outcome != RequestOutcome.COMPLETED:
            continue
        workers = {decision.worker for decision in course.decisions}
        replicas = {owner.removeprefix("r.") for owner in course.owners}
        began_ms, ended_ms = course.events[0].at_ms, course.events[-1].at_ms
        if is_struck(felt, {*workers, *replicas, THE_LOG}, began_ms - FELT_MS, ended_ms):
            continue
        queues = queues or _Queues(groups)
        bound = WAIT_MS + queues.waited_ms.get(course.request, 0) + _without_worker_ms(course)
        if longest > bound and not queues.has_lost(workers, began_ms, ended_ms + FELT_MS):
            text = f"waited {longest:.0f} ms for a token, bound {bound} ms, and no fault was felt"
            yield Violation(PROMISE, client.request, text)


def _without_worker_ms(course: Course) -> int:
    """For how long no worker could take it, by its replica's decisions: other promises judge these."""
    found, since_ms = 0, -1
    for at in course.events:
        if type(at.event) is v.RouteDecided:
            if at.event.worker and since_ms >= 0:
                found += at.at_ms - since_ms
            since_ms = -1 if at.event.worker else at.at_ms
    return found


def _orders(groups: Sequence[RevisionGroup]) -> Iterator[Strike]:
    """Orders to restart an engine: its streams wait if no other worker is left."""
    for at in events_of(groups, "fleet"):
        if type(at.event) is v.EffectsDecided:
            workers = {e.worker for e in at.event.effects if e.kind == EffectKind.RESTART}
            if workers:
                yield Strike(
                    what=EffectKind.RESTART,
                    targets=frozenset(workers),
                    since_ms=at.at_ms,
                    until_ms=at.at_ms,
                )


class _Queues:
    """What engines reported of their queues. `waited_ms`: by request, the time in queues of engines
    that were full: since the last report about the attempt, before each admission and each end in the
    queue, as of one that was preempted and handed over."""

    def __init__(self, groups: Sequence[RevisionGroup]) -> None:
        self.waited_ms: dict[str, int] = {}
        self._lost_ms: dict[str, list[int]] = {}
        seen: dict[tuple[str, int], tuple[int, type]] = {}
        for at in events_of(groups, "w."):
            if type(at.event) is not v.EngineStep:
                continue
            if at.event.lost:
                self._lost_ms.setdefault(at.stream.removeprefix("w."), []).append(at.at_ms)
            for change in at.event.changes:
                request, kind = change.request, type(change)
                before_ms, last = seen.get((request, change.attempt), (at.at_ms, kind))
                seen[request, change.attempt] = at.at_ms, kind
                ended = kind is v.EngineFinished and last in (v.RequestQueued, v.RequestPreempted)
                if kind is v.RequestAdmitted or ended:
                    waited_ms = self.waited_ms.get(request, 0) + at.at_ms - before_ms
                    self.waited_ms[request] = waited_ms

    def has_lost(self, workers: Iterable[str], since_ms: int, until_ms: int) -> bool:
        """Whether reports of a worker were lost then: a preemption may be among them."""
        times = (ms for worker in workers for ms in self._lost_ms.get(worker, ()))
        return any(since_ms <= ms <= until_ms for ms in times)
