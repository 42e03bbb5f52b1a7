"""I16: every admin change is in the log with its principal; resent, it changes nothing more. One that
waited for the log changes nothing: it stands under a new epoch of its replica's stream, before the replica
says that it is back. Builds whose decisions `leader` have a version below 3 carry it out.

The restart of an engine that the leader quarantined is its own decision, not an operator's change, and
so are the canaries of engines that answer a request differently. A rolling restart restarts the workers
of its present step, and has their canaries sent, by the one command that began it. A level of degradation
limits the batches of engines at a tick.

`sent` is the operator's own record: (command id, principal) of every acknowledged change.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from relume.chaos.validators.records import ClientRecord, Entry, Violation, events_of
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import AdminCommand, EffectKind, HealthState, RolloutStage

PROMISE = "I16"
LEAST_VERSION = 3
"""Of the decisions `leader`, since which what waited for the log is refused."""
_BESIDE = (RolloutStage.PAUSED, RolloutStage.RESUMED)
_EFFECTS = {RolloutStage.RESTARTING: "restart", RolloutStage.CHECKING: "canary"}


def check(
    groups: Sequence[RevisionGroup],
    clients: Sequence[ClientRecord],
    sent: Iterable[tuple[str, str]] = (),
) -> list[Violation]:
    """Commands without principal, commands answered more than once or never, and changes without a
    command."""
    out: list[Violation] = []
    commands: dict[str, v.AdminCommanded] = {}
    answers: dict[str, int] = {}
    own, spools, late = _OwnDecisions(), _Spools(), dict[str, int]()
    elected = 0
    for at in events_of(groups):
        event = at.event
        own.saw(event)
        spools.saw(at)
        if type(event) is v.AdminCommanded:
            if event.command_id not in commands and at.stream in spools.landing:
                late[event.command_id] = at.revision
            first = commands.setdefault(event.command_id, event)
            out += _command_errors(at.revision, event, first)
        elif type(event) is v.LeaderElected:
            elected = at.revision
        elif type(event) in (v.EffectsDecided, v.ConfigChanged):
            if getattr(event, "again", -1) >= 0 or own.has(event):
                continue
            name = event.decision
            if name not in commands:
                text = f"{type(event).__name__} without a command"
                out.append(Violation(PROMISE, name, text, at.revision))
            # A new leader answers a command to resign: its addressee leads no more.
            is_over = (
                name in late
                and commands[name].command == AdminCommand.RESIGN
                and elected > late[name]
            )
            if name in late and (type(event) is v.EffectsDecided or event.key) and not is_over:
                text = "was carried out although it waited for the log"
                out.append(Violation(PROMISE, name, text, at.revision))
            answers[name] = answers.get(name, 0) + 1
    for name in commands:
        if answers.get(name, 0) != 1:
            text = f"was carried out {answers.get(name, 0)} times"
            out.append(Violation(PROMISE, name, text))
    return out + _acknowledged(commands, sent)


class _Spools:
    """`landing`: streams of replicas that have a new epoch and do not say yet that they are back."""

    def __init__(self) -> None:
        self.landing: set[str] = set()
        self._epochs: dict[str, int] = {}
        self._versions: dict[str, int] = {}
        self._ended: set[str] = set()

    def saw(self, at: Entry) -> None:
        """Take one event, before it is judged."""
        event, stream = at.event, at.stream
        if not stream.startswith("r."):
            if type(event) is v.ReplicaLost:
                self._ended.add(f"r.{event.replica}")
            return
        if self._epochs.setdefault(stream, at.epoch) != at.epoch and self._all_refuse:
            self.landing.add(stream)
        self._epochs[stream] = at.epoch
        if type(event) is v.ReplicaStarted:
            settings = dict(event.settings)
            self._versions[stream] = int(settings.get("version.leader", "") or 1)
        if type(event) in (v.ReplicaStarted, v.StreamResumed):
            self.landing.discard(stream)
            self._ended.discard(stream)
        elif type(event) is v.ReplicaStopped:
            self._ended.add(stream)

    @property
    def _all_refuse(self) -> bool:
        living = self._versions.keys() - self._ended or self._versions.keys()
        return all(self._versions[stream] >= LEAST_VERSION for stream in living)


class _OwnDecisions:
    """Effects that no command asks for one by one."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._corrupt: set[str] = set()
        self._rollouts: set[str] = set()
        self._rolling: tuple[str, ...] = ()
        self._tick = 0

    def saw(self, event: Any) -> None:
        if type(event) is v.HealthDecided and event.state == HealthState.QUARANTINED:
            self._names.add(f"quarantine.{event.worker}.{event.incarnation}")
            self._corrupt.add(f"prefixes.{event.worker}.")
        elif type(event) is v.Tick:
            self._tick = event.number
        elif type(event) is v.CrossChecked and event.differs >= 0:
            self._names.add(f"dispute.{event.decision}")
        elif type(event) is v.AdminCommanded and event.command == AdminCommand.ROLLOUT:
            self._rollouts.add(event.command_id)
        elif type(event) is v.RolloutDecided and event.stage not in _BESIDE:
            kind = _EFFECTS.get(event.stage, "")
            names = event.workers if kind and event.rollout in self._rollouts else ()
            self._rolling = tuple(f"{event.rollout}.{kind}.{name}." for name in names)

    def has(self, event: v.EffectsDecided | v.ConfigChanged) -> bool:
        decision = event.decision
        if type(event) is v.EffectsDecided and decision == f"batch.{self._tick}":
            return all(effect.kind == EffectKind.LIMIT_BATCH for effect in event.effects)
        if type(event) is v.EffectsDecided and decision.startswith(tuple(self._corrupt)):
            return all(effect.kind == EffectKind.RESET_PREFIX_CACHE for effect in event.effects)
        return decision in self._names or decision.startswith(self._rolling)


def _command_errors(
    revision: int, event: v.AdminCommanded, first: v.AdminCommanded
) -> Iterator[Violation]:
    """Errors of a command. `first`: the first one with its id."""
    if not event.principal:
        yield Violation(PROMISE, event.command_id, "has no principal", revision)
    if first != event:
        yield Violation(PROMISE, event.command_id, "was resent as another command", revision)


def _acknowledged(
    commands: Mapping[str, v.AdminCommanded], sent: Iterable[tuple[str, str]]
) -> list[Violation]:
    out = []
    for name, principal in sent:
        command = commands.get(name)
        if command is None:
            out.append(Violation(PROMISE, name, "was acknowledged and is not in the log"))
        elif command.principal != principal:
            text = f"was {principal}'s, the log says {command.principal}'s"
            out.append(Violation(PROMISE, name, text))
    return out
