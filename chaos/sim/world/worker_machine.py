"""A worker's machine: what of a host outlives its processes.

Daemon, engine and agent know the machine they run on, and not one another's starters: those are
the host's (`relume.chaos.sim.worker_host`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from random import Random
from typing import Any

from msgspec import Struct

from relume.chaos.sim.engine.host_types import HostSpec
from relume.chaos.sim.engine.speed import Assisted, Drafts, Slowed
from relume.chaos.sim.engine.step_cost import StepCost
from relume.chaos.sim.world.network import Wires
from relume.chaos.sim.world.network_card import Links
from relume.chaos.sim.world.virtual_loop import Process, VirtualLoop
from relume.engine_shim.agent.run_directory import AgentState, RunDirectory


class WorkerSettings(Struct, frozen=True, kw_only=True):
    """What the scenario does not say of workers. `reload_s` None: as the hardware class has it;
    `jitter`: share by which loading takes longer or shorter. `exact_links`: an engine reads
    its own host's daemon at `local_bytes_s`, else as if over the network; and blocks that find
    a link full wait in the engine, else in the link, before what is to be restored; a busy receiver
    holds up no other traffic; and an engine restores one request after the other, as the real one's
    loading thread does, over connections that share the link fairly. `measured_links`: engines
    measure what the links to their holders carry."""

    lease_ttl_s: int = 8
    prefix_cache: bool = True
    reload_s: float | None = None
    jitter: float = 0.1
    exact_links: bool = False
    measured_links: bool = False


class HostDirectory(RunDirectory):
    """A run directory on a disk that is not simulated: it outlives the agent."""

    def __init__(self, name: str) -> None:
        self.path = Path("/nowhere") / name
        self.engine_log = self.path / "engine.log"
        self.state = AgentState()

    def _write(self, state: AgentState) -> None:
        pass


class Disk:
    """A host's. `used`: bytes of its daemon's file; `full`: nothing more can be written."""

    def __init__(self) -> None:
        self.used = 0
        self.full = False


class Machine:
    """One worker's machine."""

    def __init__(
        self,
        loop: VirtualLoop,
        name: str,
        model: str,
        spec: HostSpec,
        cost: StepCost,
        wires: Wires,
        settings: WorkerSettings,
    ) -> None:
        self.loop = loop
        self.name = name
        self.model = model
        self.spec = spec
        self.cost = cost
        self.net = self.wires = wires
        self.settings = settings
        self.links = Links(spec.link_bytes_s, settings.exact_links)
        self.local = Links(spec.local_bytes_s) if settings.exact_links else self.links
        self.daemon_links, self.daemon_delay_s = self.links, 0.0
        """What carries the blocks its daemon holds to other hosts, and s before it begins to."""
        self.random = Random(f"{loop.random.random()}:{name}")
        self.directory = HostDirectory(name)
        self.disk = Disk()
        self.warm: dict[str, int] = {}
        """Tokens that need no computing in the first attempt at what a client asked."""
        self.factor = self.share = 1.0
        """Steps take so many times as long; and processes get such a share of a core."""
        self.drafts: Drafts | None = None
        """Another host drafts for this one's engine."""
        self.seen: Callable[[str, Any], None] | None = None
        """Called with each event an engine tells."""
        self.met: Callable[[str, str], None] | None = None
        """Called with each attempt's request, and what its client asked."""
        self._root = copy_context()

    refusing = breaking = 0.0
    """Its engine refuses such a share of the requests that come, and breaks such a share of its
    answers off."""
    clock_s = 0.0
    """What the machine's wall clock is ahead."""

    def end(self, process: Process) -> None:
        """Kill a process; its effects run outside the processes that died with it."""
        self._root.copy().run(process.kill)

    def later(self, seconds: float, work: Callable[..., object], *args: Any) -> None:
        """Run `work`, whether processes live or not."""
        self.loop.call_at(self.loop.time() + seconds, work, *args, context=self._root.copy())

    @property
    def steps(self) -> StepCost:
        """What steps take now."""
        cost = self.cost if self.drafts is None else Assisted(self.cost, self.drafts)
        return cost if self.slower == 1 else Slowed(cost, self.slower)

    @property
    def slower(self) -> float:
        """Steps take so many times as long."""
        return self.factor / self.share
