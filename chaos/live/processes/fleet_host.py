"""The fleet of one run, with control over each worker's links, forks and clock.

The host interposes only the relays that a scenario's faults need: a fleet without link faults has
none.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import msgspec

from relume.chaos.live.failpoint_server import FailpointServer
from relume.chaos.live.faults.lossy_messages import Disturber
from relume.chaos.live.faults.tcp_links import Link
from relume.chaos.live.processes.engine_forks import Forks
from relume.chaos.live.processes.etcd_members import Etcd
from relume.chaos.live.processes.settings_flags import flags_of
from relume.chaos.live.scale import LEASE_S
from relume.chaos.phases import is_at_failpoint
from relume.chaos.scenario.language import Fleet
from relume.chaos.scenario.schedule import PlannedFault, Schedule
from relume.controlplane.local.child_processes import free_port
from relume.controlplane.local.local_fleet import ENGINE_ENV, FleetOptions, LocalFleet
from relume.controlplane.local.orphans import daemons
from relume.events.failpoints.failpoint_client import ENVIRONMENT

CLOCK = Path(__file__).parents[1] / "clock"
_BLOCKS = ("stream-loss", "stream-duplicate", "stream-reorder")
_REPLICA_CUTS = frozenset(("replica-cut", "replica-calls-lost", "replica-answers-lost"))
_CLOCKS = frozenset(("clock-jump", "clock-back", "clock-drift"))
_REPLICA_CLOCKS = frozenset(f"replica-{fault}" for fault in _CLOCKS)
_GATEWAY_LINKS = frozenset(("frame-cut", "notice-absurd"))
_BY_FAILPOINT = ("engine-errors", "record-unreadable")
NEVER = ("--snapshot-every-s", "1000000", "--snapshot-every-revisions", "100000000")
"""Flags that keep the whole log of a run in etcd, unless etcd is full."""


def _has_failpoint(fault: PlannedFault) -> bool:
    """Whether the fault strikes by a failpoint, or at one."""
    return is_at_failpoint(fault) or bool(fault.pause_ms) or fault.what in _BY_FAILPOINT


class Host(LocalFleet):
    """A local fleet that faults can strike. `etcd` has its log, under `prefix`.

    `etcd_links`: from each worker or replica to each member; `gateway_links`: to a worker's engine
    and to its agent's notices; `disturbers`: in front of each worker's state daemon; `forks`: in front of the
    zygote; `failpoints`: of agents, engines and state daemons. Each is empty or None if no fault of the
    schedule needs it.
    """

    def __init__(
        self,
        options: FleetOptions,
        schedule: Schedule,
        etcd: Etcd,
        prefix: str,
        say: Callable[[str], None],
    ) -> None:
        super().__init__(options, say)
        self.schedule = schedule
        self.etcd = etcd
        self.prefix = prefix
        self.etcd_links: dict[str, list[Link]] = {}
        self.gateway_links: dict[str, list[Link]] = {}
        self.disturbers: dict[str, Disturber] = {}
        self.forks: Forks | None = None
        self.failpoints: FailpointServer | None = None
        self.canary_s = 0.0
        """Time between two canaries to a worker; 0: the agent's own."""
        self.out_of_log: set[str] = set()
        """Workers whose agents cannot write any more, and so do not run, until the end."""
        self._whats = frozenset(fault.what for fault in schedule.faults)
        self._ports: dict[str, tuple[int, int]] = {}
        self._stack = AsyncExitStack()

    async def _start(self) -> None:
        try:
            await self._interpose(self.schedule.faults)
            await super()._start()
        except BaseException:
            await self._stack.aclose()
            raise

    async def stop(self) -> None:
        """End all processes and links of this run."""
        await super().stop()
        await self._stack.aclose()

    async def _interpose(self, faults: Sequence[PlannedFault]) -> None:
        whats, peers = self._whats, {f.peer for f in faults}
        if whats & _REPLICA_CUTS:
            for name in self.schedule.control_planes:
                self.etcd_links[name] = await self._linked_to_etcd()
        for index, name in enumerate(self.schedule.workers):
            if "etcd" in peers:
                self.etcd_links[name] = await self._linked_to_etcd()
            if "gateway" in peers or whats & _GATEWAY_LINKS:
                host = f"127.0.1.{index + 1}"
                self._ports[name] = free_port(), free_port()
                links = [Link(f"127.0.0.1:{port}", host, port) for port in self._ports[name]]
                self.gateway_links[name] = [await self._stack.enter_async_context(x) for x in links]
            if "holder" in peers or whats & set(_BLOCKS):
                link = await self._stack.enter_async_context(Disturber())
                self.disturbers[name] = link
        if self.disturbers:
            self.options = msgspec.structs.replace(
                self.options,
                checkpoint_link="plain",
                checkpoint_advertise=tuple(f"127.0.0.1:{d.port}" for d in self.disturbers.values()),
            )
        if "reload-fails" in whats:
            path = self.dir / "forks.sock"
            self.forks = await self._stack.enter_async_context(Forks(path, self.options.zygote))

        if any(_has_failpoint(fault) for fault in faults):
            server = FailpointServer(self.dir / "failpoints.sock")
            self.failpoints = await self._stack.enter_async_context(server)

    async def _linked_to_etcd(self) -> list[Link]:
        links = [Link(endpoint) for endpoint in self.etcd.endpoints]
        return [await self._stack.enter_async_context(link) for link in links]

    def _prepare_checkpoints(self) -> None:
        super()._prepare_checkpoints()
        if self.checkpoints is not None:
            for disturber, port in zip(
                self.disturbers.values(), self.checkpoints.ports, strict=False
            ):
                disturber.target = port

    def agent_flags(self, index: int) -> list[str]:
        """Flags for its domain, its link to the log, and the links that lead to it."""
        name = f"w{index}"
        endpoints = self.etcd.endpoints
        if links := self.etcd_links.get(name):
            endpoints = tuple(link.endpoint for link in links)
        flags = ["--domain", self.schedule.workers[name]]
        flags += ["--etcd", f"http://{','.join(endpoints)}{self.prefix}"]
        if links := self.gateway_links.get(name):
            engine, notices = self._ports[name]
            flags += ["--advertise-host", links[0].host]
            flags += ["--engine-port", str(engine), "--notice-port", str(notices)]
        if self.options.checkpoint_file_mb:
            flags += ["--checkpoint-cold-after-s", "0"]
        if self.forks is not None:
            flags += ["--zygote", str(self.forks.path)]
        if self.canary_s:  # more often than its budget allows: so that a short run has enough
            flags += ["--canary-interval-s", str(self.canary_s), "--canary-budget-ppm", "1000000"]
        return flags

    def agent_env(self, index: int) -> dict[str, str]:
        """Environment with the file of its clock's error, if a fault changes clocks, and with the
        server of its failpoints, if a fault needs one."""
        failpoints = {ENVIRONMENT: str(self.failpoints.path)} if self.failpoints else {}
        clock = self._clock_env(f"w{index}") if self._whats & _CLOCKS else {}
        return {**ENGINE_ENV, **failpoints, **clock}

    def replica_flags(self, index: int) -> list[str]:
        """Flags for its link to the log."""
        if links := self.etcd_links.get(f"r{index}"):
            return ["--etcd", ",".join(link.endpoint for link in links)]
        return []

    def replica_env(self, index: int) -> dict[str, str]:
        """Environment with the file of its clock's error, if a fault changes clocks of replicas."""
        return self._clock_env(f"r{index}") if self._whats & _REPLICA_CLOCKS else {}

    def _clock_env(self, name: str) -> dict[str, str]:
        path = os.pathsep.join(filter(None, (str(CLOCK), os.environ.get("PYTHONPATH", ""))))
        return {"PYTHONPATH": path, "RELUME_CLOCK": str(self.clock_of(name))}

    def clock_of(self, name: str) -> Path:
        """The file with the error in seconds of the clock of a worker's agent, or of a replica."""
        return self.dir / "run" / f"{name}.clock"

    # --- targets to strike ------------------------------------------------------------------

    def engine_pid(self, worker: str) -> int:
        """The engine that its agent has recorded; 0: none. Read from the agent's file, since the
        log may be unreachable."""
        record = self._state(worker).get("engine")
        return record["process"][0] if record else 0

    def agent_pid(self, worker: str) -> int:
        """Its agent; 0: dead."""
        child = self.children[worker]
        return child.pid if child.alive else 0

    def daemon_pid(self, worker: str) -> int:
        """Its host's state daemon; 0: none."""
        record = self._state(worker).get("daemon")
        pid = record["process"][0] if record else 0
        return pid if pid in daemons(self.dir / "run") else 0

    def _state(self, worker: str) -> dict:
        try:
            return json.loads((self.dir / "run" / worker / "state.json").read_bytes())
        except (OSError, ValueError):
            return {}

    def pids(self) -> list[int]:
        """Pids of all live processes that this run started."""
        found = [child.pid for child in self.children.values() if child.alive]
        found += [pid for name in self.schedule.workers if (pid := self.engine_pid(name))]
        return found + daemons(self.dir / "run")


def options_of(
    schedule: Schedule,
    directory: Path,
    model: Path,
    zygote: str,
    etcd: Etcd,
    prefix: str,
    fleet: Fleet,
) -> FleetOptions:
    """Options of a `Host` for a schedule of `fleet`."""
    endpoints = ",".join(etcd.endpoints)
    return FleetOptions(
        workers=len(schedule.workers),
        replicas=len(schedule.control_planes),
        state_dir=str(directory),
        model=str(model),
        port=0,
        admin_port=0,
        lease_ttl_s=LEASE_S,
        etcd=endpoints,
        zygote=zygote,
        ready_timeout_s=120.0,
        checkpoint_mb=fleet.checkpoint_mb,
        checkpoint_file_mb=fleet.checkpoint_file_mb,
        replica_args=("--prefix", prefix, *NEVER, *flags_of(fleet.settings)),
    )


async def gone(pids: Sequence[int], timeout_s: float = 10.0) -> list[int]:
    """Wait until these processes have exited; return those that have not after `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while left := [pid for pid in pids if Path(f"/proc/{pid}").exists()]:
        if asyncio.get_running_loop().time() > deadline:
            break
        await asyncio.sleep(0.05)
    return left
