"""Records what the processes of a simulated fleet really have, for `I21`.

It changes nothing in a run: engines and keepers call it with each report, and etcd after each
change. Every `LOOK_NS` of virtual time it looks at the folds of living replicas.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

from relume.chaos.sim.daemon import SimDaemon
from relume.chaos.sim.engine.worker_engine import EngineProcess
from relume.chaos.sim.etcd.key_store import Range
from relume.chaos.sim.etcd.members import SimEtcd
from relume.chaos.sim.replica_process import Plane
from relume.chaos.sim.world.virtual_loop import NS, VirtualLoop
from relume.chaos.validators.ground_truth import (
    EngineEnd,
    EngineLoad,
    GroundTruth,
    HeldBlocks,
    QueuedReport,
    ReportKey,
)
from relume.controlplane.gateway.endpoint import Gateway
from relume.controlplane.replica.loop import Replica
from relume.engine_shim.agent.journal import Journal
from relume.events import vocabulary as v
from relume.events.etcd.keys import Keys, after_prefix
from relume.events.vocabulary.enums import RequestOutcome
from relume.policies.state.invariants import check

LOOK_NS = NS // 2
"""Virtual time between two looks at the folds of replicas."""
FINISHED = ("stop", "length")
"""vLLM's reasons with which an engine generated an attempt to its end."""
MOST_FOUND = 50
"""Maximum number of differences stored."""


class Agent(Protocol):
    """What is read of a host's agent."""

    process: Any
    reports: Any
    _journal: Journal | None


class Worker(Protocol):
    """What is read of a worker's host."""

    name: str
    agent: Any
    engine: EngineProcess | None

    @property
    def daemon(self) -> SimDaemon | None:
        """The last state daemon."""
        ...


class TruthRecorder:
    """One for a run; `truth` is what it recorded."""

    def __init__(self, loop: VirtualLoop, etcd: SimEtcd, planes: dict[str, Plane]) -> None:
        self.truth = GroundTruth()
        self._loop = loop
        self._etcd = etcd
        self._planes = planes
        self._own = Keys(etcd.config.prefix)
        self._next_ns = 0
        self._engines: dict[str, EngineProcess] = {}
        self._stating: set[EngineProcess] = set()
        """Engines that have made no step since they reported their requests to a new log: of a request
        that decodes, only the next step says how far it is."""
        etcd.observers.append(self._changed)
        etcd.on_new_state.append(self._begin_anew)

    def _begin_anew(self) -> None:
        """Etcd holds another log, of which nothing is known yet. When engines served does not depend on
        logs."""
        before, self.truth = self.truth, GroundTruth()
        self.truth.serving, self.truth.idle = before.serving, before.idle

    # --- reports -------------------------------------------------------------------------------

    def engine_reports(self, engine: EngineProcess, event: v.EngineStep) -> None:
        """An engine writes a report about its requests."""
        last = event.changes[-1]
        key = ReportKey(engine.incarnation, event.step, type(last), last.request, last.attempt)
        worker = engine.machine.name
        if event.duration_us:
            self._stating.discard(engine)
        if engine not in self._stating:
            self.truth.reports.setdefault(worker, {})[key] = load_of(engine, event.step)
        self._engines[worker] = engine
        self._note_idle(worker, not engine.tracks)
        now_ns = self._loop.now_ns
        for change in event.changes:
            name = f"{change.request}/{change.attempt}"
            if type(change) is v.EngineFinished:
                self.truth.ended[name] = now_ns
                if change.reason in FINISHED:
                    self.truth.finished.add(name)
            elif type(change) is v.RequestQueued and (track := engine.tracks.get(name)):
                attempts = self.truth.attempts.setdefault(track.what.content_id, [])
                attempts.append((name, worker, now_ns))
                self.truth.queued[name] = QueuedReport(
                    worker, event.incarnation, event.step, change.dispatch
                )

    def engine_states(self, engine: EngineProcess) -> None:
        """An engine reports all its requests to a new log, which does not have its earlier reports."""
        self.truth.reports.pop(engine.machine.name, None)
        self._stating.add(engine)

    def engine_serves(self, worker: str, serving: bool) -> None:
        """The engine of a worker serves from now on, or no longer."""
        self.truth.serving.setdefault(worker, []).append((self._loop.now_ns, serving))
        last = self._engines.get(worker)
        is_busy = last is not None and last.process.alive and bool(last.tracks)
        self._note_idle(worker, serving and not is_busy)

    def _note_idle(self, worker: str, idle: bool) -> None:
        turns = self.truth.idle.setdefault(worker, [])
        if not turns or turns[-1][1] != idle:
            turns.append((self._loop.now_ns, idle))

    def daemon_reports(self, daemon: SimDaemon, journal: Journal, event: v.Event) -> None:
        """The agent has just recorded what a daemon holds; `event` is the last of it."""
        if not journal._waiting and not journal.is_fenced:
            place = journal.stream, journal._writer.position
            self.truth.held[place] = held_by(daemon, event)

    # --- looks ---------------------------------------------------------------------------------

    def _changed(self, first: int, of_leader: bool) -> None:
        if self._loop.now_ns >= self._next_ns and len(self.truth.found) < MOST_FOUND:
            self._next_ns = self._loop.now_ns + LOOK_NS
            self.look()

    def look(self) -> None:
        """Check the folds of all living replicas."""
        self.truth.looks += 1
        for name, plane in self._planes.items():
            if plane.replica is not None and plane.log_number == self._etcd.log_number:
                taken = plane.gateway.taken if plane.gateway is not None else frozenset()
                found = self._of_replica(plane.replica, taken)
                self.truth.found += ((name, text) for text in found)

    def _of_replica(self, replica: Replica, taken: frozenset[str]) -> Iterable[str]:
        fleet = replica.fleet
        yield from check(fleet)
        owners = self.owners(fleet.revision)
        if fleet.owners != owners:
            yield f"owners are {fleet.owners} at revision {fleet.revision}; etcd has {owners}"
        live = live_of(replica)
        if live is None:
            return
        stream = replica.view.stream
        known = {
            name for name, request in fleet.requests.items()
            if request.owner == stream and request.boot == replica.boot
        }  # fmt: skip
        self.truth.unknown.update((stream, name) for name in live - known - taken)
        if known - live:
            yield f"its gateway lacks {sorted(known - live)}"

    def owners(self, revision: int) -> dict[str, int]:
        """Owners of streams in etcd at that revision."""
        own = self._own.own
        if not revision:
            return {}
        found = self._etcd.store.range(
            Range(key=own, end=after_prefix(own), revision=revision)
        )  # fmt: skip
        return {self._own.owned_stream(kv.key): kv.create_revision for kv in found.kvs}

    def end(self, workers: Iterable[Worker], began_ns: int) -> GroundTruth:
        """Everything, at the end of a run that began then."""
        truth = self.truth
        truth.began_ns = began_ns
        self.look()
        truth.owners = self.owners(self._etcd.store.revision)
        for name, plane in self._planes.items():
            stream = f"r.{name}"
            live = live_of(plane.replica) if plane.replica is not None else None
            if live is None:
                truth.unwritten[stream] = "the replica did not run, or had unwritten events"
            else:
                truth.gateways[stream] = frozenset(live)
                truth.counted[stream] = counted_by(plane.gateway)
        for worker in workers:
            self._end_of(worker)
        return truth

    def _end_of(self, worker: Worker) -> None:
        truth, stream, agent = self.truth, f"w.{worker.name}", worker.agent
        if agent is None or not agent.process.alive or unwritten(agent._journal, agent):
            truth.unwritten[stream] = "the agent did not run, or had unwritten events"
            return
        engine, daemon = worker.engine, worker.daemon
        if engine is not None and engine.process.alive and engine.serving:
            truth.engines[worker.name] = EngineEnd(
                incarnation=engine.incarnation,
                attempts=frozenset(engine.tracks),
                load=load_of(engine),
            )
        if daemon is not None and daemon.process.alive:
            truth.daemons[worker.name] = held_by(daemon, None)


def load_of(process: EngineProcess, step: int = 0) -> EngineLoad:
    """The load of an engine, at the end of `step`, which may be one of the current run."""
    engine, tracks = process.engine, process.tracks
    left = engine.prompt_left
    if len(tracks) > engine.load:  # some wait for their blocks, ahead of the scheduler
        for track in tracks.values():
            if track.joined < 0 and process.is_restoring(track):
                left += track.what.prompt_tokens + track.given
    decoding, context = engine.batch
    context += decoding * max(step - engine.steps, 0)
    return EngineLoad(
        len(tracks), decoding, context, left, len(engine.waiting), engine.kv_used
    )  # fmt: skip


def held_by(daemon: SimDaemon, event: Any) -> HeldBlocks:
    """What a state daemon holds."""
    return HeldBlocks(event, daemon.boot, daemon.held())


def live_of(replica: Replica) -> set[str] | None:
    """Requests that are its own: live in its gateway, or without a client because the log took its
    return too late (their end follows). None: the fold lacks events of the replica."""
    head, scheduler = replica.fleet.streams.get(replica.view.stream), replica.scheduler
    if head is None or head.position != replica.writer.position:
        return None
    return scheduler.live.keys() | scheduler.returns._ending.keys()


def counted_by(gateway: Gateway | None) -> dict[str, int]:
    """A gateway's own counters of outcomes, and of tokens."""
    if gateway is None:
        return {}
    counters = gateway.counters
    return {
        **{outcome: getattr(counters, outcome) for outcome in RequestOutcome},
        "tokens": counters.tokens,
    }


def unwritten(journal: Journal | None, agent: Any) -> bool:
    """Whether an agent has reports or events that etcd lacks."""
    if journal is None or journal._waiting or journal.shedding or journal.is_fenced:
        return True
    reports = getattr(agent, "reports", None)
    if reports is None or reports._coming or reports._waiting:
        return True
    return journal._writer.durable != journal._writer.position
