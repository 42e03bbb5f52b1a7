"""A worker's host in virtual time: its processes, and their restarts.

`engine` and `agent` are the live processes (None: there is none). Faults strike here; the agent
reacts to them.
"""

from __future__ import annotations

import asyncio
from random import Random

from relume.chaos.sim import agent as agents
from relume.chaos.sim.agent import EngineHandle, Feed, SimAgent
from relume.chaos.sim.daemon import DaemonSlot, SimDaemon
from relume.chaos.sim.daemon_keeper import SimKeeper
from relume.chaos.sim.engine.host_types import HostSpec
from relume.chaos.sim.engine.speed import Drafts
from relume.chaos.sim.engine.step_cost import StepCost
from relume.chaos.sim.engine.worker_engine import EXACT, EngineProcess
from relume.chaos.sim.engine_checkpoints import EngineCheckpoints, fingerprint_of
from relume.chaos.sim.etcd.members import SimEtcd
from relume.chaos.sim.world.network import Wires
from relume.chaos.sim.world.virtual_loop import Process, VirtualLoop
from relume.chaos.sim.world.worker_machine import Machine, WorkerSettings
from relume.engine_shim.agent.engine_process.engine_hosts import EngineOrder
from relume.engine_shim.agent.journal import Journal
from relume.events.wire.reports import Layout, Ready

EXIT_S = (0.05, 0.6)
"""Delay from an agent's end to its engine's."""
RESTART_S, LONGEST_RESTART_S = 0.5, 30.0
"""Delay before a dead agent is restarted, doubled each time."""


class Host(Machine):
    """One worker's host: its machine, and the processes on it."""

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
        holders: dict[str, DaemonSlot],
        feed: Feed,
        file_bytes: int = 0,
    ) -> None:
        """`budget_bytes` of its state daemon, 0: none, and `file_bytes` of its files; `holders`:
        the state daemons of all hosts, by endpoint; `feed`: the leader's events for agents."""
        super().__init__(loop, name, model, spec, cost, wires, settings)
        self.domain = domain
        self.budget_bytes = budget_bytes
        self.holders = holders
        self.slot = DaemonSlot(self, budget_bytes, file_bytes)
        if budget_bytes:
            holders[self.slot.address] = self.slot
        self.etcd = etcd
        self.feed = feed
        self.config = agents.config_of(name, domain, model, settings)
        self.agent: SimAgent | None = None
        self.engine: EngineProcess | None = None
        self.failing_starts = 0
        """Number of further starts of an engine that fail."""
        self.off = False
        self._restart_s = RESTART_S / 2

    @property
    def is_right(self) -> bool:
        """Whether its engine computes right results, and its files are whole."""
        engine = self.engine
        return not self.files.damaged and not (engine and (engine.wrong or engine.flipped))

    @property
    def daemon(self) -> SimDaemon | None:
        """The last state daemon that was started."""
        return self.slot.daemon

    def start(self) -> None:
        """Start the agent, which starts the other processes."""
        process = self.loop.process(f"{self.name}.agent")
        process.clock_s = self.clock_s
        self.agent = SimAgent(self, process)
        process.at_death.append(self._agent_died)
        process.spawn(self._run(self.agent), f"{self.name}.agent")

    async def _run(self, agent: SimAgent) -> None:
        try:
            await agent.run()
        except (Exception, BaseExceptionGroup) as error:
            if not agents.expected(error):
                raise
        self.end(agent.process)

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
        """Make the agent leave, without a restart before `come`."""
        self.off = True
        if self.agent is not None and self.agent.process.alive:
            self.agent.process.context.run(self.agent.stop, "asked to")

    def come(self) -> None:
        """Run an agent from now on."""
        self.off = False
        self._again()

    async def start_engine(self, order: EngineOrder) -> EngineHandle:
        """Start the next engine, which loads for a while."""
        agent = self.agent
        assert agent is not None
        await asyncio.sleep(agents.FORK_S)
        reports = agent.reports
        engine = self.engine = EngineProcess(self, order.incarnation, reports.send)
        if self.budget_bytes:
            engine.checkpoints = EngineCheckpoints(engine, self.holders)
        handle = EngineHandle(engine, agent.process)
        spec, settings = self.spec, self.settings
        reload_s = spec.reload_s if settings.reload_s is None else settings.reload_s
        load_s = reload_s * (1 + settings.jitter * (2 * self.random.random() - 1))
        load_s /= self.share
        if self.failing_starts:
            self.failing_starts -= 1
            engine.process.call_at(self.loop.time() + load_s / 2, engine.exit, "could not load")
            return handle

        def loaded() -> None:
            engine.serve()
            if self.slower != 1 or self.pause_ns:
                engine.pace()
            family, size = self.layout()
            exact: dict[str, bool | str] = dict.fromkeys(EXACT, True)
            ready = Ready(
                port=9000 + order.incarnation,
                max_model_len=spec.max_model_len,
                block_size=spec.block_tokens,
                kv_blocks=spec.kv_blocks,
                model=self.model,
                vllm="sim",
                exact=exact,
                hardware="sim",
                step_tokens=spec.max_tokens,
                max_seqs=spec.max_seqs,
            )
            agent.process.call_soon(reports.on_layout, Layout(family, size))
            agent.process.call_soon(reports.on_ready, ready)

        engine.process.call_at(self.loop.time() + load_s, loaded)
        return handle

    # --- faults ----------------------------------------------------------------------------

    def slow(self, factor: float, pause_ms: float = 0.0) -> None:
        """Make steps `factor` times as long, and begin each after a pause, also those of later
        engines."""
        self.factor, self.pause_ns = factor, round(pause_ms * 1e6)
        self._paced()

    def limit(self, share: float) -> None:
        """Slow the engines' work to that share of a core."""
        self.share = share
        self._paced()

    def helpers(self) -> list[Process]:
        """Live processes other than the engine."""
        found = [self.agent, self.daemon]
        return [one.process for one in found if one is not None and one.process.alive]

    def draft(self, drafts: Drafts | None) -> None:
        """Have another host draft for the engine from its next step on; None: no longer."""
        self.drafts = drafts
        self._paced()

    def _paced(self) -> None:
        if self.engine is not None and self.engine.serving:
            self.engine.pace()

    def jump(self, seconds: float) -> None:
        """The wall clock jumps, forward or back."""
        self.clock_s += seconds
        for process in self.processes:
            process.clock_s += seconds

    @property
    def processes(self) -> list[Process]:
        """Live processes."""
        found = [self.agent, self.engine, self.daemon]
        return [one.process for one in found if one is not None and one.process.alive]

    def lose(self) -> None:
        """Kill every process at once, the agent first: no process is left to report the others."""
        for process in self.processes:
            if self.engine is not None and process is self.engine.process:
                self.engine.kill()
            else:
                self.end(process)

    def kill_daemon(self) -> bool:
        """kill -9 of the state daemon; False: there is none."""
        if self.daemon is None or not self.daemon.process.alive:
            return False
        self.daemon.kill()
        return True

    def corrupt(self, blocks: int, random: Random) -> bool:
        """Flip bits in `count` held blocks; False: the daemon is empty."""
        daemon = self.daemon
        return daemon is not None and daemon.process.alive and daemon.corrupt(blocks, random) > 0

    def shrink(self, share: float) -> bool:
        """Shrink the state daemon's budget to this share; False: there is none."""
        if self.daemon is None or not self.daemon.process.alive:
            return False
        self.daemon.process.context.run(self.daemon.shrink, share)
        return True

    # --- checkpoints -------------------------------------------------------------------------

    def layout(self) -> tuple[str, int]:
        """Family and bytes of a checkpoint's blocks; empty without checkpoints."""
        if not self.budget_bytes:
            return "", 0
        return fingerprint_of(self).family.hex(), self.spec.block_bytes

    def keeper_of(self, process: Process, journal: Journal) -> SimKeeper | None:
        """The keeper of the host's state daemon, if it has one."""
        return SimKeeper(self.slot, self.config, process, journal) if self.budget_bytes else None
