"""Of I27: a drain that is not forced leaves the minimum of open workers of its model.

By what the decision's basis knows. Commands that land together are decided one after the other, so a worker
that an earlier decision drains does not count, although the basis does not know of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from relume.chaos.validators.known_facts import EXCLUDED, KnownFacts
from relume.chaos.validators.records import Entry, Log, events_of
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import AdminCommand, EffectKind, EnginePhase

FLOOR = "migration.drain_floor"


def too_few(log: Log) -> Iterator[tuple[str, str, int]]:
    """Commands that left too few open workers, why, and the revision."""
    walk = _Drains(log.known)
    for at in events_of(log):
        if (note := _NOTES.get(type(at.event))) is not None:
            note(walk, at)
    return iter(walk.found)


class _Drains:
    """`found`: errors; the rest is what the log said up to here."""

    def __init__(self, known: KnownFacts) -> None:
        self.found: list[tuple[str, str, int]] = []
        self._known = known
        self._unforced: set[str] = set()
        self._leader = ""
        self._started: dict[str, dict[str, str]] = {}
        self._changed = ""
        self._drained: dict[str, int] = {}
        """Workers that drain, and since which revision."""

    def started(self, at: Entry) -> None:
        self._started[at.event.replica] = dict(at.event.settings)

    def elected(self, at: Entry) -> None:
        self._leader = at.event.replica

    def changed(self, at: Entry) -> None:
        if at.event.key == FLOOR:
            self._changed = at.event.value

    def commanded(self, at: Entry) -> None:
        if at.event.command == AdminCommand.DRAIN and not at.event.force:
            self._unforced.add(at.event.command_id)

    def decided(self, at: Entry) -> None:
        event = at.event
        if event.again >= 0:
            return
        for effect in event.effects:
            if effect.kind == EffectKind.UNDRAIN:
                self._drained.pop(effect.worker, None)
            elif effect.kind == EffectKind.DRAIN:
                if event.decision in self._unforced:
                    self._judge(at, event.decision, effect.worker)
                self._drained[effect.worker] = at.revision

    def _judge(self, at: Entry, command: str, name: str) -> None:
        revision, floor = at.event.basis.revision, self._floor()
        if name not in self._known.workers or not self._is_open(name, revision):
            return
        model = self._known.workers[name].standing.at(revision).model
        left = [
            other
            for other, worker in self._known.workers.items()
            if other != name
            and worker.standing.at(revision).model == model
            and self._is_open(other, revision)
        ]
        if len(left) < floor:
            why = (
                f"drained {name}, and {len(left)} of model {model} stayed open, of at least {floor}"
            )
            self.found.append((command, why, at.revision))

    def _is_open(self, name: str, revision: int) -> bool:
        worker = self._known.workers[name]
        standing, health = worker.standing.at(revision), worker.health.at(revision)
        is_ready = standing.present and standing.engine == EnginePhase.READY
        drains = standing.drains or self._drained.get(name, 0) > revision
        is_well = health is None or health.state not in EXCLUDED
        return is_ready and is_well and not drains and not standing.unreadable

    def _floor(self) -> int:
        """The minimum; leaders of earlier builds had none."""
        return int(self._changed or self._started.get(self._leader, {}).get(FLOOR, "0"))


_NOTES: dict[type, Callable[[_Drains, Any], None]] = {
    v.ReplicaStarted: _Drains.started,
    v.LeaderElected: _Drains.elected,
    v.ConfigChanged: _Drains.changed,
    v.AdminCommanded: _Drains.commanded,
    v.EffectsDecided: _Drains.decided,
}
