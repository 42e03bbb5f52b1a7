"""The same log under another policy or other settings: where it would first differ.

Every recorded decision is repeated by verification's own checks (`verify`), at its basis, on the
recorded history, with the settings given in place of those in the log. Up to the first decision
that comes out differently the history is the one that would have been, so that one is exact. Later
ones are counted each by itself: they answer what was recorded, not what would have followed.

A decision differs when it does something else: another worker, other holders, another way for an
interrupted request to continue, another judgement of silence. Different estimates alone are counted
separately. What the log does not hold cannot be repeated, such as a silence shorter than the recorded
bound. Settings under which it has no decision to repeat (placement none, recovery recompute) are
refused, and so are those of the admission queue, where each answer changes the next question.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from msgspec import Struct, field

from relume.controlplane.replay.answers import Answer
from relume.controlplane.replay.checks.decision_checks import CHECKS, check_route
from relume.controlplane.replay.divergence import Divergence, Verdict
from relume.controlplane.replay.recorded_log import History
from relume.controlplane.replay.verify import NEVER, Replay
from relume.events import vocabulary as v
from relume.policies.checkpoints import checkpoint_settings
from relume.policies.checkpoints.checkpoint_settings import CheckpointConfig
from relume.policies.liveness import stall
from relume.policies.liveness.stall import StallConfig
from relume.policies.migration import migration_settings
from relume.policies.migration.migration_settings import MigrationConfig
from relume.policies.recorded_settings import CHOICES
from relume.policies.routing import choose_worker, routing_settings
from relume.policies.routing.routing_settings import RoutingConfig
from relume.policies.state.fleet import Fleet, dump, load
from relume.policies.state.overlay.view import View

POLICY = routing_settings.POLICY
WEIGHT = "routing.request_tokens"

DEFAULTS: dict[str, str] = {
    **dict(routing_settings.settings_of(RoutingConfig())),
    WEIGHT: str(choose_worker.REQUEST_TOKENS),
    **dict(stall.settings_of(StallConfig())),
    **dict(checkpoint_settings.settings_of(CheckpointConfig())),
    **dict(migration_settings.settings_of(MigrationConfig())),
}
"""What may be set otherwise, with the defaults."""


class BadSetting(ValueError):
    """No such setting, or no such value of it; the text says what there is."""


class Difference(Struct, frozen=True, kw_only=True):
    """A decision with a different result: `recorded` and `other` say what is done, each with its
    alternatives, line by line. `kind`: route, holders, plan, migration, stall. `about` is the
    request, or the engine judged. `revision` and `after` are the basis."""

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


class Outcome(Struct, kw_only=True):
    """`decisions` repeated; `different` do something else, `estimates` differ only in estimates.
    `untaken` ones are left out: this build does not have their version. `first` is the first
    difference in the order of bases; `by_kind` counts them. `broken`: the log itself does not
    replay, and nothing of this holds."""

    settings: dict[str, str]
    decisions: int = 0
    skipped: int = 0
    untaken: dict[str, int] = field(default_factory=dict)
    different: int = 0
    estimates: int = 0
    by_kind: dict[str, int] = field(default_factory=dict)
    first: Difference | None = None
    broken: Divergence | None = None


_FLAGS = (
    ("checkpoint_", "checkpoints."), ("migration_", "migration."), ("stall_", "stall."),
    ("waiting_", "waiting."),
)  # fmt: skip
UNREPEATED = {
    f"{checkpoint_settings.PREFIX}placement": "none",
    f"{checkpoint_settings.PREFIX}recovery": "recompute",
}
"""Settings, and the value under which the log has no decision of theirs."""


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
    if key.startswith("waiting."):
        raise BadSetting(
            f"{key}: each answer of the admission queue changes the next question, which no log "
            "holds; simulate both: relume-chaos run SCENARIO --seed N"
        )
    if key not in DEFAULTS:
        close = difflib.get_close_matches(key, DEFAULTS, 3) or list(DEFAULTS)
        raise BadSetting(f"no setting {given!r}; {', '.join(close)}")
    return key


def what_if(history: History, settings: Mapping[str, str], since: int = 0) -> Outcome:
    """Repeat every decision, with `settings` in force from revision `since` on. Raises BadSetting
    if the log has no decision that they concern."""
    questions = _Questions(dict(settings), since)
    base, verdict = load(dump(history.base or Fleet())), questions.verdict
    replay = Replay(
        list(history.groups), base, questions.checks, questions.view, verdict, queues=False
    )
    replay.run(NEVER, None)
    outcome = verdict.outcome
    outcome.decisions, outcome.skipped = verdict.decisions, verdict.skipped
    outcome.untaken = verdict.untaken
    broken = [d for d in verdict.divergences if d.what != "answer"]
    outcome.broken = min(broken, key=lambda d: d.revision, default=None)
    return outcome


class ChangedView(View):
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
        replacement = self.changed.get(name)
        return super().setting(name, default) if replacement is None else replacement

    def recorded(self, name: str) -> str:
        """The setting as the log has it."""
        return super().setting(name, DEFAULTS[name])


class _WhatIfVerdict(Verdict, kw_only=True):
    """Takes what comes out differently for what other settings do."""

    outcome: Outcome

    def changed(
        self, kind: str, about: str, event: Any, stream: str, position: int,
        recorded: Answer, actual: Answer, what: str = "decision",
    ) -> None:  # fmt: skip
        """Count it, and keep the first that does something else."""
        outcome = self.outcome
        if recorded[0] == actual[0]:
            outcome.estimates += recorded != actual
            return
        outcome.different += 1
        outcome.by_kind[kind] = outcome.by_kind.get(kind, 0) + 1
        found = Difference(
            kind=kind, about=about, stream=stream, position=position,
            revision=event.basis.revision, after=event.basis.position,
            recorded=recorded[0], recorded_estimates=recorded[1],
            other=actual[0], other_estimates=actual[1],
        )  # fmt: skip
        if outcome.first is None or _order(found) < _order(outcome.first):
            outcome.first = found


class _Questions:
    """The questions of a pass over the log."""

    def __init__(self, settings: dict[str, str], since: int) -> None:
        self.checks = {**CHECKS, v.RouteDecided: self._route}
        self.verdict = _WhatIfVerdict(outcome=Outcome(settings=settings))
        self._settings = settings
        self._since = since

    def view(self, stream: str, fleet: Fleet) -> View:
        """A view with the other settings."""
        return ChangedView(stream, fleet, self._settings, self._since)

    def _route(
        self, view: Any, stream: str, position: int, event: v.RouteDecided, verdict: Verdict
    ) -> None:
        policy = view.changed.get(POLICY, "") if event.policy in choose_worker.POLICIES else ""
        with weight(view.changed.get(WEIGHT)):
            check_route(view, stream, position, event, verdict, policy)
        for key, off in UNREPEATED.items():
            if view.changed.get(key, off) != off == view.recorded(key):
                raise BadSetting(f"{key} was {off} here, so the log has no such decision to repeat")


@contextmanager
def weight(value: str | None) -> Iterator[None]:
    """What a held request weighs in routing, for one question."""
    before = choose_worker.REQUEST_TOKENS
    choose_worker.REQUEST_TOKENS = before if value is None else int(value)
    try:
        yield
    finally:
        choose_worker.REQUEST_TOKENS = before


def _order(found: Difference) -> tuple[int, str, int]:
    return found.revision, found.stream, found.position
