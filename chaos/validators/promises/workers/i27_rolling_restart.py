"""I27: a rolling restart takes one failure domain at a time, none while a worker of the model is
unhealthy or quarantined or its host was lost since the rollout began, leaves a worker open, also when it
restarts what has drained, and gives requests to new engines alone, after their canaries if there are
any. A step that is given up before its restart returns the engines it began with, and says why.
Drains are judged in `drain_floor`.

Its leader decides from the log up to a tick: facts are those of the last tick before the decision.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from relume.chaos.validators.known_facts import EXCLUDED, STEP_OVER, KnownFacts, Standing
from relume.chaos.validators.promises.workers import drain_floor
from relume.chaos.validators.records import ClientRecord, Entry, Violation, events_of, log_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import EnginePhase, RolloutStage

PROMISE = "I27"


def check(groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord]) -> list[Violation]:
    """Steps that take too many workers, and workers that return too early."""
    log = log_of(groups)
    walk, out = _Walk(log.known), []
    for at in events_of(log):
        event = at.event
        walk.seen(at)
        if type(event) is v.Tick:
            walk.tick, walk.lost_then = at.revision, frozenset(walk.lost)
        elif type(event) is v.CanaryReported and not event.error:
            answers = walk.answered.setdefault(event.worker, {})
            answers.setdefault(event.incarnation, at.revision)
        elif type(event) is v.RolloutDecided:
            errors = walk.decided(event)
            out += [Violation(PROMISE, event.rollout, why, at.revision) for why in errors]
    return [*out, *(Violation(PROMISE, *about) for about in drain_floor.too_few(log))]


class _Walk:
    """`step`: workers of the present step and the incarnation of each that is to end; `restarts`: whether
    their restart was decided; `answered`: by
    worker and incarnation, the revision of its first answer to a canary; `tick`: the revision of the
    last tick; `lost`: workers whose hosts were lost since the rollout began, `lost_then` at that tick."""

    def __init__(self, known: KnownFacts) -> None:
        self._known = known
        self._step: dict[str, int] = {}
        self._restarts = False
        self.answered: dict[str, dict[int, int]] = {}
        self.tick = 0
        self.lost: set[str] = set()
        self.lost_then: frozenset[str] = frozenset()

    def seen(self, at: Entry) -> None:
        """Hosts that are lost, and those that are back or left."""
        kind = type(at.event)
        if kind is v.WorkerLost:
            if not self._known.workers[at.event.worker].standing.at(at.revision).present:
                self.lost.add(at.event.worker)
        elif kind in (v.WorkerRegistered, v.StreamResumed, v.WorkerDeregistered):
            self.lost.discard(at.stream[2:])
        elif kind is v.WorkerForgotten:
            self.lost.discard(at.event.worker)
        elif kind is v.RolloutDecided and at.event.stage == RolloutStage.BEGUN:
            self.lost.clear()
            self.lost_then = frozenset()

    def decided(self, event: v.RolloutDecided) -> list[str]:
        if event.stage == RolloutStage.DRAINING:
            found = list(self._begins(event))
            self._step = {name: self._standing(name).incarnation for name in event.workers}
            self._restarts = False
            return found
        if event.stage == RolloutStage.RESTARTING:
            self._restarts = True
            return list(self._leaves_none(event, "restart"))
        found = list(self._returns(event)) if event.stage == RolloutStage.RETURNED else []
        if event.stage in STEP_OVER:
            self._step = {}
        return found

    def _standing(self, name: str) -> Standing:
        return self._known.workers[name].standing.at(self.tick)

    def _begins(self, event: v.RolloutDecided) -> Iterator[str]:
        if self._step:
            yield f"{', '.join(event.workers)} drain before {', '.join(self._step)} returned"
        domains = {self._standing(name).domain for name in event.workers}
        if len(domains) != 1:
            yield f"{', '.join(event.workers)} drain at once, of {len(domains)} domains"
        for name in self._known.workers:
            if state := self._unwell(name, event.model):
                yield f"{', '.join(event.workers)} drain while {name} is {state}"
            if self._is_lost(name, event.model):
                yield f"{', '.join(event.workers)} drain while the host of {name} is lost"
        yield from self._leaves_none(event, "drain")

    def _leaves_none(self, event: v.RolloutDecided, what: str) -> Iterator[str]:
        """Whether its workers could serve but for the step, and no other one does."""
        rest = [name for name in self._known.workers if name not in event.workers]
        leaves_open = any(self._is_open(name, event.model) for name in rest)
        if not leaves_open and any(self._is_open(n, event.model, True) for n in event.workers):
            yield f"{', '.join(event.workers)} {what}, and no other worker of {event.model} is open"

    def _unwell(self, name: str, model: str) -> str:
        """The state of a worker that serves and is excluded for its health."""
        standing, health = self._standing(name), self._known.workers[name].health.at(self.tick)
        serves = standing.present and standing.engine == EnginePhase.READY
        if not serves or standing.draining or standing.model != model or health is None:
            return ""
        return health.state if health.state in EXCLUDED else ""

    def _is_lost(self, name: str, model: str) -> bool:
        standing = self._standing(name)
        return name in self.lost_then and standing.model == model and not standing.draining

    def _is_open(self, name: str, model: str, but_for_step: bool = False) -> bool:
        standing = self._standing(name)
        health = self._known.workers[name].health.at(self.tick)
        serves = standing.engine == EnginePhase.READY and standing.present
        rolling = standing.rolling and not but_for_step
        drains = standing.draining or standing.leaving or rolling
        well = not (drains or standing.unreadable) and (
            health is None or health.state not in EXCLUDED
        )
        return serves and well and standing.model == model

    def _returns(self, event: v.RolloutDecided) -> Iterator[str]:
        """Workers that left meanwhile are not judged."""
        for name, old in self._step.items():
            standing = self._standing(name)
            if self._is_lost(name, standing.model):
                yield f"{name} counts as back while its host is lost"
            if not standing.present:
                continue
            if not self._restarts and standing.incarnation == old:
                if not event.reason:
                    yield f"{name} returns before its restart, without a reason"
                continue
            if standing.incarnation <= old or standing.engine != EnginePhase.READY:
                yield f"{name} returns with engine {standing.incarnation}, {standing.engine}"
            answers = self.answered.get(name, {})
            if answers and answers.get(standing.incarnation, 1 << 62) > self.tick:
                yield f"{name} returns before its new engine answered a canary"
