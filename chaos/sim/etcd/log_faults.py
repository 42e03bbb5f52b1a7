"""Faults of etcd's members and of the ways to them, of clocks, and of spools, on a simulated fleet.

The first group strikes members, the second replicas. A torn spool is what a host that loses power
leaves: the batch that was being written is in the file in part, and what was synced before is whole.
In a corrupt spool the last record that was synced is damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from random import Random
from typing import Any, Protocol

from relume.chaos.scenario.schedule import PlannedFault
from relume.chaos.sim.etcd.members import SimEtcd
from relume.chaos.sim.etcd.restored_etcd import RestoredEtcd
from relume.chaos.sim.world.link_rules import Rule
from relume.chaos.sim.world.network import Wires
from relume.chaos.sim.world.virtual_loop import Process, VirtualLoop

Undo = Callable[[], object]
DEFRAGMENT_S = 2.0
"""For how long a member that defragments answers nothing: about 1 GB."""
REPLACE_S = 4.0
"""Time from the end of a member to the start of the one that replaces it."""
STRAY = 1 << 20, 1 << 40
"""How far ahead of a stream's last segment a stray key stands: no writer comes to it."""
DRIFT_STEP_S = 0.1
"""Period in which a drifting clock is moved."""


class CannotStrike(Exception):
    """Nothing to strike now."""


class Clocked(Protocol):
    """A host with a wall clock."""

    def jump(self, seconds: float) -> None:
        """The wall clock jumps, forward or back."""
        ...


class LeaseClock:
    """The clock by which a member counts leases while it leads."""

    def __init__(self, etcd: SimEtcd, member: str) -> None:
        self._etcd = etcd
        self._member = member

    def jump(self, seconds: float) -> None:
        """It jumps forward."""
        if self._etcd.leader_name == self._member:
            self._etcd.jump(seconds)


class LogTargets(Protocol):
    """Targets of these faults."""

    loop: VirtualLoop
    wires: Wires
    etcd: SimEtcd

    @property
    def hosts(self) -> Mapping[str, Any]:
        """Workers' hosts, by name."""
        ...

    @property
    def planes(self) -> Mapping[str, Any]:
        """Replicas, by name."""
        ...

    def kill_plane(self, name: str) -> bool:
        """kill -9 of a replica; False when it does not run."""
        ...


class LogFaults:
    """Strikes the log of one run's fleet; a part of `sim_faults.Faults`."""

    _fleet: LogTargets
    _random: Random
    restored: list[RestoredEtcd]
    """Backups of etcd that were made."""

    # --- members -----------------------------------------------------------------------------

    def _etcd_cut(self, planned: PlannedFault, target: str) -> Undo:
        """A member that is cut from its peers and one whose disk hangs differ for people, not for
        clients: both accept calls, and answer none that needs the others."""
        etcd = self._fleet.etcd
        etcd.isolate(target)
        return lambda: etcd.rejoin(target)

    _disk_hangs = _etcd_cut

    def _etcd_defragment(self, planned: PlannedFault, target: str) -> None:
        etcd = self._fleet.etcd
        process = etcd.process(target)
        if not process.alive or process.stopped:
            raise CannotStrike(f"{target} does not run")
        etcd.stop(target)
        self._fleet.loop.call_later(DEFRAGMENT_S, etcd.go_on, target)

    def _etcd_replace(self, planned: PlannedFault, target: str) -> None:
        """The others must be a majority without it, or nobody could agree on the new member."""
        etcd = self._fleet.etcd
        if not etcd.is_dispensable(target):
            raise CannotStrike(f"there is no majority without {target}")
        etcd.kill(target)
        self._fleet.loop.call_later(REPLACE_S, etcd.start, target)

    def _etcd_restored(self, planned: PlannedFault, target: str) -> Undo | None:
        """A backup has what the cluster has, whatever its number of members."""
        fleet = self._fleet
        if planned.target == "all" and target != fleet.etcd.members[0]:
            return None
        restored = RestoredEtcd(fleet.loop, fleet.etcd, fleet.planes, fleet.hosts, self._random)
        if not restored.log_id:
            raise CannotStrike("the log has no id yet")
        self.restored.append(restored)
        return restored.renew

    def _watch_silent(self, planned: PlannedFault, target: str) -> Undo:
        etcd = self._fleet.etcd
        if not etcd.process(target).alive:
            raise CannotStrike(f"{target} does not run")
        etcd.silence(target)
        return lambda: etcd.end_silence(target)

    def _segment_damaged(self, planned: PlannedFault, target: str) -> None:
        if not self._fleet.etcd.damage(f"w.{target}", self._random.randint(1, 4)):
            raise CannotStrike("etcd has no leader")

    def _stray_key(self, planned: PlannedFault, target: str) -> None:
        for stream in (f"r.{target}", "fleet"):
            if not self._fleet.etcd.damage(stream, self._random.randint(*STRAY)):
                raise CannotStrike("etcd has no leader")

    def _etcd_clock_jump(self, planned: PlannedFault, target: str) -> None:
        if target != self._fleet.etcd.leader_name:
            raise CannotStrike(f"{target} does not lead: it counts no leases")
        self._fleet.etcd.jump(planned.amount or 0.0)

    def _etcd_clock_drift(self, planned: PlannedFault, target: str) -> Undo:
        if target != self._fleet.etcd.leader_name:
            raise CannotStrike(f"{target} does not lead: it counts no leases")
        return self._drift(LeaseClock(self._fleet.etcd, target), planned.amount or 0.0)

    # --- replicas ----------------------------------------------------------------------------

    def _replica_cut(self, planned: PlannedFault, target: str) -> Undo:
        return self._cut_replica(Rule(one=target, other="", kind="etcd", both=True, cut=True))

    def _replica_calls_lost(self, planned: PlannedFault, target: str) -> Undo:
        return self._cut_replica(Rule(one=target, other="", kind="etcd", both=False, cut=True))

    def _replica_answers_lost(self, planned: PlannedFault, target: str) -> Undo:
        return self._cut_replica(Rule(one="", other=target, kind="etcd", both=False, cut=True))

    def _cut_replica(self, rule: Rule) -> Undo:
        wires = self._fleet.wires
        wires.shape(rule)
        return lambda: wires.heal(rule)

    def _replica_clock_jump(self, planned: PlannedFault, target: str) -> None:
        self._fleet.planes[target].jump(planned.amount or 0.0)

    def _replica_clock_back(self, planned: PlannedFault, target: str) -> None:
        self._fleet.planes[target].jump(-(planned.amount or 0.0))

    def _replica_clock_drift(self, planned: PlannedFault, target: str) -> Undo:
        return self._drift(self._fleet.planes[target], planned.amount or 0.0)

    def _clock_drift(self, planned: PlannedFault, target: str) -> Undo:
        return self._drift(self._fleet.hosts[target], planned.amount or 0.0)

    def _drift(self, host: Clocked, ppm: float) -> Undo:
        """Move the clock of `host` by its error, step after step."""
        loop, over = self._fleet.loop, False

        def step() -> None:
            if not over:
                host.jump(DRIFT_STEP_S * ppm / 1e6)
                loop.call_later(DRIFT_STEP_S, step)

        def end() -> None:
            nonlocal over
            over = True

        step()
        return end

    # --- spools ------------------------------------------------------------------------------

    def _replica_spool_torn(self, planned: PlannedFault, target: str) -> None:
        self._fleet.etcd.tear(self._spooling_replica(target), self._random)
        self._fleet.kill_plane(target)

    def _replica_spool_corrupt(self, planned: PlannedFault, target: str) -> None:
        self._fleet.etcd.corrupt(self._spooling_replica(target), self._random)
        self._fleet.kill_plane(target)

    def _agent_spool_torn(self, planned: PlannedFault, target: str) -> None:
        process = self._spooling_agent(target)
        self._fleet.etcd.tear(process, self._random)
        self._fleet.hosts[target].end(process)

    def _agent_spool_corrupt(self, planned: PlannedFault, target: str) -> None:
        process = self._spooling_agent(target)
        self._fleet.etcd.corrupt(process, self._random)
        self._fleet.hosts[target].end(process)

    def _spooling_replica(self, target: str) -> Process:
        process = self._fleet.planes[target].process
        if process is None or not self._fleet.etcd.spooling(process):
            raise CannotStrike(f"{target} spools nothing")
        return process

    def _spooling_agent(self, target: str) -> Process:
        agent = self._fleet.hosts[target].agent
        if agent is None or not agent.process.alive or not self._fleet.etcd.spooling(agent.process):
            raise CannotStrike(f"{target} spools nothing")
        return agent.process
