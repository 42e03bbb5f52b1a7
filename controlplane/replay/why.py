"""Why a request went where it went: its causes, in the order of the log.

`why(groups, request)` collects the request's arrival, each decision with its basis and
what the others would have cost, what its engines reported, what its gateway saw, and its end; and
between these, what happened to the engines that held it: a death, a judgement of silence, a lost
lease. A decision that its gateway had no time to write comes from the journal: it travelled with
the request, and the engine's admission carries it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
from msgspec import Struct, field

from relume.controlplane.replay.first_tokens import FirstTokens
from relume.events import vocabulary as v
from relume.events.log import codec
from relume.events.log.entries import Entry, entries
from relume.events.log.errors import LogError
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import (
    AdminCommand,
    Exclusion,
    HealthState,
    RolloutStage,
    RouteCause,
    ShedReason,
    TransportKind,
)

RESPONSE_PREFIXES = ("cmpl-", "chatcmpl-", "resp_")
"""vLLM puts these before the x-request-id in its responses."""


class Step(Struct, frozen=True):
    """One link of the chain. `event` is the record's, or a part of it: one change of an engine
    step, one choice of a plan. `journalled`: the decision is known from the engine's admission
    alone."""

    entry: Entry
    event: Any
    journalled: bool = False


class Why(Struct, kw_only=True):
    """The chain of one request. `ended` is its terminal event, None while it lives.
    `first_tokens_us`: of each attempt, from its decision to its first token, where known."""

    request: str
    arrived: v.RequestArrived | None = None
    ended: v.RequestEnded | None = None
    steps: list[Step] = field(default_factory=list)
    first_tokens_us: dict[int, int] = field(default_factory=dict)

    @property
    def waited_us(self) -> int:
        """From being held to what came of it; -1: it was not, or waits."""
        held = [s.event.at_us for s in self.steps if type(s.event) is v.RequestHeld]
        over = [
            s.event.at_us
            for s in self.steps
            if type(s.event) is v.RequestShed
            or (
                type(s.event) is v.RouteDecided
                and s.event.cause == RouteCause.WAIT_OVER
                and s.event.worker
            )
        ]
        return over[0] - held[0] if held and over else -1

    @property
    def decisions(self) -> list[v.RouteDecided]:
        """Its decisions, journalled ones included, in order."""
        return [s.event for s in self.steps if type(s.event) is v.RouteDecided]


def why(groups: Iterable[RevisionGroup], request: str) -> Why | None:
    """The chain of `request`: our id of it, or an id the client knows (its x-request-id,
    of which the latest counts, or the id of the response). None: not in this log.

    Raises UnknownEvent, MalformedRecord.
    """
    groups = list(groups)
    name = _our_id(groups, request)
    if not name:
        return None
    found = ChainCollector(name)
    for entry in entries(groups):
        found.take(entry)
    return found.result()


def _our_id(groups: list[RevisionGroup], given_id: str) -> str:
    """The request meant; empty when there is none."""
    known = {given_id, *(given_id.removeprefix(p) for p in RESPONSE_PREFIXES)}
    of_client = ""
    for group in groups:
        for segment in group.segments:
            if segment.stream[0] == "w" and not _mentions(segment.records, known):
                continue
            for event in codec.decode_all(segment.records):
                kind = type(event)
                if kind is v.RequestArrived or kind is v.RouteDecided:
                    if event.request in known:
                        return event.request
                    if kind is v.RequestArrived and event.client_id in known:
                        of_client = event.request
                elif kind is v.EngineStep:
                    for change in event.changes:
                        if change.request in known and change.attempt:
                            return change.request
    return of_client


def _mentions(records: Iterable[bytes], names: set[str]) -> bool:
    wanted = [name.encode() for name in names]
    return any(name in record for record in records for name in wanted)


class ChainCollector:
    """Takes the events of the log in order, keeps what concerns one request."""

    def __init__(self, request: str) -> None:
        self._why = Why(request=request)
        self._holders: dict[tuple[str, int], int] = {}
        self._cut: set[tuple[str, int]] = set()
        self._health: dict[str, Step] = {}
        """The latest decision about each worker's health, unless the chain has it."""
        self._weights: dict[str, Step] = {}
        """The latest comparison of the model files of each worker in quarantine, unless the chain has it."""
        self._drains: dict[str, Step] = {}
        """Why each worker drains, the latest command or its agent's stop, unless the chain has it."""
        self._levels: dict[str, Step] = {}
        """The latest decision about each model's level."""
        self._owner = ""
        self._journal: dict[int, Step] = {}
        self._first = FirstTokens(self._why.first_tokens_us)

    def take(self, entry: Entry) -> None:
        """The next event of the log."""
        event = entry.event
        kind = type(event)
        if kind is v.ReplicaStarted:
            self._first.received(entry.stream, event)
        if kind is v.EngineStep:
            for change in event.changes:
                if change.request == self._why.request:
                    self._changed(entry, event, change)
        elif kind is v.WeightsCompared:
            self._weights[event.worker] = Step(entry, event)
        elif kind is v.HealthDecided:
            self._health[event.worker] = Step(entry, event)
            if event.state != HealthState.QUARANTINED:
                self._weights.pop(event.worker, None)
            if self._why.ended is None and self._befell(event):
                self._why.steps.append(self._health.pop(event.worker))
        elif kind is v.AdminCommanded:
            self._commanded(entry, event)
        elif kind is v.RolloutDecided:
            if event.stage == RolloutStage.DRAINING:
                self._drains |= {name: Step(entry, event) for name in event.workers}
        elif kind is v.WorkerLeaving:
            self._drains[event.worker] = Step(entry, event)
        elif kind is v.WorkerRegistered:
            if (step := self._drains.get(event.worker)) and type(step.event) is v.WorkerLeaving:
                del self._drains[event.worker]
        elif kind is v.DegradationDecided:
            self._levels[event.model] = Step(entry, event)
        elif kind is v.GroupsReceived:
            self._first.received(entry.stream, event)
        elif kind in OF_REQUEST:
            if event.request == self._why.request:
                self._of_request(entry, event)
        elif kind in _BESIDE:
            if event.request == self._why.request:
                self._add(entry, event)
        elif kind is v.RecoveryPlanned or kind is v.MigrationPlanned:
            if any(c.request == self._why.request for c in event.choices):
                self._say_why_drained(event.worker)
                self._add(entry, _only(event, self._why))
        elif self._why.ended is None and self._befell(event):
            self._add(entry, event)

    def _add(self, entry: Entry, event: Any) -> None:
        self._why.steps.append(Step(entry, event))

    def _commanded(self, entry: Entry, event: v.AdminCommanded) -> None:
        if event.command == AdminCommand.DRAIN:
            self._drains[event.target] = Step(entry, event)
        elif event.command == AdminCommand.UNDRAIN:
            self._drains.pop(event.target, None)

    def _say_why_drained(self, worker: str) -> None:
        if worker in self._drains:
            self._why.steps.append(self._drains.pop(worker))

    def _say_what_excludes(self, worker: str) -> None:
        for known in (self._health, self._weights):
            if worker in known:
                self._why.steps.append(known.pop(worker))

    def _of_request(self, entry: Entry, event: Any) -> None:
        found = self._why
        if type(event) is v.RequestArrived:
            found.arrived = event
            if event.output_limit:
                self._add_level(event.model)
            self._owner = entry.stream[2:]
        elif type(event) is v.RequestShed and event.reason == ShedReason.DEGRADED:
            self._add_level(event.model)
        elif type(event) is v.ClientReturned:
            self._owner = entry.stream[2:]
        elif type(event) is v.RouteDecided:
            self._owner = self._owner or entry.stream[2:]
            self._first.decided(entry.stream, event)
            self._journal.pop(event.attempt, None)
            for candidate in event.candidates:
                if candidate.excluded == Exclusion.DRAINING:
                    self._say_why_drained(candidate.worker)
                if candidate.excluded in _BY_HEALTH:
                    self._say_what_excludes(candidate.worker)
            if event.worker:
                self._holders[event.worker, event.incarnation] = event.attempt
        elif type(event) is v.TransportObserved:
            self._holders.pop((event.worker, event.incarnation), None)
            if event.kind != TransportKind.MOVED:
                self._cut.add((event.worker, event.incarnation))
        elif type(event) is v.RequestEnded:
            found.ended = event
        self._add(entry, event)

    def _add_level(self, model: str) -> None:
        """The decision by which the request was limited or refused, unless the chain has it."""
        if (step := self._levels.pop(model, None)) is not None:
            self._why.steps.append(step)

    def _changed(self, entry: Entry, event: v.EngineStep, change: Any) -> None:
        self._holders.setdefault((entry.stream[2:], event.incarnation), change.attempt)
        if type(change) is v.FirstToken:
            self._first.reported(entry.revision, change)
        if type(change) is v.EngineFinished:
            self._holders.pop((entry.stream[2:], event.incarnation), None)
        if type(change) is v.RequestQueued and change.dispatch:
            self._from_journal(entry, change)
        if type(change) not in (v.PrefillChunkDone, v.KvBlocksFilled):
            self._add(entry, change)

    def _from_journal(self, entry: Entry, change: v.RequestQueued) -> None:
        known = {d.attempt for d in self._why.decisions if d.worker}
        if change.attempt in known:
            return
        try:
            decision = codec.decode(change.dispatch)
        except LogError:
            return  # what came with the request was no decision of ours
        self._journal[change.attempt] = Step(entry, decision, journalled=True)

    def _befell(self, event: Any) -> bool:
        """Whether `event` says what happened to an engine that holds the request, or to the gateway
        that serves it. A socket shows a death before the agent reports it."""
        kind = type(event)
        if kind is v.EngineDied and (event.worker, event.incarnation) in self._cut:
            return True
        if kind in _OF_ENGINE:
            return (event.worker, event.incarnation) in self._holders
        if kind is v.WorkerLost:
            return any(worker == event.worker for worker, _ in self._holders)
        if kind in (v.ReplicaLost, v.ReplicaStopped):
            return event.replica == self._owner
        return False

    def result(self) -> Why:
        """The chain, with decisions that only the journal holds put before their admission."""
        for step in self._journal.values():
            at = next(
                i
                for i, s in enumerate(self._why.steps)
                if type(s.event) is v.RequestQueued and s.event.attempt == step.event.attempt
            )
            self._why.steps.insert(at, step)
        return self._why


def _only(event: Any, found: Why) -> Any:
    """The plan with the choice for this request alone."""
    choices = tuple(c for c in event.choices if c.request == found.request)
    return msgspec.structs.replace(event, choices=choices)


OF_REQUEST = (
    v.RequestArrived,
    v.RouteDecided,
    v.TransportObserved,
    v.ClientReturned,
    v.RequestEnded,
    v.RequestHeld,
    v.RequestShed,
    v.StreamJudged,
)
"""Events that make up the history of one request."""
_BESIDE = (
    v.HolderChosen,
    v.CheckpointEvicted,
    v.RestoreStarted,
    v.RestoreDone,
    v.RestoreFailed,
    v.MigrationAbandoned,
    v.CrossCheckDecided,
    v.CrossChecked,
)
_OF_ENGINE = (
    v.EngineDied,
    v.EngineHung,
    v.EngineRecovered,
    v.StallJudged,
    v.WorkerSuspected,
    v.WorkerCleared,
    v.HealthDecided,
)
_BY_HEALTH = (Exclusion.UNHEALTHY, Exclusion.PROBING, Exclusion.QUARANTINED)
