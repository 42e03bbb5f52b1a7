"""A worker's host in virtual time: what of it outlives its processes, and who starts them again.

`engine` and `agent` are the processes that live now (None: none does). Faults strike here;
what follows from them is the agent's doing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextvars import copy_context
from random import Random
from typing import TYPE_CHECKING, Any

from msgspec import Struct

from relume.chaos.sim import agent as agents
from relume.chaos.sim.agent import EngineHandle, Feed, HostDirectory, SimAgent
from relume.chaos.sim.checkpoints import EngineCheckpoints, Links, fingerprint_of
from relume.chaos.sim.cost import StepCost
from relume.chaos.sim.daemon import Disk, SimDaemon
from relume.chaos.sim.etcd import SimEtcd
from relume.chaos.sim.hosts import HostSpec
from relume.chaos.sim.keeper import SimKeeper
from relume.chaos.sim.loop import Process, VirtualLoop
from relume.chaos.sim.network import Wires
from relume.chaos.sim.speed import Assisted, Drafts, Slowed
from relume.chaos.sim.worker_engine import EXACT, EngineProcess
from relume.engine_shim.agent_hosts import EngineOrder
from relume.engine_shim.reports import Layout, Ready

if TYPE_CHECKING:
    from relume.engine_shim.agent_journal import Journal

EXIT_S = (0.05, 0.6)
"""An engine ends so soon after its agent."""
RESTART_S, LONGEST_RESTART_S = 0.5, 30.0
"""A dead agent is started again after so long, doubled each time."""


class WorkerSettings(Struct, frozen=True):
    """What the scenario does not say of workers. `reload_s` None: as the hardware class has it;
    `jitter`: share by which loading takes longer or shorter. `exact_links`: an engine reads
    its own host's daemon at `local_bytes_s`, else as if over the network; and blocks that find
    a link full wait in the engine, else in the link, before what is to be restored; a busy
    receiver holds up nobody else's traffic; and an engine restores one request after the other,
    as the real one's loading thread does, over connections that share the link fairly.
    `measured_links`: engines measure what the links to their holders carry."""

    lease_ttl_s: int = 8
    prefix_cache: bool = True
    reload_s: float | None = None
    jitter: float = 0.1
    exact_links: bool = False
    measured_links: bool = False


class Host:
    """One worker's host."""

    def __init__(
        self,
        loop: VirtualLoop,
        name: str,
        domain: str,
        model: str,
        spec: HostSpec,
        cost: StepCost,
        wires: Wires,
        etcd: SimEtcd,
        settings: WorkerSettings,
        budget_bytes: int,
        holders: dict[str, Host],
        feed: Feed,
        file_bytes: int = 0,
    ) -> None:
        """`budget_bytes` of its state daemon, 0: none, and `file_bytes` of its files;
        `holders`: hosts by the endpoint of theirs; `feed`: what all agents of the fleet
        follow."""
        self.loop = loop
        self.name = name
        self.domain = domain
        self.model = model
        self.spec = spec
        self.cost = cost
        self.net = self.wires = wires
        self.budget_bytes = budget_bytes
        self.file_bytes = file_bytes
        self.holders = holders
        self.holder_address = f"tcp://{name}:6000"
        if budget_bytes:
            holders[self.holder_address] = self
        self.links = Links(spec.link_bytes_s, settings.exact_links)
        self.local = Links(spec.local_bytes_s) if settings.exact_links else self.links
        self.shelf, self.shelf_s = self.links, 0.0
        """What carries what its daemon holds to other hosts, and s before it begins to."""
        self.daemon: SimDaemon | None = None
        self.etcd = etcd
        self.feed = feed
        self.settings = settings
        self.random = Random(f"{loop.random.random()}:{name}")
        self.directory = HostDirectory(name)
        self.config = agents.config_of(name, domain, model, settings.lease_ttl_s)
        self.agent: SimAgent | None = None
        self.engine: EngineProcess | None = None
        self.failing_starts = 0
        """So many further starts of an engine fail."""
        self.loads: list[float] = []
        """What the next starts take to load, s; those behind them as the settings say."""
        self.warm: dict[str, int] = {}
        """Tokens that need no computing in the first attempt at what a client asked."""
        self.factor = self.share = 1.0
        """Steps take so many times as long; and processes get such a share of a core."""
        self.disk = Disk()
        self.drafts: Drafts | None = None
        """Another host drafts for this one's engine."""
        self.off = False
        self.seen: Callable[[str, Any], None] | None = None
        """Called with each event an engine tells."""
        self.met: Callable[[str, str], None] | None = None
        """Called with each attempt's request, and what its client asked."""
        self._root = copy_context()
        self._restart_s = RESTART_S / 2

    def start(self) -> None:
        """Start the agent, which starts the rest."""
        process = self.loop.process(f"{self.name}.agent")
        process.clock_s = self.clock_s
        self.agent = SimAgent(self, process)
        process.at_death.append(self._agent_died)
        process.spawn(self._run(self.agent), f"{self.name}.agent")

    clock_s = 0.0
    """What the host's wall clock is ahead."""

    async def _run(self, agent: SimAgent) -> None:
        try:
            await agent.run()
        except (Exception, BaseExceptionGroup) as error:
            if not agents.expected(error):
                raise
        self.end(agent.process)

    def end(self, process: Process) -> None:
        """Kill a process; what follows from that is nobody's who died with it."""
        self._root.copy().run(process.kill)

    def later(self, seconds: float, work: Callable[..., object], *args: Any) -> None:
        """Run `work`, whoever lives then."""
        self.loop.call_at(self.loop.time() + seconds, work, *args, context=self._root.copy())

    def _agent_died(self) -> None:
        """Its engine reads EOF; the host starts another agent."""
        engine = self.engine
        if engine is not None and engine.process.alive:
            low, high = EXIT_S
            at = self.loop.time() + low + (high - low) * self.random.random()
            engine.process.call_at(at, engine.exit, "its agent is gone")
        self._restart_s = min(2 * self._restart_s, LONGEST_RESTART_S)
        self.later(self._restart_s, self._again)

    def _again(self) -> None:
        if not self.off and (self.agent is None or not self.agent.process.alive):
            self.start()

    def leave(self) -> None:
        """The agent is asked to leave, and not started again before `come`."""
        self.off = True
        if self.agent is not None and self.agent.process.alive:
            self.agent.process.context.run(self.agent.stop, "asked to")

    def come(self) -> None:
        """It runs an agent from now on."""
        self.off = False
        self._again()

    async def start_engine(self, order: EngineOrder) -> EngineHandle:
        """Start the next engine, which loads for a while."""
        agent = self.agent
        assert agent is not None
        await asyncio.sleep(agents.FORK_S)
        reports = agent.reports
        engine = self.engine = EngineProcess(self, order.incarnation, reports.send)
        handle = EngineHandle(engine, agent.process)
        spec, settings = self.spec, self.settings
        reload_s = spec.reload_s if settings.reload_s is None else settings.reload_s
        load_s = reload_s * (1 + settings.jitter * (2 * self.random.random() - 1))
        if self.loads:
            load_s = self.loads.pop(0)
        load_s /= self.share
        if self.failing_starts:
            self.failing_starts -= 1
            engine.process.call_at(self.loop.time() + load_s / 2, engine.exit, "could not load")
            return handle

        def loaded() -> None:
            engine.serve()
            if self.slower != 1:
                engine.pace()
            family, size = self.layout()
            exact: dict[str, bool | str] = dict.fromkeys(EXACT, True)
            ready = Ready(
                9000 + order.incarnation, spec.max_model_len, spec.block_tokens, spec.kv_blocks,
                self.model, "sim", exact, "sim", spec.max_tokens,
            )  # fmt: skip
            agent.process.call_soon(reports.on_layout, Layout(family, size))
            agent.process.call_soon(reports.on_ready, ready)

        engine.process.call_at(self.loop.time() + load_s, loaded)
        return handle

    # --- faults ----------------------------------------------------------------------------

    def slow(self, factor: float) -> None:
        """Steps take `factor` times as long from now on, also of engines to come."""
        self.factor = factor
        self._paced()

    def limit(self, share: float) -> None:
        """What engines do takes as long as on such a share of a core."""
        self.share = share
        self._paced()

    def helpers(self) -> list[Process]:
        """Processes beside the engine that live."""
        found = [self.agent, self.daemon]
        return [one.process for one in found if one is not None and one.process.alive]

    def draft(self, drafts: Drafts | None) -> None:
        """Another host drafts for the engine from its next step on; None: no longer."""
        self.drafts = drafts
        self._paced()

    def _paced(self) -> None:
        if self.engine is not None and self.engine.serving:
            self.engine.pace()

    @property
    def steps(self) -> StepCost:
        """What steps take now."""
        cost = self.cost if self.drafts is None else Assisted(self.cost, self.drafts)
        return cost if self.slower == 1 else Slowed(cost, self.slower)

    @property
    def slower(self) -> float:
        """Steps take so many times as long."""
        return self.factor / self.share

    def jump(self, seconds: float) -> None:
        """The wall clock jumps, forward or back."""
        self.clock_s += seconds
        for process in self.processes:
            process.clock_s += seconds

    @property
    def processes(self) -> list[Process]:
        """Those that live."""
        found = [self.agent, self.engine, self.daemon]
        return [one.process for one in found if one is not None and one.process.alive]

    def lose(self) -> None:
        """Every process dies at once, the agent first: nobody is left to tell of the rest."""
        for process in self.processes:
            if self.engine is not None and process is self.engine.process:
                self.engine.kill()
            else:
                self.end(process)

    def kill_daemon(self) -> bool:
        """kill -9 of the state daemon; False without one."""
        if self.daemon is None or not self.daemon.process.alive:
            return False
        self.daemon.kill()
        return True

    def corrupt(self, blocks: int, random: Random) -> bool:
        """Flip bits in so many held blocks; False when nothing is held."""
        daemon = self.daemon
        return daemon is not None and daemon.process.alive and daemon.corrupt(blocks, random) > 0

    def shrink(self, share: float) -> bool:
        """Leave the state daemon this share of its budget; False without one."""
        if self.daemon is None or not self.daemon.process.alive:
            return False
        self.daemon.process.context.run(self.daemon.shrink, share)
        return True

    # --- checkpoints -------------------------------------------------------------------------

    def start_daemon(self, epoch: int) -> SimDaemon:
        """A new state daemon, which holds nothing."""
        self.daemon = SimDaemon(self, epoch, self.budget_bytes, self.file_bytes)
        self.daemon.process.clock_s = self.clock_s
        return self.daemon

    def layout(self) -> tuple[str, int]:
        """Family and bytes of a checkpoint's blocks; empty without checkpoints."""
        if not self.budget_bytes:
            return "", 0
        return fingerprint_of(self).family.hex(), self.spec.block_bytes

    def checkpoints_of(self, engine: EngineProcess) -> EngineCheckpoints | None:
        """The engine's part of checkpointing, if it takes part."""
        return EngineCheckpoints(engine, self.holders) if self.budget_bytes else None

    def keeper_of(self, process: Process, journal: Journal) -> Any:
        """Who speaks for the host's state daemon, if it has one."""
        return SimKeeper(self, process, journal) if self.budget_bytes else None
