"""The same log under another policy or other settings: where it would first go otherwise.

Every recorded decision is asked again at its basis, on the recorded history, with the
settings given in place of those in the log. Up to the first decision that comes out
differently the history is the one that would have been, so that one is exact. Later ones are
counted each by itself: they answer what was recorded, not what would have followed.

A decision differs when it does something else: another worker, other holders, another way
for an interrupted request to go on, another judgement of silence. Other estimates alone are
counted apart. Where the log has no decision because its settings asked none (placement
none, recovery recompute), what would have been asked is put together from the events around
and marked so. What was never observed cannot be asked: a silence shorter than the recorded
bound, for one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

from msgspec import Struct, field

from relume.controlplane.replay import debugger_waiting
from relume.controlplane.replay.debugger_estimates import (
    Answer,
    candidate,
    judged,
    named,
    site,
    way,
)
from relume.controlplane.replay.debugger_waiting import OtherRoom
from relume.controlplane.replay.history import History
from relume.controlplane.replay.verify import NEVER, Divergence, Replay, Verdict, query_of
from relume.events import codec
from relume.events import vocabulary as v
from relume.events.log import RevisionGroup
from relume.policies import (
    checkpoint_settings,
    checkpoints,
    migration,
    migration_settings,
    routing,
    routing_settings,
    stall,
)
from relume.policies.checkpoint_settings import CheckpointConfig
from relume.policies.fleet import SUSPICIOUS
from relume.policies.migration_settings import MigrationConfig
from relume.policies.routing_settings import RoutingConfig
from relume.policies.stall import StallConfig
from relume.policies.state import Fleet, dump, load
from relume.policies.view import View

POLICY = routing_settings.POLICY
WEIGHT = "routing.request_tokens"

DEFAULTS: dict[str, str] = {
    **dict(routing_settings.settings_of(RoutingConfig())),
    WEIGHT: str(routing.REQUEST_TOKENS),
    **dict(stall.settings_of(StallConfig())),
    **dict(checkpoint_settings.settings_of(CheckpointConfig())),
    **dict(migration_settings.settings_of(MigrationConfig())),
    **debugger_waiting.DEFAULTS,
}
"""What may be set otherwise, with the defaults."""

CHOICES: dict[str, tuple[str, ...]] = {
    **routing_settings.CHOICES,
    **{key: tuple(values) for key, values in checkpoint_settings.CHOICES.items()},
    **{key: tuple(values) for key, values in migration_settings.CHOICES.items()},
}


class BadSetting(ValueError):
    """No such setting, or no such value of it; the text says what there is."""


class Difference(Struct, frozen=True):
    """A decision that comes out differently: `recorded` and `other` say what is done, each
    with what it weighed, line by line. `kind`: route, holders, plan, migration, stall, waiting.
    `about` is the request, or the engine judged. `revision` and `after` are the basis. `asked`:
    False when the log has no such decision, and the question is put together."""

    kind: str
    about: str
    revision: int
    after: int
    stream: str
    position: int
    recorded: str
    other: str
    recorded_estimates: tuple[str, ...]
    other_estimates: tuple[str, ...]
    asked: bool = True


class Outcome(Struct):
    """`decisions` asked again; `different` do something else, `estimates` only weigh
    otherwise. `first` is the first difference in the order of bases; `by_kind` counts them.
    `broken`: the log itself does not replay, and nothing of this holds."""

    settings: dict[str, str]
    decisions: int = 0
    skipped: int = 0
    different: int = 0
    estimates: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    first: Difference | None = None
    broken: Divergence | None = None


_FLAGS = (
    ("checkpoint_", "checkpoints."), ("migration_", "migration."), ("stall_", "stall."),
    ("waiting_", "waiting."),
)  # fmt: skip


def parse(words: list[str]) -> dict[str, str]:
    """KEY=VALUE words as settings. A key may be written as the flag of `relume serve` is
    (checkpoint-recovery). Raises BadSetting."""
    found = {}
    for word in words:
        key, equals, value = word.partition("=")
        key = _key(key)
        if not equals:
            raise BadSetting(f"{word!r}: write KEY=VALUE")
        if key in CHOICES:
            if value not in CHOICES[key]:
                raise BadSetting(f"{key} takes {', '.join(CHOICES[key])}")
        elif not value.isdecimal():
            raise BadSetting(f"{key} takes a whole number")
        found[key] = value
    if not found:
        raise BadSetting(f"nothing to change: write KEY=VALUE, of {', '.join(DEFAULTS)}")
    return found


def _key(given: str) -> str:
    key = given.strip().lstrip("-").replace("-", "_")
    for begin, group in _FLAGS:
        if key.startswith(begin):
            key = group + key.removeprefix(begin)
    key = {"policy": POLICY, "request_tokens": WEIGHT}.get(key, key)
    if key not in DEFAULTS:
        close = difflib.get_close_matches(key, DEFAULTS, 3) or list(DEFAULTS)
        raise BadSetting(f"no setting {given!r}; {', '.join(close)}")
    return key


def what_if(history: History, settings: Mapping[str, str], since: int = 0) -> Outcome:
    """Ask every decision again, with `settings` in force from revision `since` on."""
    asked = _Asked(history.groups, dict(settings), since)
    base = load(dump(history.base or Fleet()))
    replay = Replay(list(history.groups), base, asked.checks, asked.view, asked.room)
    replay.run(NEVER, None)
    outcome = asked.outcome
    outcome.skipped = replay.verdict.skipped
    broken = [d for d in replay.verdict.divergences if d.what != "answer"]
    outcome.broken = min(broken, key=lambda d: d.revision, default=None)
    return outcome


def _whole(view: View, query: routing.Query, policy: str) -> routing.Choice:
    """A decision that names every worker."""
    return routing.RECORDED[policy](view, query)


class OtherView(View):
    """A view that shows other settings than the log has."""

    def __init__(self, stream: str, fleet: Fleet, settings: dict[str, str], since: int) -> None:
        super().__init__(stream, fleet)
        self.settings = settings
        self._since = since

    @property
    def changed(self) -> dict[str, str]:
        """The settings that are other than the log's here."""
        return self.settings if self.fleet.revision >= self._since else {}

    def setting(self, name: str, default: str) -> str:
        """See View.setting."""
        told = self.changed.get(name)
        return super().setting(name, default) if told is None else told

    def recorded(self, name: str) -> str:
        """The setting as the log has it."""
        return super().setting(name, DEFAULTS[name])


class _Asked:
    """The questions and what came of them."""

    def __init__(self, groups: list[RevisionGroup], settings: dict[str, str], since: int) -> None:
        self.outcome = Outcome(settings)
        self.checks = {
            v.RouteDecided: self._route,
            v.HolderChosen: self._holders,
            v.RecoveryPlanned: self._plan,
            v.MigrationPlanned: self._migration,
            v.StallJudged: self._stall,
        }
        self._settings = settings
        self._since = since
        self._planned: set[tuple[str, str, int]] = set()
        self._rooms = bool(set(settings) & set(debugger_waiting.DEFAULTS))
        if self._rooms:
            self.checks |= {v.RequestHeld: _in_room, v.RequestShed: _in_room}
        unasked = {f"{checkpoint_settings.PREFIX}{name}" for name in ("placement", "recovery")}
        self._log = _Around(groups if unasked & set(settings) else [])

    def view(self, stream: str, fleet: Fleet) -> View:
        """A view with the other settings."""
        return OtherView(stream, fleet, self._settings, self._since)

    def room(self, view: View, verdict: Verdict) -> OtherRoom | None:
        """What follows the waiting room of a view, where its settings are others."""
        return OtherRoom(view, partial(self._note, "waiting")) if self._rooms else None

    def _note(
        self, kind: str, about: str, event: Any, stream: str, position: int,
        recorded: Answer, other: Answer,
        asked: bool = True, counted: bool = True,
    ) -> None:  # fmt: skip
        outcome = self.outcome
        outcome.decisions += asked and counted
        if recorded[0] == other[0]:
            outcome.estimates += recorded[1] != other[1]
            return
        outcome.different += 1
        outcome.by_kind[kind] = outcome.by_kind.get(kind, 0) + 1
        basis = event.basis
        found = Difference(
            kind, about, basis.revision, basis.position, stream, position,
            recorded[0], other[0], recorded[1], other[1], asked,
        )  # fmt: skip
        if outcome.first is None or _order(found) < _order(outcome.first):
            outcome.first = found

    def _route(
        self, view: Any, stream: str, position: int, event: v.RouteDecided, verdict: Verdict
    ) -> None:
        policy = event.policy
        view.now_us = event.at_us
        if policy in routing.POLICIES:
            policy = view.changed.get(POLICY, policy)
        with weight(view.changed.get(WEIGHT)):
            decide = routing.decide if event.others else _whole
            choice = decide(view, query_of(event), policy)
        recorded = f"{event.worker}:{event.incarnation}" if event.worker else "nobody"
        other = f"{choice.worker}:{choice.incarnation}" if choice.worker else "nobody"
        self._note(
            "route", event.request, event, stream, position,
            (recorded, tuple(map(candidate, event.candidates))),
            (other, tuple(map(candidate, choice.candidates))),
        )  # fmt: skip
        self._unplaced(view, stream, position, event)
        self._unplanned(view, stream, position, event)

    def _holders(
        self, view: Any, stream: str, position: int, event: v.HolderChosen, verdict: Verdict
    ) -> None:
        placed, _ = checkpoints.place(view, event.request, event.primary, event.expected_blocks)
        self._note(
            "holders", event.request, event, stream, position,
            (named(event.holders), tuple(map(site, event.candidates))),
            (named(placed.holders), tuple(map(site, placed.candidates))),
        )  # fmt: skip

    def _plan(
        self, view: Any, stream: str, position: int, event: v.RecoveryPlanned, verdict: Verdict
    ) -> None:
        lost = [checkpoints.Lost(c.request, c.attempt, c.tokens, c.avoid) for c in event.choices]
        choices = checkpoints.plan(view, event.worker, event.incarnation, lost)
        others = {choice.request: choice for choice in choices}
        self.outcome.decisions -= len(event.choices) - 1  # one decision, however many requests
        for recorded in event.choices:
            self._note(
                "plan", recorded.request, event, stream, position,
                way(recorded), way(others.get(recorded.request)),
            )  # fmt: skip

    def _migration(
        self, view: Any, stream: str, position: int, event: v.MigrationPlanned, verdict: Verdict
    ) -> None:
        running = [
            migration.Running(c.request, c.attempt, c.tokens, c.left, c.avoid)
            for c in event.choices
        ]
        others: dict[str, v.MigrationChoice] = {}
        if (event.worker, event.cause) in migration.sources(view):
            place = event.worker, event.incarnation
            planned = migration.plan(view, event.cause, *place, running)
            others = {choice.request: choice for choice in planned}
        self.outcome.decisions -= len(event.choices) - 1  # as above
        for recorded in event.choices:
            other = way(others[recorded.request]) if others else ("it stays", ())
            self._note("migration", recorded.request, event, stream, position, way(recorded), other)

    def _stall(
        self, view: Any, stream: str, position: int, event: v.StallJudged, verdict: Verdict
    ) -> None:
        config = stall.config_of(view)
        worker = view.fleet.workers.get(event.worker)
        bound = stall.bound_us(worker, config) if worker is not None else -1
        look = stall.Look(
            event.probe, event.probe_steps, event.step_age_us, event.cpu_us, event.held
        )
        hung = stall.hung(event.silent_us, look, bound, config)
        self._note(
            "stall", f"{event.worker}:{event.incarnation}", event, stream, position,
            (judged(event.hung), (f"silent {event.silent_us} us of {event.bound_us} us allowed",)),
            (judged(hung), (f"silent {event.silent_us} us of {bound} us allowed",)),
        )  # fmt: skip

    # --- what the recorded settings never asked ------------------------------------------

    def _unplaced(self, view: Any, stream: str, position: int, event: v.RouteDecided) -> None:
        """A dispatch that had no holders because placement was none."""
        key = f"{checkpoint_settings.PREFIX}placement"
        if not event.worker or view.changed.get(key, "none") == "none":
            return
        arrival = self._log.arrivals.get(event.request)
        if view.recorded(key) != "none" or arrival is None:
            return
        if not checkpoints.takes_part(view, event.worker):
            return
        tokens = event.prompt_tokens + event.delivered
        left = max(arrival.max_tokens - event.delivered, 1) if arrival.max_tokens else 0
        worker = view.fleet.workers[event.worker]
        blocks = checkpoints.expected_blocks(
            worker, tokens, left, checkpoint_settings.config_of(view)
        )
        placed, _ = checkpoints.place(view, event.request, event.worker, blocks)
        self._note(
            "holders", event.request, event, stream, position, ("nobody", ()),
            (named(placed.holders), tuple(map(site, placed.candidates))), asked=False,
        )  # fmt: skip

    def _unplanned(self, view: Any, stream: str, position: int, event: v.RouteDecided) -> None:
        """A failure that was not planned because recovery was recompute."""
        key = f"{checkpoint_settings.PREFIX}recovery"
        if view.changed.get(key, "recompute") == "recompute" or view.recorded(key) != "recompute":
            return
        place = self._log.lost.get((stream, event.request, event.attempt - 1))
        if place is None or (stream, *place) in self._planned:
            return
        self._planned.add((stream, *place))
        failed = f"{place[0]}:{place[1]}"
        lost = []
        for seen, arrival in self._log.interrupted[stream, *place]:
            tokens = checkpoints.tokens_lost(
                view, seen.request, arrival.prompt_tokens, seen.delivered
            )
            lost.append(checkpoints.Lost(seen.request, seen.attempt, tokens, (failed,)))
        for choice in checkpoints.plan(view, *place, lost):
            self._note(
                "plan", choice.request, event, stream, position,
                ("no plan", ()), way(choice), asked=False,
            )  # fmt: skip


def _in_room(view: View, stream: str, position: int, event: Any, verdict: Verdict) -> None:
    """What `OtherRoom` looks at."""


class _Around:
    """What the log tells around decisions that are missing: arrivals, and what each failure
    interrupted, by stream and engine."""

    def __init__(self, groups: list[RevisionGroup]) -> None:
        self.arrivals: dict[str, v.RequestArrived] = {}
        self.lost: dict[tuple[str, str, int], tuple[str, int]] = {}
        self.interrupted: dict[
            tuple[str, str, int], list[tuple[v.TransportObserved, v.RequestArrived]]
        ] = {}
        for group in groups:
            for segment in group.segments:
                if segment.stream.startswith("r."):
                    for event in codec.decode_all(segment.records):
                        self._take(segment.stream, event)

    def _take(self, stream: str, event: Any) -> None:
        if type(event) is v.RequestArrived:
            self.arrivals[event.request] = event
        elif type(event) is v.TransportObserved and event.kind in SUSPICIOUS:
            arrival = self.arrivals.get(event.request)
            if arrival is not None:
                place = event.worker, event.incarnation
                self.lost[stream, event.request, event.attempt] = place
                self.interrupted.setdefault((stream, *place), []).append((event, arrival))


@contextmanager
def weight(value: str | None) -> Iterator[None]:
    """What a held request weighs in routing, for one question."""
    kept = routing.REQUEST_TOKENS
    routing.REQUEST_TOKENS = kept if value is None else int(value)
    try:
        yield
    finally:
        routing.REQUEST_TOKENS = kept


def _order(found: Difference) -> tuple[int, str, int]:
    return found.revision, found.stream, found.position
