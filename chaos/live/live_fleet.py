"""One run of a scenario on real processes.

    fleet up -> undisturbed answers -> traffic and faults -> all mended, at rest -> log read

In every case, the run ends every process that it started. Runs may overlap: a fleet comes up while
the one before it comes to rest (`Turn`). Traffic and faults have the machine to themselves.
"""

from __future__ import annotations

import asyncio
import shutil
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from relume.chaos.live import applicable
from relume.chaos.live.errors import LiveError
from relume.chaos.live.faults.live_faults import Faults
from relume.chaos.live.live_clients import Clients, wrong_beginnings
from relume.chaos.live.live_operator import Operator
from relume.chaos.live.log_watch import Watch
from relume.chaos.live.processes.fleet_host import Host, gone, options_of
from relume.chaos.live.processes.shared_fixture import Bed
from relume.chaos.live.quiesce import at_rest
from relume.chaos.live.scale import scaled
from relume.chaos.live.timing import TRAFFIC_S, Plan
from relume.chaos.outcome import FiredFault, Outcome
from relume.chaos.scenario.language import Scenario
from relume.chaos.scenario.schedule import Schedule, expand
from relume.chaos.validators.former_log import RENEWAL, of_present_log
from relume.controlplane.local.local_fleet import FleetFailed
from relume.controlplane.replay.recorded_log import History, from_etcd
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.log.errors import RelumeError
from relume.events.log.interface import LandedSegment, RevisionGroup

REST_S = 60.0
Say = Callable[[str], None]


def run(
    scenario: Scenario,
    seed: int,
    *,
    schedule: Schedule | None = None,
    folder: Path | None = None,
    say: Say = print,
) -> Outcome:
    """Run a scenario on its own shared fixture. `schedule`: its expansion by the seed, if known;
    `folder`: destination of the processes' logs and files. Raises LiveError."""

    async def alone() -> Outcome:
        async with Bed(say) as bed:
            return await run_in(bed, scenario, seed, schedule=schedule, folder=folder, say=say)

    return asyncio.run(alone())


class Turn:
    """Progress of a run, for the next one: its traffic and faults are over (`struck`), nothing of
    it is left (`gone`, since `gone_s`, monotonic)."""

    def __init__(self) -> None:
        self.struck = asyncio.Event()
        self.gone = asyncio.Event()
        self.gone_s = 0.0

    def over(self) -> None:
        """Nothing of the run is left."""
        self.gone_s = time.monotonic()
        self.struck.set()
        self.gone.set()


async def run_in(
    bed: Bed,
    scenario: Scenario,
    seed: int,
    *,
    schedule: Schedule | None = None,
    folder: Path | None = None,
    say: Say = print,
    before: Turn | None = None,
    turn: Turn | None = None,
) -> Outcome:
    """Run a scenario in a shared fixture, which may have served runs before. The outcome's `error`
    says why the run itself failed. The traffic waits until the run `before` is gone; `turn` gets
    the progress of this one. Raises LiveError if a fault of it cannot strike real processes."""
    if obstacles := applicable.obstacles(scenario):
        raise LiveError(f"{scenario.name} cannot run live: {'; '.join(obstacles)}")
    scenario, schedule, notes = scaled(scenario, schedule or expand(scenario, seed))
    if notes:
        say(f"{scenario.name} is scaled to this machine: {'; '.join(notes)}")
    turn = turn or Turn()
    one = _Run(bed, scenario, schedule, say, before, turn)
    try:
        return await one.go()
    finally:
        turn.over()
        if folder is not None:
            shutil.copytree(one.directory, folder, dirs_exist_ok=True, ignore=_NOT_FILES)
        shutil.rmtree(one.directory, ignore_errors=True)


_NOT_FILES = shutil.ignore_patterns("*.sock", "ipc*", "*.clock", "spool", "secret", "lock")


class _Run:
    """The state of one run."""

    def __init__(
        self,
        bed: Bed,
        scenario: Scenario,
        schedule: Schedule,
        say: Say,
        before: Turn | None,
        turn: Turn,
    ) -> None:
        self._bed = bed
        self._scenario = scenario
        self._schedule = schedule
        self._say = say
        self._before = before
        self._turn = turn
        self.directory, self._prefix = bed.place(scenario.name)
        self._watch = Watch()
        self._groups: tuple[RevisionGroup, ...] = ()
        self._landed: tuple[LandedSegment, ...] = ()
        self._clients: Clients | None = None
        self._plan: Plan | None = None
        self._operator: Operator | None = None
        self._began_ms = 0
        self._ended_ns = 0
        self._drained = False

    async def go(self) -> Outcome:
        error = ""
        try:
            async with AsyncExitStack() as stack:
                await self._act(stack)
        except (FleetFailed, RelumeError, OSError, TimeoutError, ExceptionGroup) as caught:
            error = _described(caught)
            self._say(f"the run failed: {error}")
            self._bed.discard(*self._etcd_kind())
        return Outcome(
            kind="live",
            scenario=self._scenario,
            schedule=self._schedule,
            groups=self._groups,
            histories=tuple(self._clients.histories) if self._clients is not None else (),
            fired=self._fired(),
            began_ms=self._began_ms,
            ended_ns=self._ended_ns,
            drained=self._drained,
            error=error,
            landed=self._landed,
            former=tuple(self._watch.former),
            commands=tuple(self._operator.acknowledged) if self._operator is not None else (),
        )

    def _etcd_kind(self) -> tuple[int, bool, bool]:
        """Number of members, whether a fault cuts the links between them, and whether one restores it."""
        whats = {planned.what for planned in self._schedule.faults}
        return len(self._schedule.etcd), "etcd-cut" in whats, RENEWAL in whats

    def _fired(self) -> tuple[FiredFault, ...]:
        return tuple(self._plan.fired) if self._plan is not None else ()

    async def _act(self, stack: AsyncExitStack) -> None:
        schedule, etcd = self._schedule, await self._bed.etcd(*self._etcd_kind())
        options = options_of(
            schedule, self.directory, self._bed.model, self._bed.zygote, etcd, self._prefix,
            self._scenario.fleet,
        )  # fmt: skip
        host = Host(options, schedule, etcd, self._prefix, lambda text: None)
        host.canary_s = self._scenario.fleet.canary_s
        pids: list[int] = []
        stack.push_async_callback(self._nothing_left, pids)
        began = time.monotonic()
        await stack.enter_async_context(host)
        config = EtcdConfig(endpoints=etcd.endpoints, prefix=self._prefix)
        log = await stack.enter_async_context(EtcdLog(config))
        self._watch.make_reader = log.reader
        for task in (self._watch.follow(log.reader()), host.supervise()):
            running = asyncio.create_task(task)
            stack.push_async_callback(_ended, running)
        clients = self._clients = Clients(
            schedule, host.gateways, f"c{schedule.seed}", self._bed.known
        )
        if host.checkpoints is not None and not await self._watch.until(
            lambda f: (
                len(f.holders) == len(schedule.workers) and all(h.alive for h in f.holders.values())
            ),
            REST_S,
        ):
            raise LiveError("the state daemons did not come up")
        up_s = time.monotonic() - began
        await clients.learn()
        if wrong := wrong_beginnings(clients.histories):
            raise LiveError(f"undisturbed requests failed: {'; '.join(wrong[:3])}")
        learnt_s = time.monotonic() - began - up_s
        if self._before is not None:
            await self._before.gone.wait()
            await etcd.healthy()
        self._watch.phases.forget_lengths()
        pids += host.pids()
        self._began_ms, start = time.time_ns() // 1_000_000, time.monotonic()
        await self._strike(host, clients)
        struck_s = time.monotonic() - start
        self._turn.struck.set()
        pids += host.pids()
        if self._watch.former:
            clients.histories = of_present_log(
                clients.histories, self._fired(), set(self._watch.clients.values())
            )
        why = await at_rest(host, self._watch, clients.histories, REST_S, self._say)
        self._drained = not why
        self._ended_ns = round((time.monotonic() - start) * 1e9)
        pids += host.pids()
        self._groups, self._landed = await read(
            self._watch, from_etcd(config, self.directory / "archive")
        )
        if why:
            raise LiveError(f"the fleet did not come to rest: {why}")
        self._say(
            f"up {up_s:.1f} s, undisturbed {learnt_s:.1f} s, struck {struck_s:.1f} s, "
            f"at rest after {self._ended_ns / 1e9:.1f} s, {len(self._groups)} revisions"
        )

    async def _strike(self, host: Host, clients: Clients) -> None:
        """Run traffic and faults until both are over."""
        schedule = self._schedule
        operator = self._operator = Operator(host)
        operating = None
        if any(planned.phase == "effect" for planned in schedule.faults):
            operating = asyncio.create_task(operator.run())
        faults = Faults(host, self._watch, clients, schedule.seed)
        plan = self._plan = Plan(schedule, host, self._watch, clients, faults, self._say)
        try:
            async with asyncio.timeout(TRAFFIC_S), asyncio.TaskGroup() as tasks:
                striking = tasks.create_task(plan.run())
                await clients.run(plan.pending)
                plan.no_more()
                await striking
        finally:
            if operating is not None:
                operating.cancel()
                await asyncio.gather(operating, return_exceptions=True)
            await plan.mend()
        await operator.settle()

    async def _nothing_left(self, pids: list[int]) -> None:
        """Check, after all was stopped, that no process of the run is left."""
        if left := await gone(pids):
            raise LiveError(f"processes are left: {left}")


async def read(
    watch: Watch, reading: Awaitable[History]
) -> tuple[tuple[RevisionGroup, ...], tuple[LandedSegment, ...]]:
    """The log, and the appends seen before: a later append may be missing in the log as read."""
    landed = watch.landed()
    return tuple((await reading).groups), landed


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancel a task that runs as long as the fleet; its failure is the run's failure."""
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if not task.cancelled() and (error := task.exception()) is not None:
        raise LiveError(f"{task.get_coro()}: {error}")


def _described(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(_described(one) for one in error.exceptions)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
