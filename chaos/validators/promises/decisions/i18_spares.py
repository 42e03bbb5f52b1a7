"""I18, spares: a spare gets no new request while another worker could take it, and is promoted when a
worker of its model fails.

By the basis of a decision, as in `i18_sound_dispatch`: the first attempt of a request that is not of
tier batch goes to a spare only if no other worker could take the request. Load does not count.

By the log, with arithmetic of its own:

- each `SparesDecided` follows the one before, and from its figures; a worker becomes a spare after the
  time that the settings in force give;
- at each tick no more spares are in force than the facts of the tick before, of a decision since, or of
  this one, allow:
  the share of the workers, less one for each that was not open. The leader answers a tick before it
  writes the next one, a second later, so a spare is promoted within a second.

Exceptions: an election, since a new leader decides from its first tick on; replicas that do not follow
decisions about spares; a loss that was declared before the model had spares, or long ago.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from relume.chaos.validators.known_facts import EXCLUDED, KnownFacts, KnownWorker, Standing
from relume.chaos.validators.records import Entry, Log, events_of
from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EnginePhase, HealthState

LEAST_WORKERS = 4
LOST_TICKS = 600
DEFAULTS = {"share_percent": 0, "dwell_ticks": 5}
Found = tuple[str, str, int]
"""What it is about, why it is wrong, and the revision."""


def unsound(log: Log) -> Iterator[Found]:
    """Decisions about spares that do not follow, and promotions that do not come."""
    watch = _Spares(log.known)
    for at in events_of(log):
        if (note := _NOTES.get(type(at.event))) is not None:
            note(watch, at)
    yield from watch.found


class _Spares:
    """Decisions by model, and what the last tick allowed."""

    def __init__(self, known: KnownFacts) -> None:
        self.found: list[Found] = []
        self._known = known
        self._changed: dict[str, int] = {}
        self._started: dict[str, Mapping[str, str]] = {}
        self._leader = ""
        self._decided: dict[str, v.SparesDecided] = {}
        self._lost: dict[str, tuple[int, frozenset[str]]] = {}
        """Since which tick, and the models that had spares then."""
        self._tick = -1
        self._allowed: dict[str, int] = {}
        """What the last tick of this leader allowed; empty: it is the first."""

    def started(self, at: Entry) -> None:
        """See `_NOTES`."""
        self._started[at.event.replica] = dict(at.event.settings)

    def changed(self, at: Entry) -> None:
        """See `_NOTES`."""
        name = at.event.key.removeprefix("spares.")
        if name != at.event.key and name in DEFAULTS:
            self._changed[name] = int(at.event.value)

    def elected(self, at: Entry) -> None:
        """See `_NOTES`."""
        self._leader = at.event.replica
        self._allowed = {}

    def lost(self, at: Entry) -> None:
        """See `_NOTES`."""
        self._lost[at.event.worker] = self._tick, frozenset(self._decided)

    def decided(self, at: Entry) -> None:
        """See `_NOTES`."""
        event = at.event
        before = self._decided.get(event.model)
        if why := self._wrong_figures(event, before):
            self.found.append((event.model, f"spares {list(event.spares)}: {why}", at.revision))
        self._decided[event.model] = event
        if event.model in self._allowed:
            most = self._most(event.model, at.revision)
            self._allowed[event.model] = max(self._allowed[event.model], most)

    def _wrong_figures(self, event: v.SparesDecided, before: v.SparesDecided | None) -> str:
        was = before.spares if before is not None else ()
        if event.was != was:
            return f"was {list(event.was)}, but {list(was)} were"
        wanted = _share(event.workers, self._setting("share_percent"))
        due = max(min(wanted - event.failed, event.workers - event.failed - 1), 0)
        if event.due not in (due, 0):
            return f"{event.due} due, but {due} of {event.workers} with {event.failed} failed"
        if len(set(event.spares)) > event.due:
            return f"more than the {event.due} that are due"
        if {*event.spares} - {*event.was}:
            dwell, since = self._setting("dwell_ticks"), before.since if before is not None else 0
            if min(event.short_ticks, event.since - since) < dwell:
                return f"a new one after {event.short_ticks} ticks, not {dwell}"
        return ""

    def ticked(self, at: Entry) -> None:
        """See `_NOTES`."""
        self._tick = at.event.number
        if not all("version.spares" in settings for settings in self._started.values()):
            self._allowed = {}
            return
        allowed = {model: self._most(model, at.revision) for model in self._decided}
        for model, most in allowed.items():
            if model in self._allowed:
                most = max(most, self._allowed[model])
                spares = [n for n in self._decided[model].spares if self._is_open(n, at.revision)]
                if len(spares) > most:
                    text = f"{spares} are still spares a tick after at most {most} might be"
                    self.found.append((model, text, at.revision))
        self._allowed = allowed

    def _most(self, model: str, revision: int) -> int:
        """How many spares the facts allow at most."""
        share = self._setting("share_percent")
        workers = failed = lost = 0
        for name, worker in self._known.workers.items():
            standing = worker.standing.at(revision)
            if standing.model != model:
                continue
            if standing.present:
                workers += 1
                failed += not _opens(worker, standing, revision)
            elif standing.engine != EnginePhase.NONE and name in self._lost:
                tick, models = self._lost[name]
                is_certain = model in models and self._tick - tick < LOST_TICKS // 2
                workers, failed = workers + is_certain, failed + is_certain
                lost += not is_certain
        counts = range(lost + 1)  # of these, as many may count
        return max(0, *(_share(workers + n, share) - failed - n for n in counts))

    def _is_open(self, name: str, revision: int) -> bool:
        worker = self._known.workers.get(name)
        return worker is not None and _opens(worker, worker.standing.at(revision), revision)

    def _setting(self, name: str) -> int:
        if name in self._changed:
            return self._changed[name]
        recorded = self._started.get(self._leader, {}).get(f"spares.{name}")
        return int(recorded) if recorded is not None else DEFAULTS[name]


def _share(workers: int, percent: int) -> int:
    if percent <= 0 or workers < LEAST_WORKERS:
        return 0
    return max(workers * percent // 100, 1)


def _opens(worker: KnownWorker, standing: Standing, revision: int) -> bool:
    """Whether the worker is open to requests, for all replicas."""
    if standing.engine != EnginePhase.READY or not standing.present or standing.draining:
        return False
    health = worker.health.at(revision)
    if health is not None and health.state in (*EXCLUDED, HealthState.PROBING):
        return False
    return not standing.unreadable


_NOTES: dict[type, Callable[[_Spares, Entry], None]] = {
    v.ReplicaStarted: _Spares.started,
    v.ConfigChanged: _Spares.changed,
    v.LeaderElected: _Spares.elected,
    v.WorkerLost: _Spares.lost,
    v.SparesDecided: _Spares.decided,
    v.Tick: _Spares.ticked,
}
"""What each event of the log means here."""
