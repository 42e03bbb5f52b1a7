"""I9, about cross-checks: which engines get one, of which requests, and what quarantines a worker.

A check is judged on what its basis knows. Its engine runs, is not excluded by a breaker, a quarantine
or a drain, and has no requests: none that it reported, and none that the replica has just sent there.
In a dispute the engine that served the client answers again, whatever is held against it.
The request is complete, was exact, had one attempt, and its client lets its prompt be kept.
A worker is quarantined by a majority only if enough of its answers differ from what more than half of
three engines or more answered, each asked for itself. A dispute ends within its bound.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from relume.chaos.validators.history import History
from relume.chaos.validators.known_facts import STEP_OVER
from relume.chaos.validators.records import Entry, Violation, events_of, log_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import (
    EffectKind,
    Guarantee,
    HealthState,
    RequestOutcome,
    RolloutStage,
)
from relume.policies.crosscheck.disputes import DOUBT_TICKS
from relume.policies.state.fleet import Fleet

PROMISE = "I9"
EXCLUDED = (HealthState.UNHEALTHY, HealthState.QUARANTINED, HealthState.PROBING)
BY_MAJORITY = "from what most engines answer"
"""In the evidence of a quarantine."""
CONFIRM = "crosscheck.confirm"
FEWEST = 3
"""Engines of which more than half are a majority."""
LATE_TICKS = 10


def check(groups: Sequence[RevisionGroup], unkept: Collection[str] = ()) -> Iterator[Violation]:
    """`unkept`: requests, by their client's id, whose prompts may not be kept."""
    log = log_of(groups)
    if not any(type(at.event) is v.CrossCheckDecided for at in events_of(log, "r.")):
        return
    watch = _Checks(unkept)
    for at in events_of(log):
        watch.saw(at)
    yield from watch.found
    yield from _endless(log.end)


def _endless(fleet: Fleet) -> Iterator[Violation]:
    latest = fleet.tick - DOUBT_TICKS - LATE_TICKS
    for request, dispute in (fleet.disputes or {}).items():
        if dispute.tick < latest:
            text = f"its answer is in dispute for {fleet.tick - dispute.tick} ticks"
            yield Violation(PROMISE, request, text)
    for worker in fleet.workers.values():
        checks = worker.checks or None
        if checks is None or checks.incarnation != worker.incarnation:
            continue  # of an engine that is gone: nothing goes by it
        for request, tick in checks.disputed.items():
            if tick < latest:
                text = f"its answer to {request} is in doubt for {fleet.tick - tick} ticks"
                yield Violation(PROMISE, worker.name, text)


class _Engine:
    """One worker: the incarnation that is ready (0: none), attempts that its engine has, whether it
    drains, and the latest decision about its health. `finished`: when attempts left the engine."""

    def __init__(self) -> None:
        self.ready = History(0)
        self.running: History[frozenset[tuple[str, int]]] = History(frozenset())
        self.draining = History(False)
        self.leaving = History(False)
        self.rolling = History(False)
        self.health: History[v.HealthDecided | None] = History(None)
        self.finished: dict[tuple[str, int], int] = {}

    def why_not(self, revision: int, incarnation: int, again: bool, replica: str) -> str:
        """Why its engine gets no check of `replica` by what is known at `revision`. The one replica that
        probes it may send it checks too."""
        if self.ready.at(revision) != incarnation:
            return "its engine is not ready"
        if any(one.at(revision) for one in (self.draining, self.leaving, self.rolling)):
            return "it drains"
        if count := len(self.running.at(revision)):
            return f"its engine has {count} requests"
        health = self.health.at(revision)
        if health is None or again or health.incarnation != incarnation:
            return ""
        if health.state == HealthState.PROBING and health.prober == replica:
            return ""
        return f"it is {health.state}" if health.state in EXCLUDED else ""


class _Checks:
    """Everything that checks depend on, up to one event of the log."""

    def __init__(self, unkept: Collection[str]) -> None:
        self.found: list[Violation] = []
        self._unkept = unkept
        self._engines: dict[str, _Engine] = {}
        self._arrived: dict[str, v.RequestArrived] = {}
        self._ended: dict[str, v.RequestEnded] = {}
        self._sent: dict[tuple[str, str], tuple[int, v.RouteDecided]] = {}
        self._heard: dict[str, dict[str, tuple[int, bytes]]] = {}
        self._outvoted: dict[tuple[str, int], set[str]] = {}
        self._confirm: int | None = None

    def saw(self, at: Entry) -> None:
        """The next event."""
        event, kind = at.event, type(at.event)
        if at.stream.startswith("w."):
            self._saw_worker(at)
        elif kind is v.RequestArrived:
            self._arrived[event.request] = event
        elif kind is v.RouteDecided and event.worker:
            self._sent[at.stream, event.request] = at.revision, event
        elif kind is v.TransportObserved:
            self._sent.pop((at.stream, event.request), None)
        elif kind is v.RequestEnded:
            self._sent.pop((at.stream, event.request), None)
            if at.stream != "fleet" or event.request not in self._ended:
                self._ended[event.request] = event  # what its client saw, if its replica says it
        elif kind is v.CrossCheckDecided:
            self._decided(at)
        elif kind is v.CrossChecked:
            self._checked(event)
        elif kind is v.HealthDecided:
            self._engine(event.worker).health.set(at.revision, event)
            self._judged(at)
        else:
            self._saw_settings(at)

    def _saw_worker(self, at: Entry) -> None:
        event, kind, engine = at.event, type(at.event), self._engine(at.stream[2:])
        if kind is v.EngineStep:
            if event.incarnation != engine.ready.last:
                return  # a late word of an engine that is gone
            running = engine.running.last if not event.lost else frozenset()
            for change in event.changes:
                if type(change) is v.RequestQueued:
                    running |= {(change.request, change.attempt)}
                elif type(change) is v.EngineFinished:
                    running -= {(change.request, change.attempt)}
                    engine.finished[change.request, change.attempt] = at.revision
            if running != engine.running.last:
                engine.running.set(at.revision, running)
        elif kind is v.ReportsDropped:
            if event.incarnation == engine.ready.last:
                engine.running.set(at.revision, frozenset())
        elif kind is v.EngineReady:
            engine.ready.set(at.revision, event.incarnation)
            engine.running.set(at.revision, frozenset())
        elif kind in (v.WorkerLeaving, v.WorkerRegistered):
            engine.leaving.set(at.revision, kind is v.WorkerLeaving)
        elif kind in (v.EngineDied, v.EngineStarted, v.WorkerDeregistered):
            engine.ready.set(at.revision, 0)
            engine.running.set(at.revision, frozenset())

    def _saw_settings(self, at: Entry) -> None:
        event, kind = at.event, type(at.event)
        if kind is v.EffectsDecided:
            for effect in event.effects:
                if effect.kind in (EffectKind.DRAIN, EffectKind.UNDRAIN):
                    drains = effect.kind == EffectKind.DRAIN
                    self._engine(effect.worker).draining.set(at.revision, drains)
        elif kind is v.RolloutDecided:
            begins = event.stage == RolloutStage.DRAINING
            if begins or event.stage in STEP_OVER:
                for name in event.workers:
                    self._engine(name).rolling.set(at.revision, begins)
        elif kind is v.ReplicaStarted and CONFIRM in (settings := dict(event.settings)):
            least = int(settings[CONFIRM])
            self._confirm = least if self._confirm is None else min(self._confirm, least)

    def _decided(self, at: Entry) -> None:
        """A check of a request, by an engine."""
        event, basis = at.event, at.event.basis.revision
        engine, is_again = self._engine(event.by), event.by == event.worker
        why = engine.why_not(basis, event.by_incarnation, is_again, at.stream[2:])
        for (stream, request), (revision, sent) in self._sent.items():
            is_there = engine.finished.get((request, sent.attempt), basis + 1) > basis
            if stream == at.stream and sent.worker == event.by and revision > basis and is_there:
                why = why or f"{stream[2:]} has just sent {request} there"
        if why:
            text = f"{event.by} answers it again, although {why}"
            self.found.append(Violation(PROMISE, event.request, text, at.revision))
        if why := self._unfit(event):
            text = f"{event.by} answers it again, although {why}"
            self.found.append(Violation(PROMISE, event.request, text, at.revision))

    def _unfit(self, event: v.CrossCheckDecided) -> str:
        """Why the request is not one to check."""
        arrived, ended = self._arrived.get(event.request), self._ended.get(event.request)
        if arrived is None or ended is None or ended.outcome != RequestOutcome.COMPLETED:
            return "it is not complete"
        if arrived.verdict != Guarantee.EXACT:
            return f"its guarantee is {arrived.verdict}"
        if ended.attempts != 1:
            return f"it had {ended.attempts} attempts"
        if ended.tokens != event.tokens:
            return f"its client has {ended.tokens} tokens and not {event.tokens}"
        return "its prompt may not be kept" if arrived.client_id in self._unkept else ""

    def _checked(self, event: v.CrossChecked) -> None:
        """An engine's answer: who is outvoted now."""
        heard = self._heard.get(event.request)
        if event.error or (heard is None and event.differs < 0):
            return
        heard = self._heard.setdefault(event.request, {})
        heard[event.by] = event.by_incarnation, event.answer
        answers = [answer for _, answer in heard.values()]
        common = max(answers, key=answers.count)
        if len(answers) >= FEWEST and 2 * answers.count(common) > len(answers):
            for name, (incarnation, answer) in heard.items():
                if answer != common:
                    self._outvoted.setdefault((name, incarnation), set()).add(event.request)

    def _judged(self, at: Entry) -> None:
        """A decision about a worker's health."""
        event = at.event
        if event.state != HealthState.QUARANTINED or BY_MAJORITY not in event.evidence:
            return
        count = len(self._outvoted.get((event.worker, event.incarnation), ()))
        least = self._confirm or 1
        if count < least:
            text = (
                f"quarantined by a majority, which contradicted {count} of its answers, of at "
                f"least {least}"
            )
            self.found.append(Violation(PROMISE, event.worker, text, at.revision))

    def _engine(self, worker: str) -> _Engine:
        return self._engines.setdefault(worker, _Engine())
