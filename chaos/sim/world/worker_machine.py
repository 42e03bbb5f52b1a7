"""A worker's machine: the state of a host that outlives its processes.

Daemon, engine and agent know the machine they run on. The host (`relume.chaos.sim.worker_host`)
starts them.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import copy_context
from pathlib import Path
from random import Random
from typing import Any, Protocol

from msgspec import Struct

from relume.chaos.scenario.language import Disorder
from relume.chaos.sim.engine.host_types import HostSpec
from relume.chaos.sim.engine.speed import (
    AssistedStepCost,
    Drafts,
    PausedStepCost,
    SlowedStepCost,
)
from relume.chaos.sim.engine.step_cost import StepCost
from relume.chaos.sim.world.model_files import HostFiles
from relume.chaos.sim.world.network import Wires
from relume.chaos.sim.world.network_card import Links
from relume.chaos.sim.world.virtual_loop import Process, VirtualLoop
from relume.engine_shim.agent.run_directory import AgentState, RunDirectory


class TruthRecorder(Protocol):
    """Records what processes really have when they report (`relume.chaos.sim.truth`)."""

    def engine_reports(self, engine: Any, event: Any) -> None:
        """An engine writes a report about its requests."""
        ...

    def engine_states(self, engine: Any) -> None:
        """An engine reports all its requests to a new log."""
        ...

    def engine_serves(self, worker: str, serving: bool) -> None:
        """The engine of a worker serves from now on, or no longer."""
        ...

    def daemon_reports(self, daemon: Any, journal: Any, event: Any) -> None:
        """The agent has just recorded what a state daemon holds; `event` is the last of it."""
        ...


class WorkerSettings(Struct, frozen=True, kw_only=True):
    """Settings of workers that a scenario cannot express. `reload_s` None: that of the hardware
    class; `jitter`: maximum relative deviation of loading times. `exact_links`: an engine reads its
    own host's daemon at `local_bytes_s`, else as if over the network. Blocks for a full link wait in
    the engine, else in the link, ahead of restores. A busy receiver delays no other traffic. An
    engine restores one request after the other, like the real loading thread, over connections
    that share the link fairly. `measured_links`: engines measure the bandwidth to their holders.
    `canary_interval_s`: between canaries (0: none). `disorder`: of what agents hear and say."""

    lease_ttl_s: int = 8
    prefix_cache: bool = True
    reload_s: float | None = None
    jitter: float = 0.1
    exact_links: bool = False
    measured_links: bool = False
    canary_interval_s: float = 0.0
    disorder: Disorder = Disorder()


class HostDirectory(RunDirectory):
    """An agent's run directory, which outlives the agent; the disk is not simulated."""

    def __init__(self, name: str) -> None:
        self.path = Path("/nowhere") / name
        self.engine_log = self.path / "engine.log"
        self.state = AgentState()

    def _write(self, state: AgentState) -> None:
        pass


class Disk:
    """A host's disk. `used`: bytes of its daemon's file; `full`: writes fail."""

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
        self.random = Random(f"{loop.random.random()}:{name}")
        self.directory = HostDirectory(name)
        self.disk = Disk()
        self.files = HostFiles(model)
        self.factor = self.share = 1.0
        """Factor of slow steps, and share of a core for processes."""
        self.pause_ns = 0
        """Pause of its engine before each step."""
        self.drafts: Drafts | None = None
        """Whether, and how, another host drafts for this one's engine."""
        self.seen: Callable[[str, Any], None] | None = None
        """Called with each event that an engine reports."""
        self.met: Callable[[str, str], None] | None = None
        """Called with each attempt's request, and its `content_id`."""
        self.truth: TruthRecorder | None = None
        """Records what its processes really have."""
        self._root = copy_context()

    refusing = breaking = erring = garbling = 0.0
    """Share of requests that its engine refuses, share of answers that it breaks off, share of
    requests that it answers with an error, and share of its step reports that cannot be read."""
    clock_s = 0.0
    """Seconds by which the machine's wall clock is ahead."""

    def end(self, process: Process) -> None:
        """Kill a process; its effects run outside the processes that died with it."""
        self._root.copy().run(process.kill)

    def later(self, seconds: float, work: Callable[..., object], *args: Any) -> None:
        """Run `work`, regardless of whether processes live."""
        self.loop.call_at(self.loop.time() + seconds, work, *args, context=self._root.copy())

    @property
    def steps(self) -> StepCost:
        """The current cost of steps."""
        cost = self.cost if self.drafts is None else AssistedStepCost(self.cost, self.drafts)
        if self.slower != 1:
            cost = SlowedStepCost(cost, self.slower)
        return PausedStepCost(cost, self.pause_ns) if self.pause_ns else cost

    @property
    def slower(self) -> float:
        """Factor for the duration of steps."""
        return self.factor / self.share
