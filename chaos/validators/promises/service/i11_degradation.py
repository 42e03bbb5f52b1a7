"""I11: degradation is monotone in capacity, with hysteresis, and touches only what its level says.

Each `DegradationDecided` is judged by arithmetic of its own, from the log:

- its level follows from the share of the demand that its capacity serves, rises to what that makes
  due, falls by one only, with a margin, and both after the time that the settings in force give;
- of two decisions from one level, the one whose capacity serves more of its demand has no higher
  level; of two with equal demand that is the one with more capacity;
- its demand is the number of requests that arrived within the window, whoever was refused.

A refusal because of a level, and a limit of output tokens, must have a level that imposes it, as the
replica knew it at the basis of its decision; and no request may be served, or queued, on arrival that
such a level refuses. A run in which no level changed has nothing of this to break. Batches of engines
are judged by `i11_batches`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

from relume.chaos.validators.history import History
from relume.chaos.validators.promises.service import i11_batches
from relume.chaos.validators.records import ClientRecord, Entry, Violation, events_of, log_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import RouteCause, ShedReason, Tier

PROMISE = "I11"
DUE_PERCENT = ((25, 4), (50, 3), (75, 2), (100, 1))
"""Of the demand: below so much a level is due, the highest first."""
MARGIN_PERCENT = 10
LEAST_FOR_BATCH, LEAST_FOR_ALL = 2, 4
"""Levels from which requests of the batch tier, and all requests, are refused."""
DEFAULTS = {"mode": "off", "window_ticks": "20", "rise_ticks": "3", "fall_ticks": "15"}


def check(groups: Sequence[RevisionGroup], clients: Sequence[ClientRecord]) -> list[Violation]:
    """Decisions about levels that do not follow, and requests that a level does not explain."""
    watch = _Levels()
    for at in events_of(log_of(groups)):
        if (note := _NOTES.get(type(at.event))) is not None:
            note(watch, at)
    watch.compare()
    return watch.found + i11_batches.check(groups)


class _Settings:
    """Settings in force, of the fleet and of each replica at its start."""

    def __init__(self) -> None:
        self._changed: dict[str, History[str]] = {}
        self._started: dict[str, Mapping[str, str]] = {}

    @property
    def all_follow(self) -> bool:
        """Whether every replica that started knows levels."""
        return all("version.degradation" in settings for settings in self._started.values())

    def start(self, replica: str, settings: Mapping[str, str]) -> None:
        """A replica started with these."""
        self._started[replica] = settings

    def change(self, revision: int, key: str, value: str) -> None:
        """An operator changed one."""
        self._changed.setdefault(key, History("")).set(revision, value)

    def of(self, replica: str, name: str, revision: int) -> str:
        """A setting of degradation as `replica` has it at a revision."""
        key = f"degradation.{name}"
        changed = self._changed[key].at(revision) if key in self._changed else ""
        return changed or self._started.get(replica, {}).get(key, DEFAULTS[name])


class _Levels:
    """Levels by model, the ticks, and the arrivals until each of them."""

    def __init__(self) -> None:
        self.found: list[Violation] = []
        self._settings = _Settings()
        self._leader = ""
        self._levels: dict[str, History[int]] = {}
        self._decided: dict[str, list[v.DegradationDecided]] = {}
        self._arrived: dict[str, int] = {}
        self._ticks: dict[int, tuple[int, dict[str, int]]] = {}
        self._looked: set[str] = set()
        """Requests that passed their admission already."""

    # --- what the log says

    def started(self, at: Entry) -> None:
        """See `_NOTES`."""
        self._settings.start(at.event.replica, dict(at.event.settings))

    def changed(self, at: Entry) -> None:
        """See `_NOTES`."""
        self._settings.change(at.revision, at.event.key, at.event.value)

    def elected(self, at: Entry) -> None:
        """See `_NOTES`."""
        self._leader = at.event.replica

    def ticked(self, at: Entry) -> None:
        """See `_NOTES`."""
        self._ticks[at.event.number] = at.event.unix_ms, dict(self._arrived)

    def arrived(self, at: Entry) -> None:
        """See `_NOTES`."""
        event = at.event
        self._arrived[event.model] = self._arrived.get(event.model, 0) + 1
        if event.output_limit and not any(d.level for d in self._decided.get(event.model, ())):
            self._wrong(event.request, "its output was limited, and no level was decided", at)

    # --- decisions

    def decided(self, at: Entry) -> None:
        """A level was decided: judge it, and have it hold from here on."""
        event = at.event
        before = self._decided.setdefault(event.model, [])
        was = before[-1].level if before else 0
        if event.was != was or event.level == was:
            self._wrong(event.model, f"level {event.was} -> {event.level}, but it was {was}", at)
        elif why := self._unsound(event, at.revision) or self._too_soon(event, at.revision):
            self._wrong(event.model, f"level {was} -> {event.level}: {why}", at)
        before.append(event)
        self._levels.setdefault(event.model, History(0)).set(at.revision, event.level)

    def _unsound(self, event: v.DegradationDecided, revision: int) -> str:
        """Why the level does not follow from its figures."""
        if event.share < 0:
            ends = event.due_ticks < 0 and event.level == 0
            return "" if ends or event.level == event.was - 1 else "its figures are unknown"
        if event.demand_per_ks > 0:
            share = min(1000 * event.usable_per_ks // event.demand_per_ks, 1_000_000)
            if share != event.share:
                return f"{event.share} thousandths of the demand, which are {share}"
        if event.usable_per_ks > event.requests_per_ks or (
            event.usable_per_ks and not event.workers
        ):
            return "more counts as capacity than there is"
        if why := self._other_demand(event, revision):
            return why
        if event.level > event.was:
            due = _due(event.share)
            return "" if due == event.level else f"level {due} was due"
        if event.level != event.was - 1:
            return "it fell by more than one"
        with_margin = _due(event.share * (100 - MARGIN_PERCENT) // 100)
        return "" if with_margin < event.was else f"with the margin level {with_margin} was due"

    def _other_demand(self, event: v.DegradationDecided, revision: int) -> str:
        """Why the demand is not what arrived within the window."""
        window = int(self._settings.of(self._leader, "window_ticks", revision))
        end, begin = self._ticks.get(event.since), self._ticks.get(event.since - window)
        if end is None or begin is None:
            return "its window is not in the log"
        count = end[1].get(event.model, 0) - begin[1].get(event.model, 0)
        demand = count * 1_000_000 // max(end[0] - begin[0], 1)
        if demand == event.demand_per_ks:
            return ""
        return f"a demand of {event.demand_per_ks}, but {demand} requests in 1000 s arrived"

    def _too_soon(self, event: v.DegradationDecided, revision: int) -> str:
        """Why the level changed before its time."""
        if event.due_ticks < 0:
            is_on = self._settings.of(self._leader, "mode", revision) != "off"
            return "levels are still decided" if is_on and self._settings.all_follow else ""
        name = "rise_ticks" if event.level > event.was else "fall_ticks"
        least = int(self._settings.of(self._leader, name, revision))
        before = self._decided.get(event.model)
        since = event.since - before[-1].since if before else least
        if min(event.due_ticks, since) < least:
            return f"after {min(event.due_ticks, since)} ticks, not {least}"
        return ""

    def compare(self) -> None:
        """Judge the decisions from each level together."""
        for model, decisions in self._decided.items():
            for was in range(LEAST_FOR_ALL + 1):
                from_one = [d for d in decisions if d.was == was and d.share >= 0]
                from_one.sort(key=lambda d: (d.share, -d.level))
                for less, more in pairwise(from_one):
                    if more.level > less.level:
                        text = (
                            f"level {was} -> {more.level} with {more.share} thousandths of the demand "
                            f"served, and -> {less.level} with {less.share}"
                        )
                        self.found.append(Violation(PROMISE, model, text))

    # --- requests

    def shed(self, at: Entry) -> None:
        """A request was refused."""
        event = at.event
        if event.reason == ShedReason.DEGRADED and not self._refuses(at):
            level = self._level_at(event.model, event.basis.revision)
            text = f"refused for its level, which was {level} (tier {event.tier})"
            self._wrong(event.request, text, at)
        self._looked.add(event.request)

    def queued(self, at: Entry) -> None:
        """A request was queued."""
        self._admitted(at, "queued")

    def routed(self, at: Entry) -> None:
        """A request was dispatched, or found no worker."""
        event = at.event
        if event.cause == RouteCause.ARRIVAL and event.attempt <= 1:
            self._admitted(at, "sent to a worker" if event.worker else "accepted")

    def _admitted(self, at: Entry, what: str) -> None:
        event = at.event
        if event.request not in self._looked and self._refuses(at):
            level = self._level_at(event.model, event.basis.revision)
            text = f"{what}, although level {level} refuses tier {event.tier or 'standard'}"
            self._wrong(event.request, text, at)
        self._looked.add(event.request)

    def _refuses(self, at: Entry) -> bool:
        """Whether the level that the basis of a replica's decision knows refuses the request."""
        event, revision = at.event, at.event.basis.revision
        if self._settings.of(at.stream[2:], "mode", revision) != "on":
            return False
        level = self._level_at(event.model, revision)
        is_batch = event.tier == Tier.BATCH and level >= LEAST_FOR_BATCH
        return is_batch or level >= LEAST_FOR_ALL

    def _level_at(self, model: str, revision: int) -> int:
        return self._levels[model].at(revision) if model in self._levels else 0

    def _wrong(self, about: str, text: str, at: Entry) -> None:
        self.found.append(Violation(PROMISE, about, text, at.revision))


def _due(share: int) -> int:
    """The level that this share of the demand, in thousandths, makes due."""
    return next((level for percent, level in DUE_PERCENT if share < 10 * percent), 0)


_NOTES: dict[type, Callable[[_Levels, Entry], None]] = {
    v.ReplicaStarted: _Levels.started,
    v.ConfigChanged: _Levels.changed,
    v.LeaderElected: _Levels.elected,
    v.Tick: _Levels.ticked,
    v.RequestArrived: _Levels.arrived,
    v.DegradationDecided: _Levels.decided,
    v.RequestShed: _Levels.shed,
    v.RequestHeld: _Levels.queued,
    v.RouteDecided: _Levels.routed,
}
"""What each event of the log means here."""
