"""I11, its second part: the batches of engines are limited as the level says, and not for longer.

Judged from the log by arithmetic of its own: the limit of an effect is that of the level which was
decided last, and each ready engine gets the one that is due within `GRACE_TICKS` ticks of the leader.
A leader that is new, or found a gap between two ticks, waits for `SETTLED_TICKS` first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from msgspec import Struct

from relume.chaos.validators.records import Entry, Violation, events_of, log_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import EffectKind, EngineKind

PROMISE = "I11"
GRACE_TICKS = 5
SETTLED_TICKS = 8
GAP_MS = 3000
MODE, PERCENT = "degradation.mode", "degradation.batch_percent"
LEAST_LEVEL, LEAST_FOR_TWICE = 1, 3
"""Levels from which batches are limited, and limited by as much again."""


class _Engine(Struct):
    """A worker's engine, as the log has it. `percent`: of its maximum number of requests."""

    incarnation: int = 0
    model: str = ""
    percent: int = 100
    wrong_ticks: int = 0


def check(groups: Sequence[RevisionGroup]) -> list[Violation]:
    """Limits that no level explains, and levels without their limit."""
    watch = _Batches()
    for at in events_of(log_of(groups)):
        if (note := _NOTES.get(type(at.event))) is not None:
            note(watch, at)
    return watch.found


class _Batches:
    """Levels by model, ready engines by worker, and the settings in force."""

    def __init__(self) -> None:
        self.found: list[Violation] = []
        self._levels: dict[str, int] = {}
        self._before: dict[str, tuple[int, int]] = {}
        """By model: where its level was decided, and the one before."""
        self._engines: dict[str, _Engine] = {}
        self._changed: dict[str, str] = {}
        self._started: dict[str, Mapping[str, str]] = {}
        self._leader = ""
        self._settling_since = self._tick = self._tick_ms = 0

    def started(self, at: Entry) -> None:
        """See `_NOTES`."""
        self._started[at.event.replica] = dict(at.event.settings)

    def changed(self, at: Entry) -> None:
        """See `_NOTES`."""
        self._changed[at.event.key] = at.event.value

    def elected(self, at: Entry) -> None:
        """See `_NOTES`."""
        self._leader = at.event.replica
        self._settling_since = self._tick

    def decided(self, at: Entry) -> None:
        """See `_NOTES`."""
        model = at.event.model
        self._before[model] = at.revision, self._levels.get(model, 0)
        self._levels[model] = at.event.level

    def ready(self, at: Entry) -> None:
        """See `_NOTES`. A server without the plugin has no scheduler of ours."""
        event = at.event
        if event.kind != EngineKind.PLAIN:
            self._engines[event.worker] = _Engine(event.incarnation, event.model)

    def gone(self, at: Entry) -> None:
        """See `_NOTES`."""
        self._engines.pop(at.event.worker, None)

    def effects(self, at: Entry) -> None:
        """See `_NOTES`."""
        for effect in at.event.effects if at.event.again < 0 else ():
            engine = self._engines.get(effect.worker)
            if effect.kind != EffectKind.LIMIT_BATCH or engine is None:
                continue
            if engine.incarnation != effect.incarnation:
                continue
            level = self._levels.get(engine.model, 0)
            engine.percent, due = int(effect.argument), self._due(level)
            revision, before = self._before.get(engine.model, (0, 0))
            if revision == at.revision and engine.percent == self._due(before):
                continue  # decided together with the level, by what the fold had before
            if engine.percent != due:
                text = f"its batches are limited to {effect.argument} %, level {level} makes {due}"
                self.found.append(Violation(PROMISE, effect.worker, text, at.revision))

    def ticked(self, at: Entry) -> None:
        """See `_NOTES`."""
        tick: v.Tick = at.event
        if not 0 <= tick.unix_ms - self._tick_ms <= GAP_MS:
            self._settling_since = tick.number
        self._tick, self._tick_ms = tick.number, tick.unix_ms
        if tick.number - self._settling_since <= SETTLED_TICKS:
            return
        for name, engine in self._engines.items():
            due = self._due(self._levels.get(engine.model, 0))
            engine.wrong_ticks = engine.wrong_ticks + 1 if engine.percent != due else 0
            if engine.wrong_ticks == GRACE_TICKS + 1:
                text = f"its batches have a limit of {engine.percent} %, not {due}, for too long"
                self.found.append(Violation(PROMISE, name, text, at.revision))

    def _due(self, level: int) -> int:
        """The limit that a level makes due, in percent."""
        if level < LEAST_LEVEL or self._setting(MODE, "off") != "on":
            return 100
        percent = int(self._setting(PERCENT, "100"))
        return max(100 - 2 * (100 - percent), 1) if level >= LEAST_FOR_TWICE else percent

    def _setting(self, key: str, default: str) -> str:
        settings = self._started.get(self._leader, {})
        return self._changed.get(key) or settings.get(key, default)


_NOTES: dict[type, Callable[[_Batches, Entry], None]] = {
    v.ReplicaStarted: _Batches.started,
    v.ConfigChanged: _Batches.changed,
    v.LeaderElected: _Batches.elected,
    v.DegradationDecided: _Batches.decided,
    v.EngineReady: _Batches.ready,
    v.EngineDied: _Batches.gone,
    v.WorkerLost: _Batches.gone,
    v.WorkerDeregistered: _Batches.gone,
    v.EffectsDecided: _Batches.effects,
    v.Tick: _Batches.ticked,
}
"""What each event of the log means here."""
