"""A whole fleet in virtual time: `run(scenario, seed)` returns the outcome of a run.

The fleet comes up; traffic and faults begin together. After every client has its answer and every
fault has passed, the run waits until the fleet has come to rest. Everything is a function of the
scenario and the seed.
"""

from __future__ import annotations

import asyncio
import gc
import hashlib
from collections.abc import Callable, Iterable, Iterator

import msgspec
from msgspec import Struct

from relume.chaos.call_recorder import CallRecorder
from relume.chaos.outcome import Outcome
from relume.chaos.scenario.language import Commands, Scenario
from relume.chaos.scenario.schedule import Schedule, expand
from relume.chaos.sim.agent import Feed
from relume.chaos.sim.daemon import DaemonSlot
from relume.chaos.sim.engine import host_types as hosts
from relume.chaos.sim.engine import step_cost as cost
from relume.chaos.sim.engine.draft_assist import Assist, Assisting
from relume.chaos.sim.etcd.members import SimEtcd
from relume.chaos.sim.event_watch import Watch
from relume.chaos.sim.replica_process import Plane
from relume.chaos.sim.sim_clients import Clients, fault_free
from relume.chaos.sim.sim_faults import Faults
from relume.chaos.sim.sim_operator import DRAINS, Operator
from relume.chaos.sim.truth.truth_recorder import TruthRecorder
from relume.chaos.sim.worker_host import Host
from relume.chaos.sim.world.http_transport import standing_in
from relume.chaos.sim.world.link_rules import Rule
from relume.chaos.sim.world.network import Wires
from relume.chaos.sim.world.replica_settings import replica_config
from relume.chaos.sim.world.small_limits import engine_limits, log_limits
from relume.chaos.sim.world.virtual_loop import EPOCH_S, Late, Stuck, VirtualLoop
from relume.chaos.sim.world.worker_machine import WorkerSettings
from relume.chaos.validators.former_log import RENEWAL, of_present_log
from relume.chaos.validators.promises.workers.i12_drained import left_over
from relume.chaos.validators.records import events_of
from relume.controlplane.replica.loop import ReplicaConfig
from relume.events import vocabulary as v
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import EnginePhase
from relume.policies.state.fleet import Fleet

UP_S = 600.0
"""Maximum time for the fleet to come up; beyond it, the run failed."""
REST_S = 120.0
"""Maximum time from the last answer and fault until the fleet is at rest."""
LOOK_S = 0.5
OF_EFFECTS = ("AdminCommanded", "EffectsDecided", "EffectApplied")
"""Events that need an operator's command; a fault may wait for one."""
SETTLED_S = 3.0
"""Time without activity after which the fleet is at rest."""


class Settings(Struct, frozen=True, kw_only=True):
    """Settings that a scenario cannot express. `replica`: settings of control plane replicas.
    `assist`: hosts whose engines load draft for others; None: they do not. `spec`: host type instead
    of the hardware class's. The run calls `watching` with the fleet before it starts. `judges_calls`:
    record the calls to etcd, and judge them at the end (I5)."""

    workers: WorkerSettings = WorkerSettings()
    assist: Assist | None = None
    replica: ReplicaConfig = ReplicaConfig()
    spec: hosts.HostSpec | None = None
    watching: Callable[[SimFleet], None] | None = None
    judges_calls: bool = False


class SimFleet:
    """One run's fleet."""

    def __init__(
        self,
        loop: VirtualLoop,
        wires: Wires,
        scenario: Scenario,
        schedule: Schedule,
        settings: Settings,
    ) -> None:
        fleet, workers = scenario.fleet, settings.workers
        if fleet.canary_s:
            workers = msgspec.structs.replace(workers, canary_interval_s=fleet.canary_s)
        workers = msgspec.structs.replace(workers, disorder=fleet.disorder)
        self.loop = loop
        self.scenario = scenario
        self.schedule = schedule
        self.wires = wires
        self.etcd = SimEtcd(loop, self.wires, schedule.etcd, log_limits(fleet.limits))
        self.etcd.may_be_restored = any(f.what == RENEWAL for f in schedule.faults)
        if settings.judges_calls:
            self.etcd.recorder = CallRecorder(loop.time, self.etcd.config.prefix)
        replica = replica_config(fleet, settings.replica)
        self.planes = {
            name: Plane(
                loop, wires, self.etcd, name, replica,
                takeover_s=2.0 * settings.workers.lease_ttl_s, model=fleet.model,
            )
            for name in schedule.control_planes
        }  # fmt: skip
        steps = cost.load(f"{fleet.model}_{fleet.hardware}")
        spec = settings.spec or hosts.spec(fleet.model, fleet.hardware)
        spec = engine_limits(spec, fleet.limits)
        holders: dict[str, DaemonSlot] = {}
        feed = Feed(self.etcd)
        self.hosts = {
            name: Host(
                loop=loop,
                name=name,
                domain=domain,
                model=schedule.models.get(name, fleet.model),
                spec=spec,
                cost=steps,
                wires=self.wires,
                etcd=self.etcd,
                settings=workers,
                budget_bytes=fleet.checkpoint_bytes,
                holders=holders,
                feed=feed,
                file_bytes=fleet.checkpoint_file_mb << 20,
            )
            for name, domain in schedule.workers.items()
        }
        self.truth = TruthRecorder(loop, self.etcd, self.planes)
        for host in self.hosts.values():
            host.truth = self.truth
        if settings.assist is not None:
            Assisting(self.hosts, loop, settings.assist)
        self._answered = asyncio.Event()
        doors = [plane.address for plane in self.planes.values()]
        self.clients = Clients(loop, self.wires, schedule, doors, self._answered.set)
        self.clients.lost_ends = fleet.disorder.lost_ends
        self.clients.waits = self.etcd.may_be_restored
        watch = Watch(loop, self.etcd)
        self.faults = Faults(self, watch)
        if any(planned.event is not None for planned in schedule.faults):
            for host in self.hosts.values():
                host.seen, host.met = watch.on_report, watch.met
        self.operator: Operator | None = None
        self.began_ns = 0
        self.drained = False
        if settings.watching is not None:
            settings.watching(self)

    async def main(self) -> None:
        """The whole run. Raises Late."""
        for plane in self.planes.values():
            plane.start()
        for host in self.hosts.values():
            host.start()
        if not await self._until(self._up, UP_S):
            raise Late(f"the fleet was not up after {UP_S:g} s")
        await self.prepare()
        self.began_ns = self.loop.now_ns
        self.clients.start()
        self.faults.start()
        self._delay_writer()
        operating = settling = None
        if commands := self._commands():
            self.operator = Operator(
                list(self.planes.values()),
                {name: host.model for name, host in self.hosts.items()},
                commands,
                lambda name: self.hosts[name].is_right,
            )
            self.etcd.on_new_state.append(self.operator.forget)
            operating = asyncio.create_task(self.operator.run())
        await self._answered.wait()
        while self.faults.striking and self.loop.now_ns < self._last_strike_ns:
            await asyncio.sleep(LOOK_S)
        self.faults.no_more()
        if operating is not None and self.operator is not None:
            operating.cancel()
            if self.scenario.fleet.operator.each:
                await self.operator.end()
        while self.faults.open:
            await asyncio.sleep(LOOK_S)
        if self.operator is not None and self.scenario.fleet.operator.each:
            settling = asyncio.create_task(self.operator.settle())
        self.drained = await self._until(self._rested, REST_S)
        if settling is not None:
            settling.cancel()

    def _commands(self) -> Commands | None:
        """An operator's commands; if a fault waits for effects, and no others are given: drains."""
        given = self.scenario.fleet.operator
        if given.each:
            return given
        waits = any(planned.event in OF_EFFECTS for planned in self.schedule.faults)
        return DRAINS if waits else None

    def _delay_writer(self) -> None:
        """What one process sends to etcd is late from now on."""
        disorder = self.scenario.fleet.disorder
        if disorder.late_writer and disorder.late_writer_ms:
            late_s = disorder.late_writer_ms / 1e3
            rule = Rule(one=disorder.late_writer, other="", kind="etcd", both=False, delay_s=late_s)
            self.wires.shape(rule)

    async def prepare(self) -> None:
        """Change the fleet after its start, before traffic and faults begin."""

    @property
    def _last_strike_ns(self) -> int:
        timed = [f.at_ns for f in self.schedule.faults if f.at_ns is not None]
        return self.began_ns + max(timed, default=0) + 1_000_000_000

    async def _until(self, found: Callable[[], bool], limit_s: float) -> bool:
        deadline, since = self.loop.time() + limit_s, None
        while self.loop.time() < deadline:
            if not found():
                since = None
            elif since is None:
                since = self.loop.time()
            elif self.loop.time() - since >= SETTLED_S:
                return True
            await asyncio.sleep(LOOK_S)
        return False

    def _folds(self) -> list[Fleet]:
        return [plane.fleet for plane in self.planes.values() if plane.running]

    def _up(self) -> bool:
        folds = self._folds()
        return len(folds) == len(self.planes) and all(
            len(fold.workers) == len(self.hosts)
            and all(worker.engine == EnginePhase.READY for worker in fold.workers.values())
            and (not self._checkpoints or len(fold.holders) == len(self.hosts))
            for fold in folds
        )

    @property
    def _checkpoints(self) -> bool:
        return any(host.budget_bytes for host in self.hosts.values())

    def _rested(self) -> bool:
        """Whether no process has any request or unwritten event left."""
        folds = self._folds()
        return (
            bool(folds)
            and all(at_rest(fold, self._is_gone) for fold in folds)
            and all(map(written, self.planes.values()))
        )

    def _is_gone(self, worker: str) -> bool:
        """Whether its agent cannot start again: it would write where a damaged segment stands."""
        return self.etcd.is_damaged(f"w.{worker}")

    # --- targets of faults -----------------------------------------------------------------------

    def kill_plane(self, name: str) -> bool:
        """kill -9 of a replica; False: it does not run."""
        plane = self.planes[name]
        if not plane.running:
            return False
        self.clients.flush_everything(plane.address)
        plane.kill()
        return True

    def stop_plane(self, name: str) -> bool:
        """SIGSTOP to a replica; False: it does not run."""
        plane = self.planes[name]
        if not plane.running:
            return False
        self.clients.flush_everything(plane.address)
        plane.stop()
        return True

    def go_on_plane(self, name: str) -> None:
        """SIGCONT."""
        self.planes[name].go_on()

    def holder_of(self, host: Host) -> Host | None:
        """The host with the most blocks of the engine's requests."""
        if host.engine is None:
            return None
        counts: dict[str, int] = {}
        for track in host.engine.tracks.values():
            for endpoint, flow in (track.pump.flows if track.pump is not None else {}).items():
                counts[endpoint] = counts.get(endpoint, 0) + flow.had + 1
        found = max(sorted(counts), key=lambda name: counts[name], default="")
        slot = host.holders.get(found)
        return self.hosts[slot.machine.name] if slot is not None else None


def written(plane: Plane) -> bool:
    """Whether all events of a replica are in the log: events of an outage are in no fold until it
    is over."""
    if plane.replica is None:
        return False
    writer = plane.replica.writer
    return writer.healthy and writer.durable == writer.position


def at_rest(fold: Fleet, is_gone: Callable[[str], bool]) -> bool:
    """Whether I12 holds for a fold, and every engine of it serves but those of workers that are away
    and gone for good."""
    serving = all(
        worker.engine == EnginePhase.READY or (not worker.present and is_gone(worker.name))
        for worker in fold.workers.values()
    )
    return serving and not any(left_over(fold))


def run(
    scenario: Scenario,
    seed: int,
    *,
    settings: Settings | None = None,
    schedule: Schedule | None = None,
    until_s: float = 3600.0,
    make: Callable[..., SimFleet] = SimFleet,
) -> Outcome:
    """A run of `scenario`, by `schedule` if given, else by its expansion by `seed`.

    `until_s` bounds its virtual time, `make` makes the fleet. The outcome's `error` says why the
    run itself failed.
    """
    schedule = expand(scenario, seed) if schedule is None else schedule
    error = ""
    collecting = gc.isenabled()
    gc.disable()  # millions of small objects live as long as the run
    gc.freeze()  # after the run, the collector scans only the outcome
    loop = VirtualLoop(seed)
    wires = Wires(loop)
    try:
        with standing_in(wires):
            fleet = make(loop, wires, scenario, schedule, settings or Settings())
            try:
                loop.run(fleet.main(), until_s)
            except (Stuck, Late) as broken:
                error = str(broken)
            finally:
                outcome = _outcome(fleet, scenario, error)
                fleet.etcd.close()
                del fleet
                loop.close()
    finally:
        del loop, wires
        gc.collect()  # the next run would freeze remaining objects, which no collection would then free
        gc.unfreeze()
        if collecting:
            gc.enable()
    return outcome


def _outcome(fleet: SimFleet, scenario: Scenario, error: str) -> Outcome:
    lived = fleet.clients.histories(fleet.began_ns)
    truth = fleet.truth.end(fleet.hosts.values(), fleet.began_ns)
    truth.clock_ms = fleet.etcd.clock_ms
    if fleet.etcd.recorder is not None:
        truth.etcd_keys = fleet.etcd.recorder.explained()
    replicas = {plane.address: f"r.{name}" for name, plane in fleet.planes.items()}
    if fleet.schedule.models:
        truth.models = {name: host.model for name, host in fleet.hosts.items()}
    truth.calls = {name: call.known(replicas) for name, call in fleet.clients.calls.items()}
    groups, fired = fleet.etcd.groups(), tuple(fleet.faults.fired)
    if fleet.etcd.former:
        ended = of_present_log(lived, fired, set(arrived_in(groups)))
        changed = [one.request for one, was in zip(ended, lived, strict=True) if one is not was]
        for name in changed:
            del truth.calls[name]
        lived = tuple(ended)
    return Outcome(
        kind="sim",
        scenario=scenario,
        schedule=fleet.schedule,
        groups=groups,
        histories=(*lived, *fault_free([history.request for history in lived], fleet.schedule)),
        fired=fired,
        began_ms=EPOCH_S * 1000 + fleet.began_ns // 1_000_000,
        ended_ns=fleet.loop.now_ns - fleet.began_ns,
        drained=fleet.drained,
        error=error or next((one.trouble for one in fleet.faults.restored if one.trouble), ""),
        landed=tuple(fleet.etcd.landed),
        commands=fleet.operator.acknowledged if fleet.operator is not None else (),
        truth=truth,
        former=fleet.etcd.former,
    )


def arrived_in(groups: Iterable[RevisionGroup]) -> Iterator[str]:
    """The x-request-ids of requests that a log knows."""
    for entry in events_of(tuple(groups), "r."):
        if type(entry.event) is v.RequestArrived:
            yield entry.event.client_id


def digest(outcome: Outcome) -> str:
    """SHA-256 of the log and of clients' and faults' records, 16 hex digits."""
    seen = hashlib.sha256()
    for group in outcome.groups:
        seen.update(repr((group.revision, group.owners)).encode())
        for segment in group.segments:
            seen.update(segment.hash)
    seen.update(msgspec.json.encode((outcome.histories, outcome.fired)))
    return seen.hexdigest()[:16]
