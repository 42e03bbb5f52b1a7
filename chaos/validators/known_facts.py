"""What the log says about workers and holders at each revision, in a few plain fields.

Theory of operation. Replay checks decisions with the code that took them, so it agrees with a wrong
rule. The rules in `chaos.validators.promises.decisions` read this instead. It shares no code with
`policies/` or `controlplane/`: one walk over the events, each fact with the revision from which it
is known.

A decision's basis (R, p) says what its replica knew: the log up to revision R, and its own events up
to position p. So facts of workers, holders and the leader are looked up at R. Suspicions are looked
up at p: they are the replica's own, and hold before they are in the log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec import Struct, field
from msgspec.structs import replace

from relume.chaos.validators.history import History
from relume.events import vocabulary as v
from relume.events.log.codec import UnreadableRecord, decode_all
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import (
    AdminCommand,
    EffectKind,
    EngineKind,
    EnginePhase,
    HealthState,
    RolloutStage,
    TransportKind,
)

STARTING, READY, DEAD = EnginePhase.STARTING, EnginePhase.READY, EnginePhase.DEAD
SUSPICIOUS = frozenset(
    (
        TransportKind.RESET,
        TransportKind.EOF,
        TransportKind.REFUSED,
        TransportKind.ENGINE_DEAD,
        TransportKind.UNREACHABLE,
        TransportKind.STALL,
    )
)
"""After such an end of a connection the replica suspects the engine."""
FAILED_ONE = frozenset((TransportKind.ENGINE_ERROR, TransportKind.STUCK))
"""The engine failed one request, and may serve others."""
EXCLUDED = (HealthState.UNHEALTHY, HealthState.QUARANTINED)
STEP_OVER = (RolloutStage.RETURNED, RolloutStage.DONE, RolloutStage.CANCELLED)
"""A rolling restart leaves its workers, which get requests again."""
NOTHING = 0, 0
Place = tuple[str, int]
"""A worker, and the incarnation of its engine."""


class Standing(Struct, frozen=True, kw_only=True):
    """A worker: its engine, whether its host is there, and whether it drains."""

    incarnation: int = 0
    engine: EnginePhase = EnginePhase.NONE
    model: str = ""
    plain: bool = False
    present: bool = False
    draining: bool = False
    leaving: bool = False
    rolling: bool = False
    unreadable: bool = False
    domain: str = ""

    @property
    def drains(self) -> bool:
        """By an operator, since its agent stops, or for a rolling restart."""
        return self.draining or self.leaving or self.rolling


class KnownWorker:
    """One worker. `epoch`: the last owner of its stream."""

    def __init__(self) -> None:
        self.epoch = 0
        self.standing = History(Standing())
        self.health: History[v.HealthDecided | None] = History(None)

    def change(self, revision: int, **changes: Any) -> None:
        """What is so from `revision` on."""
        self.standing.set(revision, replace(self.standing.last, **changes))


class KnownHolder:
    """The state daemon of one worker's host. `held`: bytes of all checkpoints there. `covered`: of
    each request the tokens that can be had, of its child with the fewest, and its bytes. `placed`:
    of each live request whose checkpoint is to be there, since when, and the bytes expected."""

    def __init__(self) -> None:
        self.boot = ""
        self.epoch = 0
        self.up = History(False)
        self.budget = History(0)
        self.held = History(0)
        self.covered: dict[str, History[tuple[int, int]]] = {}
        self.placed: dict[str, tuple[int, int]] = {}
        self._parts: dict[str, dict[int, tuple[int, int]]] = {}

    def take(self, revision: int, request: str, child: int, tokens: int, size: int) -> None:
        """It holds so much of one child of the request."""
        parts = self._parts.setdefault(request, {})
        before = parts.get(child, (0, 0))[1]
        parts[child] = tokens, size
        self._changed(revision, request, size - before)

    def has_part_of(self, request: str) -> bool:
        """Whether it holds anything of the request, at the end of what was read."""
        return bool(self._parts.get(request))

    def has_of(self, request: str, revision: int) -> tuple[int, int]:
        """Tokens and bytes of the request that it holds by what is known at `revision`."""
        known = self.covered.get(request)
        return known.at(revision) if known is not None else NOTHING

    def promised(self, revision: int) -> int:
        """Bytes that are still to come, of requests placed there by `revision` and still now."""
        return sum(
            max(0, size - self.has_of(request, revision)[1])
            for request, (since, size) in self.placed.items()
            if since <= revision
        )

    def drop(self, revision: int, request: str, child: int) -> None:
        """It holds nothing more of one child of the request."""
        parts = self._parts.get(request, {})
        if child in parts:
            self._changed(revision, request, -parts.pop(child)[1])

    def drop_all(self, revision: int, request: str) -> None:
        """It holds nothing more of the request."""
        for child in list(self._parts.get(request, ())):
            self.drop(revision, request, child)

    def end(self, revision: int) -> None:
        """This life of the daemon is over."""
        for request in list(self._parts):
            self.drop_all(revision, request)
        self._parts.clear()
        self.up.set(revision, False)

    def _changed(self, revision: int, request: str, size: int) -> None:
        parts = self._parts[request].values()
        tokens, held = min((n for n, _ in parts), default=0), sum(n for _, n in parts)
        known = self.covered.get(request)
        if known is None:
            known = self.covered[request] = History(NOTHING)
        known.set(revision, (tokens, held))
        self.held.set(revision, self.held.last + size)


class Dispatch(Struct, frozen=True, kw_only=True):
    """A dispatch in the log, of the replica of `stream`. `failed`: engines that failed this request
    before, as this replica recorded. `failing`: how many of `KnownFacts.failing` stand before it in
    the log. `left`: the worker that the request had to leave by a plan of migration, if this attempt
    comes after it and the one before did not fail."""

    stream: str
    revision: int
    event: v.RouteDecided
    failed: tuple[Place, ...]
    failing: int
    left: str


class Placing(Struct, frozen=True, kw_only=True):
    """A choice of holders. `before`: holders that were chosen for this request earlier.
    `promised`: bytes that each holder is still to get for others, at least."""

    revision: int
    event: v.HolderChosen
    before: frozenset[str]
    promised: tuple[int, ...]


class Planning(Struct, frozen=True, kw_only=True):
    """A plan of recoveries or migrations."""

    revision: int
    event: v.RecoveryPlanned | v.MigrationPlanned


class _OfReplica(Struct):
    """What the walk keeps of one replica's stream."""

    suspects: dict[str, History[int]] = field(default_factory=dict)
    failed: dict[str, tuple[Place, ...]] = field(default_factory=dict)
    left: dict[str, tuple[int, str]] = field(default_factory=dict)


class KnownFacts:
    """The facts of a whole log, and the decisions in it. `failing`: engines at which requests
    failed, numbered by the first failure. `spares`: by model."""

    def __init__(self, groups: Iterable[RevisionGroup]) -> None:
        self.workers: dict[str, KnownWorker] = {}
        self.holders: dict[str, KnownHolder] = {}
        self.dispatches: list[Dispatch] = []
        self.placings: list[Placing] = []
        self.plannings: list[Planning] = []
        self.failing: dict[Place, int] = {}
        self.spares: dict[str, History[tuple[str, ...]]] = {}
        self._replicas: dict[str, _OfReplica] = {}
        self._chosen: dict[str, frozenset[str]] = {}
        self._live: set[str] = set()
        self._placed: dict[str, int] = {}
        """Of each request, the attempt whose placement counts."""
        self._ended: set[str] = set()
        self._owners: dict[str, str] = {}
        self._void: dict[str, int] = {}
        groups = tuple(groups)
        self._refused = refused_commands(groups)
        for group in groups:
            self._take(group)

    def suspect(self, stream: str, worker: str, position: int) -> int:
        """The incarnation of `worker` that the replica of `stream` suspects at this position of its
        own; 0: none."""
        known = self._replicas[stream].suspects.get(worker)
        return known.at(position) if known is not None else 0

    def _take(self, group: RevisionGroup) -> None:
        revision = group.revision
        for segment in group.segments:
            stream = segment.stream
            if stream.startswith("w."):
                self._worker(stream[2:]).epoch = segment.epoch
            for number, event in enumerate(decode_all(segment.records)):
                if (handler := _HANDLERS.get(type(event))) is not None:
                    handler(self, revision, stream, segment.first + number, event)

    def _worker(self, name: str) -> KnownWorker:
        known = self.workers.get(name)
        if known is None:
            known = self.workers[name] = KnownWorker()
        return known

    # --- workers and their engines

    def _registered(self, revision: int, stream: str, _: int, event: v.WorkerRegistered) -> None:
        """A new agent: it ended the engine of the agent before."""
        worker = self._worker(stream[2:])
        engine = worker.standing.last.engine
        engine = DEAD if engine in (STARTING, READY) else engine
        worker.change(revision, present=True, leaving=False, domain=event.domain, engine=engine)

    def _resumed(self, revision: int, stream: str, _: int, event: v.StreamResumed) -> None:
        if stream.startswith("w."):
            self._worker(stream[2:]).change(revision, present=True)

    def _leaving(self, revision: int, stream: str, _: int, event: v.WorkerLeaving) -> None:
        self._worker(stream[2:]).change(revision, leaving=True)

    def _deregistered(self, revision: int, stream: str, _: int, event: Any) -> None:
        self._worker(stream[2:]).change(
            revision, present=False, leaving=False, engine=EnginePhase.NONE
        )

    def _started(self, revision: int, stream: str, _: int, event: v.EngineStarted) -> None:
        worker = self._worker(stream[2:])
        if event.incarnation > worker.standing.last.incarnation:
            worker.change(revision, incarnation=event.incarnation, engine=STARTING)

    def _ready(self, revision: int, stream: str, _: int, event: v.EngineReady) -> None:
        worker = self._worker(stream[2:])
        known = worker.standing.last
        if event.incarnation == known.incarnation and known.engine in (STARTING, READY):
            plain = event.kind == EngineKind.PLAIN
            worker.change(revision, engine=READY, model=event.model, plain=plain)

    def _died(self, revision: int, stream: str, _: int, event: v.EngineDied) -> None:
        worker = self._worker(stream[2:])
        if event.incarnation >= worker.standing.last.incarnation:
            worker.change(revision, incarnation=event.incarnation, engine=DEAD)

    def _unreadable(self, revision: int, stream: str, _: int, event: UnreadableRecord) -> None:
        if stream.startswith("w."):
            self._worker(stream[2:]).change(revision, unreadable=True)

    def _skipped(self, revision: int, stream: str, _: int, event: v.SegmentSkipped) -> None:
        if event.stream.startswith("w."):
            self._worker(event.stream[2:]).change(revision, unreadable=True)

    def _commanded(self, revision: int, stream: str, _: int, event: v.AdminCommanded) -> None:
        if event.command_id in self._refused:
            return  # it waited for the log
        if event.command == AdminCommand.TRUST and event.target in self.workers:
            self._worker(event.target).change(revision, unreadable=False)

    # --- the leader

    def _lost(self, revision: int, stream: str, _: int, event: v.WorkerLost) -> None:
        """Void if the worker's agent owns its stream again."""
        worker = self._worker(event.worker)
        if event.epoch == worker.epoch:
            worker.change(revision, present=False)
            if (holder := self.holders.get(event.worker)) is not None:
                holder.end(revision)

    def _forgotten(self, revision: int, stream: str, _: int, event: v.WorkerForgotten) -> None:
        worker = self._worker(event.worker)
        if event.epoch == worker.epoch and not worker.standing.last.present:
            unreadable = worker.standing.last.unreadable
            worker.standing.set(revision, Standing(unreadable=unreadable))

    def _effects(self, revision: int, stream: str, _: int, event: v.EffectsDecided) -> None:
        """Drains and their ends; an effect that is sent again changes nothing."""
        for effect in event.effects if event.again < 0 else ():
            if effect.kind in (EffectKind.DRAIN, EffectKind.UNDRAIN):
                drains = effect.kind == EffectKind.DRAIN
                self._worker(effect.worker).change(revision, draining=drains)

    def _rollout(self, revision: int, stream: str, _: int, event: v.RolloutDecided) -> None:
        """Workers of a step get no requests until it is over."""
        if event.stage == RolloutStage.DRAINING or event.stage in STEP_OVER:
            for name in event.workers:
                self._worker(name).change(revision, rolling=event.stage not in STEP_OVER)

    def _health(self, revision: int, stream: str, _: int, event: v.HealthDecided) -> None:
        """A decision about an engine that another one has followed meanwhile changes nothing."""
        worker = self._worker(event.worker)
        if worker.standing.last.incarnation == event.incarnation:
            worker.health.set(revision, event)

    def _spares(self, revision: int, stream: str, _: int, event: v.SparesDecided) -> None:
        self.spares.setdefault(event.model, History(())).set(revision, event.spares)

    # --- replicas

    def _replica(self, stream: str) -> _OfReplica:
        known = self._replicas.get(stream)
        if known is None:
            known = self._replicas[stream] = _OfReplica()
        return known

    def _began(self, revision: int, stream: str, position: int, event: v.ReplicaStarted) -> None:
        """A new life of the replica suspects no engine and has no requests."""
        replica = self._replica(stream)
        replica.failed.clear()
        replica.left.clear()
        for known in replica.suspects.values():
            known.set(position, 0)

    def _arrived(self, revision: int, stream: str, _: int, event: Any) -> None:
        """The request is this replica's from now on. It knows of no earlier failures of it, unless
        it had the request before."""
        if event.request not in self._ended:
            self._live.add(event.request)
        before, self._owners[event.request] = self._owners.get(event.request), stream
        if before == stream:
            return
        replica = self._replica(stream)
        replica.failed.pop(event.request, None)
        replica.left.pop(event.request, None)

    def _observed(
        self, revision: int, stream: str, position: int, event: v.TransportObserved
    ) -> None:
        place = event.worker, event.incarnation
        if event.kind in SUSPICIOUS:
            self._suspected(revision, stream, position, event)
        elif event.kind in FAILED_ONE:
            self.failing.setdefault(place, len(self.failing))
        if event.kind != TransportKind.MOVED:
            replica = self._replica(stream)
            replica.failed[event.request] = (*replica.failed.get(event.request, ()), place)
            replica.left.pop(event.request, None)

    def _suspected(
        self,
        revision: int,
        stream: str,
        position: int,
        event: v.WorkerSuspected | v.TransportObserved,
    ) -> None:
        """Late news of an older engine does not hide suspicion of a newer one."""
        known = self._replica(stream).suspects.setdefault(event.worker, History(0))
        if event.incarnation >= known.last:
            known.set(position, event.incarnation)

    def _cleared(self, revision: int, stream: str, position: int, event: v.WorkerCleared) -> None:
        known = self._replica(stream).suspects.get(event.worker)
        if known is not None and known.last == event.incarnation:
            known.set(position, 0)

    def _dispatched(self, revision: int, stream: str, _: int, event: v.RouteDecided) -> None:
        if not event.worker:
            return
        replica = self._replica(stream)
        attempt, left = replica.left.get(event.request, (0, ""))
        self.dispatches.append(
            Dispatch(
                stream=stream,
                revision=revision,
                event=event,
                failed=replica.failed.get(event.request, ()),
                failing=len(self.failing),
                left=left if event.attempt == attempt + 1 else "",
            )
        )

    def _planned(
        self, revision: int, stream: str, _: int, event: v.RecoveryPlanned | v.MigrationPlanned
    ) -> None:
        self.plannings.append(Planning(revision=revision, event=event))
        if type(event) is v.MigrationPlanned:
            left = self._replica(stream).left
            for choice in event.choices:
                if choice.chosen >= 0:
                    left[choice.request] = choice.attempt, event.worker

    def _holders(self, revision: int, stream: str, _: int, event: v.HolderChosen) -> None:
        before = self._chosen.get(event.request, frozenset())
        holders = [self.holders.setdefault(name, KnownHolder()) for name in event.holders]
        promised = tuple(holder.promised(event.basis.revision) for holder in holders)
        self.placings.append(
            Placing(revision=revision, event=event, before=before, promised=promised)
        )
        self._chosen[event.request] = before | {*event.holders}
        # What a former owner decided of an earlier attempt, and wrote late, places nothing.
        if event.request in self._live and event.attempt >= self._placed.get(event.request, 0):
            self._placed[event.request] = event.attempt
            self._unplace(event.request)
            for holder in holders:
                holder.placed[event.request] = revision, event.expected_bytes

    def _unplace(self, request: str) -> None:
        """The checkpoint of the request is to be nowhere."""
        for name in self._chosen.get(request, ()):
            self.holders[name].placed.pop(request, None)

    def _over(self, revision: int, stream: str, _: int, event: v.RequestEnded) -> None:
        self._live.discard(event.request)
        self._ended.add(event.request)
        self._unplace(event.request)

    # --- holders

    def _daemon_started(
        self, revision: int, stream: str, _: int, event: v.StateDaemonStarted
    ) -> None:
        holder = self.holders.setdefault(event.worker, KnownHolder())
        if event.epoch < holder.epoch:
            return
        holder.end(revision)
        holder.boot, holder.epoch = event.boot, event.epoch
        holder.budget.set(revision, event.budget_bytes + event.file_bytes)
        holder.up.set(revision, True)

    def _daemon_lost(self, revision: int, stream: str, _: int, event: v.StateDaemonLost) -> None:
        holder = self.holders.get(event.worker)
        if holder is not None and holder.boot == event.boot:
            holder.end(revision)

    def _living(self, stream: str, event: Any) -> KnownHolder | None:
        """The holder, if its own agent says this of the daemon's present life."""
        holder = self.holders.get(event.holder)
        if holder is None or stream[2:] != event.holder or holder.boot != event.boot:
            return None
        return holder if holder.up.last else None

    def _acknowledged(self, revision: int, stream: str, _: int, event: Any) -> None:
        """It holds so much; what was written before the request's blocks were voided is not used."""
        holder = self._living(stream, event)
        if holder is None:
            return
        for held in (event,) if type(event) is v.CheckpointAcknowledged else event.held:
            if held.attempt > self._void.get(held.request, 0):
                holder.take(revision, held.request, held.child, held.tokens, held.bytes)

    def _evicted(self, revision: int, stream: str, _: int, event: v.CheckpointEvicted) -> None:
        holder = self._living(stream, event)
        if holder is not None and holder.has_part_of(event.request):
            holder.take(revision, event.request, event.child, event.tokens, event.bytes)

    def _dropped(self, revision: int, stream: str, _: int, event: v.CheckpointDropped) -> None:
        if (holder := self._living(stream, event)) is not None:
            holder.drop(revision, event.request, event.child)

    def _voided(self, revision: int, stream: str, _: int, event: v.CheckpointsVoided) -> None:
        for request, attempt in event.attempts:
            self._void[request] = max(attempt, self._void.get(request, 0))
            for holder in self.holders.values():
                holder.drop_all(revision, request)


def refused_commands(groups: Iterable[RevisionGroup]) -> frozenset[str]:
    """Operators' commands that the leader refuses."""
    segments = (s for group in groups for s in group.segments if s.stream == "fleet")
    return frozenset(
        event.decision
        for segment in segments
        for event in decode_all(segment.records)
        if type(event) is v.ConfigChanged and not event.key
    )


_HANDLERS: dict[type, Callable[[KnownFacts, int, str, int, Any], None]] = {
    v.WorkerRegistered: KnownFacts._registered,
    v.StreamResumed: KnownFacts._resumed,
    v.WorkerLeaving: KnownFacts._leaving,
    v.WorkerDeregistered: KnownFacts._deregistered,
    v.EngineStarted: KnownFacts._started,
    v.EngineReady: KnownFacts._ready,
    v.EngineDied: KnownFacts._died,
    v.WorkerLost: KnownFacts._lost,
    v.WorkerForgotten: KnownFacts._forgotten,
    v.EffectsDecided: KnownFacts._effects,
    v.RolloutDecided: KnownFacts._rollout,
    v.HealthDecided: KnownFacts._health,
    v.SparesDecided: KnownFacts._spares,
    v.SegmentSkipped: KnownFacts._skipped,
    UnreadableRecord: KnownFacts._unreadable,
    v.AdminCommanded: KnownFacts._commanded,
    v.ReplicaStarted: KnownFacts._began,
    v.RequestArrived: KnownFacts._arrived,
    v.ClientReturned: KnownFacts._arrived,
    v.RequestEnded: KnownFacts._over,
    v.TransportObserved: KnownFacts._observed,
    v.WorkerSuspected: KnownFacts._suspected,
    v.WorkerCleared: KnownFacts._cleared,
    v.RouteDecided: KnownFacts._dispatched,
    v.RecoveryPlanned: KnownFacts._planned,
    v.MigrationPlanned: KnownFacts._planned,
    v.HolderChosen: KnownFacts._holders,
    v.StateDaemonStarted: KnownFacts._daemon_started,
    v.StateDaemonLost: KnownFacts._daemon_lost,
    v.CheckpointAcknowledged: KnownFacts._acknowledged,
    v.CheckpointsAcknowledged: KnownFacts._acknowledged,
    v.CheckpointEvicted: KnownFacts._evicted,
    v.CheckpointDropped: KnownFacts._dropped,
    v.CheckpointsVoided: KnownFacts._voided,
}
