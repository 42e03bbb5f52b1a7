"""The faults of the catalogue on a simulated fleet, and when each strikes.

A method strikes one target and returns a function that undoes the fault (None: nothing to undo). It
raises CannotStrike if there is nothing to strike; such a fault is tried again while there is
traffic. `fired` has only faults that struck.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from random import Random
from typing import Protocol

from msgspec.structs import replace

from relume.chaos.damaged_bytes import ABSURD_EPOCHS, UNREADABLE
from relume.chaos.outcome import FiredFault
from relume.chaos.phases import Seen
from relume.chaos.scenario.catalogue import FAULTS
from relume.chaos.scenario.schedule import PlannedFault, Schedule
from relume.chaos.sim.etcd.log_faults import CannotStrike, LogFaults, Undo
from relume.chaos.sim.etcd.members import SimEtcd
from relume.chaos.sim.event_watch import Watch
from relume.chaos.sim.replica_process import Plane
from relume.chaos.sim.sim_clients import Clients
from relume.chaos.sim.worker_host import Host
from relume.chaos.sim.world.link_rules import Rule
from relume.chaos.sim.world.network import Wires
from relume.chaos.sim.world.throttle import Throttle
from relume.chaos.sim.world.virtual_loop import NS, Process, VirtualLoop
from relume.events.wire.notices import DeathNotice

AGAIN_S = 0.1
ETCD_DOWN_S = 1.0
"""Delay until a killed etcd member restarts, if the fault has no duration."""


class Targets(Protocol):
    """Targets of faults: the parts of one run's fleet."""

    loop: VirtualLoop
    schedule: Schedule
    wires: Wires
    etcd: SimEtcd
    hosts: dict[str, Host]
    planes: dict[str, Plane]
    clients: Clients

    def kill_plane(self, name: str) -> bool:
        """kill -9 of a replica; False when it does not run."""
        ...

    def stop_plane(self, name: str) -> bool:
        """SIGSTOP to a replica; False when it does not run."""
        ...

    def go_on_plane(self, name: str) -> None:
        """SIGCONT to a replica."""
        ...

    def holder_of(self, host: Host) -> Host | None:
        """The host with the most blocks of the requests on the engine of `host`."""
        ...


class Faults(LogFaults):
    """Strikes one run's fleet. `open` counts pending and active faults."""

    _fleet: Targets

    def __init__(self, fleet: Targets, watch: Watch) -> None:
        self.fired: list[FiredFault] = []
        self.open = 0
        self.restored = []
        self._fleet = fleet
        self._loop = fleet.loop
        self._watch = watch
        self._root = copy_context()
        self._random = Random(f"{fleet.schedule.seed}:faults")
        self._began_ns = 0
        self._traffic = True
        self._lasting: dict[str, tuple[int, PlannedFault, str, list[Undo]]] = {}
        self._holders: dict[str, str] = {}
        self._flipped: dict[str, dict[str, int]] = {}
        """By fault, the worker whose state daemon it killed too."""

    def start(self) -> None:
        """The run begins: schedule its faults."""
        self._began_ns = self._loop.now_ns
        for planned in self._fleet.schedule.faults:
            if not planned.applicable:
                continue
            self.open += 1
            if planned.at_ns is not None:
                self._later(planned.at_ns / NS, self._strike, planned, None)
            else:
                self._await(planned)

    @property
    def striking(self) -> bool:
        """Whether a fault is pending."""
        return self.open > len(self._lasting)

    def no_more(self) -> None:
        """The traffic is over: faults that wait for an event, or found nothing to strike, will not
        strike."""
        self._traffic = False
        self.open -= self._watch.give_up()

    # --- when ----------------------------------------------------------------------------------

    def _later(self, seconds: float, work: Callable[..., object], *args: object) -> None:
        at = self._loop.time() + seconds
        self._loop.call_at(at, work, *args, context=self._root.copy())

    def _await(self, planned: PlannedFault) -> None:
        def seen(what: Seen) -> None:
            wait_s = planned.after_ns / NS
            if planned.phase:
                wait_s = planned.fraction * self._watch.phases.length_s(planned.phase)
            self._later(wait_s, self._in_phase, planned, what)

        if self._traffic:
            self._watch.due(planned, seen)
        else:
            self.open -= 1

    def _in_phase(self, planned: PlannedFault, seen: Seen) -> None:
        if planned.phase and not self._watch.phases.is_in(planned.phase, seen.event):
            self._await(replace(planned, nth=1))  # that phase was over; wait for the next
            return
        self._strike(planned, seen)

    def _strike(self, planned: PlannedFault, seen: Seen | None) -> None:
        try:
            targets = self._targets(planned, seen)
            act = getattr(self, "_" + planned.what.replace("-", "_"))
            undo, struck = [], []
            for target in targets:
                try:
                    done = act(planned, target)
                except CannotStrike:
                    if len(targets) == 1:
                        raise
                    continue
                struck.append(target)
                if done is not None:
                    undo.append(done)
            if not struck:
                raise CannotStrike(planned.what)
        except CannotStrike:
            if self._traffic:
                self._later(AGAIN_S, self._strike, planned, seen)
            else:
                self.open -= 1
            return
        now, names = self._loop.now_ns - self._began_ns, ",".join(struck)
        if planned.for_ns is None or not undo:
            self._tell(planned, names, now, None)
        else:
            self._lasting[planned.name] = now, planned, names, undo
            self._later(planned.for_ns / NS, self._pass, planned.name)

    def _pass(self, name: str) -> None:
        """A fault with a duration is over."""
        if name in self._lasting:
            at, planned, names, undo = self._lasting.pop(name)
            endings = [one() for one in undo]
            late = next((end for end in endings if isinstance(end, asyncio.Task)), None)
            if late is None:
                self._tell(planned, names, at, self._loop.now_ns - self._began_ns)
            else:  # it ends with what an operator does then
                until = self._tell_at_end
                late.add_done_callback(lambda task: until(planned, names, at, task.result()))

    def _tell_at_end(self, planned: PlannedFault, names: str, at_ns: int, loop_ns: int) -> None:
        self._tell(planned, names, at_ns, loop_ns - self._began_ns)

    def _tell(self, planned: PlannedFault, names: str, at_ns: int, until_ns: int | None) -> None:
        self.open -= 1
        self.fired.append(
            FiredFault(
                name=planned.name,
                what=planned.what,
                target=names,
                at_ns=at_ns,
                until_ns=until_ns,
                holder=self._holders.get(planned.name, ""),
                incarnations=self._flipped.get(planned.name, {}),
            )
        )

    # --- targets ----------------------------------------------------------------------------------

    def _targets(self, planned: PlannedFault, seen: Seen | None) -> list[str]:
        kind, fleet = FAULTS[planned.what].target, self._fleet
        names = {
            "worker": list(fleet.hosts),
            "domain": sorted(set(fleet.schedule.workers.values())),
            "control plane": list(fleet.schedule.control_planes),
            "etcd": list(fleet.schedule.etcd),
            "request": [call.request.name for call in fleet.clients.under_way],
        }.get(kind, [])
        if planned.target == "all":
            return names
        if planned.target in names:
            return [planned.target]
        found = ""
        if planned.target == "subject" and seen is not None:
            found = self._watch.subject("worker" if kind == "domain" else kind, seen)
            if kind == "domain":
                found = fleet.schedule.workers.get(found, "")
        elif planned.target in ("leader", "follower"):
            leader = fleet.etcd.leader_name if kind == "etcd" else self._watch.leader
            others = [name for name in names if name != leader]
            found = leader if planned.target == "leader" else next(iter(others), "")
        elif planned.target == "any" and names:
            found = names[int(self._random.random() * len(names))]
        if not found:
            raise CannotStrike(f"there is no {planned.target}")
        return [found]

    # --- workers -------------------------------------------------------------------------------

    def _engine(self, target: str) -> Host:
        host = self._fleet.hosts[target]
        if host.engine is None or not host.engine.process.alive:
            raise CannotStrike(f"{target} has no engine")
        return host

    def _engine_kill(self, planned: PlannedFault, target: str) -> None:
        engine = self._engine(target).engine
        assert engine is not None
        engine.kill()

    def _engine_stop(self, planned: PlannedFault, target: str) -> Undo:
        engine = self._engine(target).engine
        assert engine is not None
        engine.stop()
        return engine.go_on

    def _agent_kill(self, planned: PlannedFault, target: str) -> None:
        host = self._fleet.hosts[target]
        if host.agent is None or not host.agent.process.alive:
            raise CannotStrike(f"{target} has no agent")
        host.end(host.agent.process)

    def _agent_terminate(self, planned: PlannedFault, target: str) -> None:
        host = self._fleet.hosts[target]
        if host.agent is None or not host.agent.process.alive or host.agent.is_leaving:
            raise CannotStrike(f"{target} has no agent that stays")
        host.agent.process.context.run(host.agent.stop, "SIGTERM")

    def _agent_stop(self, planned: PlannedFault, target: str) -> Undo:
        host = self._fleet.hosts[target]
        if host.agent is None or not host.agent.process.alive or host.agent.process.halted:
            raise CannotStrike(f"{target} has no agent that runs")
        host.agent.process.stop()
        return host.agent.process.go_on

    def _worker_slow(self, planned: PlannedFault, target: str) -> Undo:
        host = self._fleet.hosts[target]
        host.slow(planned.amount or 1.0, planned.pause_ms or 0.0)
        return lambda: host.slow(1.0)

    def _cpu_limit(self, planned: PlannedFault, target: str) -> Undo:
        """Slow the engine's work to that share; agent and daemon stop for the rest of each
        period."""
        host, share = self._fleet.hosts[target], planned.amount or 1.0
        host.limit(share)
        throttle = Throttle(self._loop, host.helpers, share)

        def undo() -> None:
            throttle.end()
            host.limit(1.0)

        return undo

    def _reload_fails(self, planned: PlannedFault, target: str) -> None:
        self._fleet.hosts[target].failing_starts += int(planned.amount or 1)

    def _domain_loss(self, planned: PlannedFault, target: str) -> None:
        for name, domain in self._fleet.schedule.workers.items():
            if domain == target:
                self._fleet.hosts[name].lose()

    def _clock_jump(self, planned: PlannedFault, target: str) -> None:
        self._fleet.hosts[target].jump(planned.amount or 0.0)

    def _clock_back(self, planned: PlannedFault, target: str) -> None:
        self._fleet.hosts[target].jump(-(planned.amount or 0.0))

    # --- links ---------------------------------------------------------------------------------

    def _cut(self, planned: PlannedFault, target: str, both: bool = True) -> Undo:
        fleet, kind = self._fleet, planned.peer or ""
        engine = fleet.hosts[target].engine
        if kind == "gateway" and engine is not None and engine.process.alive:
            # Messages sent by now have arrived; later ones wait.
            fleet.clients.flush_everything()
        rule = fleet.wires.cut(target, "", kind, both)
        return lambda: fleet.wires.heal(rule)

    def _cut_from_half(self, planned: PlannedFault, target: str) -> Undo:
        wires, planes = self._fleet.wires, list(self._fleet.planes)
        engine = self._fleet.hosts[target].engine
        if engine is not None and engine.process.alive:
            self._fleet.clients.flush_everything()
        rules = [wires.cut(target, name, "gateway") for name in planes[: len(planes) // 2]]

        def undo() -> None:
            for rule in rules:
                wires.heal(rule)

        return undo

    def _cut_one_way(self, planned: PlannedFault, target: str) -> Undo:
        return self._cut(planned, target, both=False)

    def _link_slow(self, planned: PlannedFault, target: str) -> Undo:
        delay_s = (planned.amount or 0.0) / 1000
        return self._shaped(
            Rule(one=target, other="", kind=planned.peer or "", both=True, delay_s=delay_s)
        )

    def _shaped(self, rule: Rule) -> Undo:
        wires = self._fleet.wires
        wires.shape(rule)
        return lambda: wires.heal(rule)

    def _stream_loss(self, planned: PlannedFault, target: str) -> Undo:
        return self._shaped(
            Rule(one=target, other="", kind="holder", both=True, loss=planned.amount or 0.0)
        )

    def _stream_duplicate(self, planned: PlannedFault, target: str) -> Undo:
        return self._shaped(
            Rule(one=target, other="", kind="holder", both=True, duplicate=planned.amount or 0.0)
        )

    def _stream_reorder(self, planned: PlannedFault, target: str) -> Undo:
        return self._shaped(
            Rule(one=target, other="", kind="holder", both=True, reorder=planned.amount or 0.0)
        )

    # --- answers -------------------------------------------------------------------------------

    def _frame_cut(self, planned: PlannedFault, target: str) -> None:
        engine = self._engine(target).engine
        assert engine is not None
        planes = [plane for plane in self._fleet.planes.values() if plane.running]
        self._random.shuffle(planes)
        if not any(plane.cut_frame(target, engine.incarnation, self._random) for plane in planes):
            raise CannotStrike(f"no answer comes from {target}")

    def _frame_lost(self, planned: PlannedFault, target: str) -> Undo:
        lost = planned.amount or 0.0
        return self._shaped(Rule(one=target, other="", kind="gateway", both=False, frame_lost=lost))

    def _frame_repeated(self, planned: PlannedFault, target: str) -> Undo:
        repeated = planned.amount or 0.0
        return self._shaped(
            Rule(one=target, other="", kind="gateway", both=False, frame_repeated=repeated)
        )

    def _dispatch_refused(self, planned: PlannedFault, target: str) -> Undo:
        host = self._fleet.hosts[target]
        host.refusing = planned.amount or 0.0

        def undo() -> None:
            host.refusing = 0.0

        return undo

    def _engine_errors(self, planned: PlannedFault, target: str) -> Undo:
        host = self._fleet.hosts[target]
        host.erring = planned.amount or 0.0

        def undo() -> None:
            host.erring = 0.0

        return undo

    def _stream_stuck(self, planned: PlannedFault, target: str) -> None:
        engine = self._engine(target).engine
        assert engine is not None
        if engine.process.stopped or not engine.process.context.run(engine.stick, self._random):
            raise CannotStrike(f"{target} decodes nothing")

    def _weights_flipped(self, planned: PlannedFault, target: str) -> None:
        engine = self._engine(target).engine
        assert engine is not None
        if engine.flipped or not engine.serving:
            raise CannotStrike(f"{target} has no engine whose weights are right")
        engine.process.context.run(engine.flush_all)  # what it has made is right
        engine.flipped = True
        self._flipped.setdefault(planned.name, {})[target] = engine.incarnation

    def _weights_flipped_unseen(self, planned: PlannedFault, target: str) -> None:
        self._weights_flipped(planned, target)
        engine = self._engine(target).engine
        assert engine is not None
        engine.unseen = True

    def _model_file_damaged(self, planned: PlannedFault, target: str) -> Undo:
        files = self._fleet.hosts[target].files
        if files.damaged:
            raise CannotStrike(f"the model files of {target} are damaged already")
        files.damaged = True
        return files.replace

    def _record_unreadable(self, planned: PlannedFault, target: str) -> None:
        """Of a kind that a newer build might write, or bytes that no build writes."""
        agent = self._fleet.hosts[target].agent
        if agent is None or not agent.process.alive or agent._journal is None:
            raise CannotStrike(f"{target} has no agent that writes")
        journal = agent._journal
        if not agent.process.context.run(journal.step, self._random.choice(UNREADABLE)):
            raise CannotStrike(f"the log takes nothing of {target} now")

    def _notice_absurd(self, planned: PlannedFault, target: str) -> None:
        engine, agent = self._engine(target).engine, self._fleet.hosts[target].agent
        assert engine is not None
        if agent is None or not agent.process.alive or agent.board is None:
            raise CannotStrike(f"{target} has no agent that says anything")
        epoch = self._random.choice(ABSURD_EPOCHS)
        if not agent.board.send(DeathNotice(epoch, engine.incarnation)):
            raise CannotStrike(f"no replica listens to the agent of {target}")

    def _reports_unreadable(self, planned: PlannedFault, target: str) -> Undo:
        host = self._fleet.hosts[target]
        host.garbling = planned.amount or 0.0

        def undo() -> None:
            host.garbling = 0.0

        return undo

    def _answer_broken(self, planned: PlannedFault, target: str) -> Undo:
        host = self._fleet.hosts[target]
        host.breaking = planned.amount or 0.0

        def undo() -> None:
            host.breaking = 0.0

        return undo

    # --- state daemons -------------------------------------------------------------------------

    def _holder_kill(self, planned: PlannedFault, target: str) -> None:
        if not self._fleet.hosts[target].kill_daemon():
            raise CannotStrike(f"{target} has no state daemon")

    def _holder_stop(self, planned: PlannedFault, target: str) -> Undo:
        daemon = self._fleet.hosts[target].daemon
        if daemon is None or not daemon.process.alive or daemon.process.halted:
            raise CannotStrike(f"{target} has no state daemon that runs")
        daemon.process.stop()
        return daemon.process.go_on

    def _disk_full(self, planned: PlannedFault, target: str) -> Undo:
        disk = self._fleet.hosts[target].disk
        if disk.full or not disk.used:
            raise CannotStrike(f"{target} has nothing in files")
        disk.full = True

        def end_disk_full() -> None:
            disk.full = False

        return end_disk_full

    def _primary_and_holder_kill(self, planned: PlannedFault, target: str) -> None:
        host = self._engine(target)
        holder = self._fleet.holder_of(host)
        if holder is None:
            raise CannotStrike(f"no worker holds blocks of {target}")
        assert host.engine is not None
        host.engine.kill()
        holder.kill_daemon()
        self._holders[planned.name] = holder.name

    def _block_corrupt(self, planned: PlannedFault, target: str) -> None:
        if not self._fleet.hosts[target].corrupt(int(planned.amount or 1), self._random):
            raise CannotStrike(f"{target} holds nothing")

    def _dram_budget(self, planned: PlannedFault, target: str) -> Undo:
        host = self._fleet.hosts[target]
        if not host.shrink(planned.amount or 1.0):
            raise CannotStrike(f"{target} has no state daemon")
        return lambda: host.shrink(1.0)

    # --- control plane -------------------------------------------------------------------------

    def _gateway_kill(self, planned: PlannedFault, target: str) -> None:
        if not self._fleet.kill_plane(target):
            raise CannotStrike(f"{target} does not run")

    def _gateway_cpu_limit(self, planned: PlannedFault, target: str) -> Undo:
        plane = self._fleet.planes[target]
        if not plane.running:
            raise CannotStrike(f"{target} does not run")

        def processes() -> list[Process]:
            return [plane.process] if plane.process is not None else []

        return Throttle(self._loop, processes, planned.amount or 1.0).end

    def _leader_stop(self, planned: PlannedFault, target: str) -> Undo:
        if not self._fleet.stop_plane(target):
            raise CannotStrike(f"{target} does not run")
        return lambda: self._fleet.go_on_plane(target)

    # --- etcd ----------------------------------------------------------------------------------

    def _etcd_kill(self, planned: PlannedFault, target: str) -> Undo | None:
        etcd = self._fleet.etcd
        if not etcd.process(target).alive:
            raise CannotStrike(f"{target} does not run")
        etcd.kill(target)
        if planned.for_ns is not None:
            return lambda: etcd.start(target)
        self._later(ETCD_DOWN_S, etcd.start, target)
        return None

    def _etcd_stop(self, planned: PlannedFault, target: str) -> Undo:
        etcd = self._fleet.etcd
        process = etcd.process(target)
        if not process.alive or process.stopped:
            raise CannotStrike(f"{target} does not run")
        etcd.stop(target)
        return lambda: etcd.go_on(target)

    def _etcd_quota(self, planned: PlannedFault, target: str) -> Undo:
        etcd = self._fleet.etcd
        etcd.no_space = True

        def end_no_space() -> None:
            etcd.no_space = False

        return end_no_space

    def _disk_slow(self, planned: PlannedFault, target: str) -> Undo:
        etcd = self._fleet.etcd
        etcd.slow(target, (planned.amount or 0.0) / 1000)
        return lambda: etcd.slow(target, 0.0)

    # --- clients -------------------------------------------------------------------------------

    def _client_gone(self, planned: PlannedFault, target: str) -> None:
        call = self._fleet.clients.calls.get(target)
        if call is None or call.over:
            raise CannotStrike(f"{target} is not under way")
        call.hang_up()
