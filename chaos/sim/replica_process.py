"""A control plane replica as a simulated process: the real `Replica` behind a simulated gateway.

A replica that ends, by itself (fenced, no log) or killed, restarts after `RESTART_S` under its name
and with its spool, as a supervisor would do it. HTTP and sockets of the real code use the simulated
network (`transport`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from random import Random
from typing import Any, Protocol

from msgspec.structs import replace

from relume.chaos.sim.gateway.sim_gateway import SimGateway
from relume.chaos.sim.world.http_transport import standing_in
from relume.chaos.sim.world.network import Wires
from relume.chaos.sim.world.virtual_loop import Process, VirtualLoop
from relume.controlplane.history.continuity.last_seen import LastSeen
from relume.controlplane.replica.former_log.log_loss import (
    is_log_lost,
    learn_log_id,
    name_log,
    outlive_log,
)
from relume.controlplane.replica.loop import Replica, ReplicaConfig
from relume.events.etcd.maintenance import Maintenance
from relume.events.etcd.reader.log_reader import EtcdReader
from relume.events.log.errors import LogError, first_cause
from relume.policies.state.fleet import Fleet

RESTART_S = 1.0
GATHER_S = 0.05
PORT = 8000
DRAIN_S = 25.0
"""Maximum time for which it outlives its log."""


class Log(Protocol):
    """Interface of `etcd.SimEtcd` for processes."""

    def writer(
        self, stream: str, process: Process, *, wait_s: float = 0.0, gather_s: float = 0.0
    ) -> Any:
        """A StreamWriter to enter."""
        ...

    def reader(self, process: Process) -> EtcdReader:
        """A reader of the whole log."""
        ...

    def maintenance(self, process: Process) -> Maintenance | None:
        """For the id of the log, if another one may take its place."""
        ...

    @property
    def log_number(self) -> int:
        """Counts the states that are no successors of those before."""
        ...


class Plane:
    """Replica `name`, on a host of its own."""

    def __init__(
        self,
        loop: VirtualLoop,
        wires: Wires,
        log: Log,
        name: str,
        config: ReplicaConfig | None = None,
        takeover_s: float = 16.0,
        model: str = "",
    ) -> None:
        """`model`: the one that clients of the fleet name."""
        self.name = name
        self.address = f"{name}:{PORT}"
        self.process: Process | None = None
        """The live process."""
        self.replica: Replica | None = None
        """The replica that serves now."""
        self.gateway: SimGateway | None = None
        self.losses = 0
        """How often it ended because its log was gone."""
        self.log_number = 0
        """`SimEtcd.log_number` at its start."""
        self._config = replace(config or ReplicaConfig(), name=name, host=name, port=PORT)
        self._loop = loop
        self._wires = wires
        self._log = log
        self._takeover_s = takeover_s
        self._model = model
        self._clock_s = 0.0
        loop.stand_ins["control plane"] = lambda: standing_in(wires)

    @property
    def running(self) -> bool:
        """Whether it serves, or is stopped while serving."""
        return self.replica is not None

    @property
    def leading(self) -> bool:
        """Whether it owns stream `fleet`."""
        return self.replica is not None and self.replica.leadership.leading

    @property
    def fleet(self) -> Fleet:
        """Its fold; empty while it does not run."""
        return self.replica.fleet if self.replica is not None else Fleet()

    def start(self) -> None:
        """Start it, unless it lives."""
        if self.process is not None:
            return
        process = self.process = self._loop.process(self.name)
        process.clock_s = self._clock_s
        process.at_death.append(self._gone)
        process.spawn(self._live(process))

    def kill(self) -> None:
        """kill -9; its supervisor restarts it."""
        if self.process is not None:
            self.process.kill()

    def stop(self) -> None:
        """SIGSTOP."""
        if self.process is not None:
            self.process.stop()

    def go_on(self) -> None:
        """SIGCONT."""
        if self.process is not None:
            self.process.go_on()

    def jump(self, seconds: float) -> None:
        """The wall clock of its host jumps, forward or back."""
        self._clock_s += seconds
        if self.process is not None:
            self.process.clock_s += seconds

    def cut_frame(self, worker: str, incarnation: int, random: Random) -> bool:
        """Break the connection of one answer from that engine; False: there is none."""
        process, gateway = self.process, self.gateway
        if process is None or process.stopped or gateway is None:
            return False
        return process.context.run(gateway.cut_frame, worker, incarnation, random)

    def _gone(self) -> None:
        self.process = self.replica = self.gateway = None
        self._loop.call_later(RESTART_S, self.start)

    async def _live(self, process: Process) -> None:
        try:
            await self._serve(process)
        except Exception as raised:
            error = first_cause(raised)
            if not isinstance(error, LogError):
                self._loop.failures.append(error)
                raise
        process.kill()

    async def _serve(self, process: Process) -> None:
        """Run like `relume.controlplane.replica.serve`."""
        self.log_number = self._log.log_number
        opening = self._log.writer(
            f"r.{self.name}", process, wait_s=self._takeover_s, gather_s=GATHER_S
        )
        async with opening as writer:
            reader = self._log.reader(process)
            replica = Replica(
                self._config, reader, writer, lambda stream: self._log.writer(stream, process)
            )
            reader.on_damage = replica.damaged.note
            maintenance = self._log.maintenance(process)
            seen = None
            if maintenance is not None:
                spools = maintenance.client.config.spool_dir
                seen = LastSeen.of_replica(spools, self.name, maintenance)
                await self._noticing_loss(seen.check())
            await replica.catch_up()
            if maintenance is not None:
                await name_log(maintenance)
                replica.scheduler.decisions.log_id = await maintenance.identity()
            gateway = SimGateway(replica.scheduler, self._wires, process)
            gateway.model = self._model
            await gateway.start()
            self.replica, self.gateway = replica, gateway
            self._wires.serve(self.address, process, gateway)
            if maintenance is None or seen is None:
                await replica.run(gateway)
                return
            try:
                await self._noticing_loss(_run(replica, gateway, seen, maintenance))
            except (LogError, BaseExceptionGroup) as raised:
                if is_log_lost(raised):
                    await self._outlive_log(gateway)
                raise

    async def _noticing_loss(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except (LogError, BaseExceptionGroup) as raised:
            self.losses += is_log_lost(raised)
            raise

    async def _outlive_log(self, gateway: SimGateway) -> None:
        """As `relume.controlplane.replica.serve`: open streams end, then it exits."""
        self.replica = None
        self._wires.stop_listening(self.address)
        await outlive_log(gateway, DRAIN_S, asyncio.Event())
        await gateway.stop()


async def _run(
    replica: Replica, gateway: SimGateway, seen: LastSeen, maintenance: Maintenance
) -> None:
    """As `relume.controlplane.replica.serve`, where the log may be replaced."""
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(learn_log_id(replica.scheduler.decisions, maintenance), name="log-id")
        tasks.create_task(seen.keep_noting(replica.fleet), name="last-seen")
        tasks.create_task(replica.run(gateway), name="replica")
        tasks.create_task(gateway.join(), name="gateway")
