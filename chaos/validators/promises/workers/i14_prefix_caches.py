"""I14, about prefix caches: no request reads blocks of a corrupt worker in another engine's cache.

Once a worker is quarantined for wrong results, every engine of its model that restored blocks since its
last right answers has its prefix cache emptied, within LEADER_TICKS, and once more after RESTORE_TICKS,
when what was under way has ended. An engine that ended meanwhile has no cache; one whose worker is lost
may serve on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from relume.chaos.validators.records import Violation, events_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import EffectKind, FailureClass, HealthState

PROMISE = "I14"
LEADER_TICKS = 10
"""Time in which a leader, or the next one, says so."""
RESTORE_TICKS = 10
"""No restore takes longer, with the connector's default bound."""
FIRST_VERSION = 11
"""The first version of `health` that does it."""


def check(groups: Sequence[RevisionGroup]) -> Iterator[Violation]:
    """Engines that keep what they may have of a corrupt worker."""
    caches = _Caches()
    for at in events_of(groups):
        if type(at.event) is v.Tick:
            yield from caches.passed(at.revision, at.event.number)
        elif at.stream.startswith("w."):
            caches.of_worker(at.stream[2:], at.event)
        else:
            caches.decided(at.event)


class _Caches:
    """`restored`: by worker, tick of the last restore of the engine that runs. `due`: by worker, whose
    blocks it may have, and from which tick to which its cache is to be emptied."""

    def __init__(self) -> None:
        self._models: dict[str, str] = {}
        self._engines: dict[str, int] = {}
        self._restored: dict[str, int] = {}
        self._due: dict[str, list[tuple[str, int, int]]] = {}
        self._tick = 0
        self._applies = True

    def of_worker(self, name: str, event: Any) -> None:
        match event:
            case v.EngineStarted(incarnation=incarnation):
                self._ended(name)
                self._engines[name] = incarnation
            case v.EngineReady(model=model):
                self._models[name] = model
            case v.EngineDied() | v.WorkerDeregistered():
                self._ended(name)
            case v.RestoreStarted(incarnation=incarnation):
                if self._engines.get(name) == incarnation:
                    self._restored[name] = self._tick

    def decided(self, event: Any) -> None:
        match event:
            case v.ReplicaStarted(settings=settings):
                version = int(dict(settings).get("version.health", "1"))
                self._applies = self._applies and version >= FIRST_VERSION
            case v.HealthDecided(state=HealthState.QUARANTINED, failure=FailureClass.CORRUPTION):
                for name, tick in self._restored.items():
                    alike = self._models.get(name) == self._models.get(event.worker)
                    if name != event.worker and alike and tick >= event.good_tick:
                        for begin in (self._tick, self._tick + RESTORE_TICKS):
                            due = (event.worker, begin, begin + LEADER_TICKS)
                            self._due.setdefault(name, []).append(due)
            case v.EffectsDecided(effects=effects, again=-1):
                for effect in effects:
                    if effect.kind == EffectKind.RESET_PREFIX_CACHE:
                        self._emptied(effect.worker, effect.incarnation)

    def passed(self, revision: int, tick: int) -> Iterator[Violation]:
        """Time is over for some."""
        self._tick = tick
        for name, dues in self._due.items():
            for corrupt in {corrupt for corrupt, _, until in dues if until < tick}:
                if self._applies:
                    text = f"{name} may have blocks of it, and its prefix cache is not emptied"
                    yield Violation(PROMISE, corrupt, text, revision)
            dues[:] = [due for due in dues if due[2] >= tick]

    def _emptied(self, name: str, incarnation: int) -> None:
        if self._engines.get(name) == incarnation:
            dues = self._due.get(name, [])
            dues[:] = [due for due in dues if due[1] > self._tick]
            if not dues:
                self._restored.pop(name, None)

    def _ended(self, name: str) -> None:
        self._restored.pop(name, None)
        self._due.pop(name, None)
