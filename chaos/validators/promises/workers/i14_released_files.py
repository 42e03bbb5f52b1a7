"""I14, about model files: no worker whose files differ from those of its class leaves quarantine unnoticed.

What the log has of the digests is compared anew, without the policies. A quarantined worker whose files
differ from those of most healthy workers of its class, for SETTLED_TICKS on end, is released by an
operator only; so is one that the leader found to differ, unless it found the same files later. Each
comparison names what the agents reported. A worker with the files of most is not held for long.

Of a run whose faults are known, it is known which engines loaded damaged files, whatever their agents
report: the digest of these is another one than that of all right files.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from msgspec import Struct

from relume.chaos.validators.records import Entry, Violation, events_of
from relume.chaos.validators.strikes import Strike
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import AdminCommand, HealthState, WeightsOutcome

PROMISE = "I14"
DAMAGE = "model-file-damaged"
FIRST_VERSION, LEVEL = 13, 2
"""The first version of `health`, and the feature level, that compare files."""
SETTLED_TICKS = 3
"""A difference, or its end, may be as new as what the leader decided before it."""
HELD_TICKS = 10
"""Time in which a leader, or the next one, writes that the files are the same."""
_UNHEALTHY = (HealthState.QUARANTINED, HealthState.UNHEALTHY, HealthState.PROBING)


def check(groups: Sequence[RevisionGroup], strikes: Sequence[Strike] = ()) -> Iterator[Violation]:
    """Workers that are released with other files, held with the right ones, or compared wrongly."""
    watch = _Files([strike for strike in strikes if strike.what == DAMAGE])
    for at in events_of(groups):
        yield from watch.saw(at)


class _Worker(Struct, kw_only=True):
    """`started_ms`, `ready`, `present`: of its engine `incarnation`. `digested`: what its agent reported of that
    engine's files. `compared`: the last comparison in this quarantine; `found_other`: whether the last one with
    an outcome found other files. `differs`, `agrees`: for how many ticks on
    end its files have been others, or the same, as those of most."""

    name: str
    model: str = ""
    incarnation: int = 0
    started_ms: int = 0
    ready: bool = False
    present: bool = True
    health: HealthState = HealthState.HEALTHY
    digested: v.WeightsDigested | None = None
    compared: v.WeightsCompared | None = None
    found_other: bool = False
    trusted: bool = False
    differs: int = 0
    agrees: int = 0


class _Files:
    def __init__(self, damages: Sequence[Strike]) -> None:
        self._damages = damages
        self._workers: dict[str, _Worker] = {}
        self._level_ticks = -1
        """Ticks since every replica reads the events; -1: not yet."""
        self._ticked_at = 0
        self._reported: set[tuple[str, str]] = set()
        self._versions: dict[str, int] = {}

    def saw(self, at: Entry) -> Iterator[Violation]:
        """The next event."""
        event = at.event
        if at.stream.startswith("w."):
            self._of_worker(at)
            yield from self._of_damaged(at)
        elif type(event) is v.Tick:
            yield from self._passed(at)
        elif type(event) is v.HealthDecided:
            yield from self._judged(at, event)
        elif type(event) is v.WeightsCompared:
            yield from self._compared(at, event)
        else:
            self._of_fleet(event)

    def _worker(self, name: str) -> _Worker:
        return self._workers.setdefault(name, _Worker(name=name))

    def _of_worker(self, at: Entry) -> None:
        worker, event = self._worker(at.stream[2:]), at.event
        match event:
            case v.WorkerRegistered() | v.StreamResumed():
                worker.present = True
            case v.WorkerDeregistered():
                worker.present = worker.ready = False
            case v.EngineStarted(incarnation=incarnation):
                worker.incarnation, worker.started_ms = incarnation, at.at_ms
                worker.ready, worker.digested = False, None
                worker.differs = worker.agrees = 0
            case v.EngineReady(incarnation=incarnation, model=model):
                worker.ready, worker.model = incarnation == worker.incarnation, model
            case v.EngineDied(incarnation=incarnation):
                worker.ready = worker.ready and incarnation != worker.incarnation
            case v.WeightsDigested(incarnation=incarnation):
                if incarnation == worker.incarnation:
                    worker.digested = event
                    self._reported.add((worker.name, event.digest))

    def _of_fleet(self, event: Any) -> None:
        match event:
            case v.ReplicaStarted(replica=name, settings=settings):
                self._versions[name] = int(dict(settings).get("version.health", "1"))
            case v.ReplicaStopped(replica=name) | v.ReplicaLost(replica=name):
                self._versions.pop(name, None)
            case v.FeatureLevelRaised(level=level) if level >= LEVEL:
                self._level_ticks = max(self._level_ticks, 0)
            case v.WorkerLost(worker=name):
                self._worker(name).present = False
            case v.AdminCommanded(command=AdminCommand.TRUST, target=name):
                self._worker(name).trusted = True

    @property
    def _applies(self) -> bool:
        versions = self._versions.values()
        is_raised = self._level_ticks >= SETTLED_TICKS
        return is_raised and all(version >= FIRST_VERSION for version in versions)

    def _is_damaged(self, worker: _Worker) -> bool:
        """Whether its engine loaded damaged files, by the faults of the run."""
        at_ms = worker.started_ms
        return any(
            worker.name in strike.targets
            and strike.since_ms <= at_ms
            and (at_ms <= strike.until_ms or strike.until_ms <= strike.since_ms)  # or it stays
            for strike in self._damages
        )

    def _majority(self, worker: _Worker, own: v.WeightsDigested) -> str:
        """The digest that most of the healthy others of its class reported; empty: none."""
        digests = [
            other.digested.digest
            for other in self._workers.values()
            if other is not worker
            and (other.present and other.ready and other.health not in _UNHEALTHY)
            and other.digested is not None
            and other.digested.digest
            and (other.model, other.digested.weights) == (worker.model, own.weights)
        ]
        digest, count = Counter(digests).most_common(1)[0] if digests else ("", 0)
        return digest if 2 * count > len(digests) else ""

    def _of_damaged(self, at: Entry) -> Iterator[Violation]:
        """The digest of damaged files is no other worker's."""
        event = at.event
        if type(event) is not v.WeightsDigested or not (event.digest and event.reread):
            return
        worker = self._worker(event.worker)
        if worker.digested is event and self._is_damaged(worker):
            for other in self._workers.values():
                if other is worker or other.digested is None or self._is_damaged(other):
                    continue
                if other.digested.digest == event.digest:
                    text = f"its files are damaged, and have the digest of those of {other.name}"
                    yield Violation(PROMISE, worker.name, text, at.revision)

    def _passed(self, at: Entry) -> Iterator[Violation]:
        """Ticks that land together, after a time without etcd, are one."""
        if at.revision == self._ticked_at:
            return
        self._ticked_at = at.revision
        self._level_ticks += self._level_ticks >= 0
        for worker in self._workers.values():
            own = worker.digested
            if worker.health != HealthState.QUARANTINED or own is None or own.error:
                continue
            expected = self._majority(worker, own)
            is_other = self._is_damaged(worker) or (own.reread and own.digest != expected)
            is_same = own.reread and own.digest == expected and not self._is_damaged(worker)
            worker.differs = worker.differs + 1 if expected and is_other else 0
            worker.agrees = worker.agrees + 1 if is_same else 0
            held = worker.compared
            if held is None or held.incarnation != worker.incarnation or not worker.ready:
                continue
            if held.outcome == WeightsOutcome.DIFFERENT and worker.agrees == HELD_TICKS:
                text = "it is held for other model files, and they are those of most"
                yield Violation(PROMISE, worker.name, text, at.revision)

    def _judged(self, at: Entry, event: v.HealthDecided) -> Iterator[Violation]:
        worker = self._worker(event.worker)
        if event.incarnation != worker.incarnation:
            return
        was, worker.health = worker.health, event.state
        if was != HealthState.QUARANTINED:
            worker.trusted = False
            worker.differs = worker.agrees = 0
        elif event.state != HealthState.QUARANTINED:
            if event.state == HealthState.PROBING and self._applies and not worker.trusted:
                if why := _why_not(worker):
                    text = f"it is released, although {why}"
                    yield Violation(PROMISE, worker.name, text, at.revision)
            worker.compared, worker.found_other = None, False

    def _compared(self, at: Entry, event: v.WeightsCompared) -> Iterator[Violation]:
        worker = self._worker(event.worker)
        worker.compared = event
        if event.outcome != WeightsOutcome.UNKNOWN:
            worker.found_other = event.outcome == WeightsOutcome.DIFFERENT
        for text in self._untrue(worker, event):
            yield Violation(PROMISE, worker.name, f"its model files: {text}", at.revision)

    def _untrue(self, worker: _Worker, event: v.WeightsCompared) -> Iterator[str]:
        if event.outcome == WeightsOutcome.UNKNOWN:
            if not event.reason:
                yield "nothing says why they are not compared"
            return
        if event.digest and (worker.name, event.digest) not in self._reported:
            yield "they are compared by a digest that its agent did not report"
        if (event.digest == event.expected) != (event.outcome == WeightsOutcome.SAME):
            yield f"{event.digest} and {event.expected} are said to be {event.outcome}"
        for name in event.witnesses:
            if (name, event.expected) not in self._reported:
                yield f"{name} is a witness, and did not report {event.expected}"


def _why_not(worker: _Worker) -> str:
    """Why it must not be released; empty: it may."""
    if worker.differs >= SETTLED_TICKS:
        return "its model files differ from those of most healthy workers"
    if worker.found_other:
        return "its model files were found to differ"
    compared = worker.compared
    if compared is None or compared.incarnation != worker.incarnation:
        return "its model files were not compared"
    return ""
