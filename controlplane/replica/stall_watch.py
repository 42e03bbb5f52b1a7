"""The stall watchdog: finds engines that hold streams but make no progress.

It looks at what the token path last saw of each engine and at when the fold last got one
of its steps, probes the engine itself if both are silent (`/relume/state`), lets
`relume.policies.liveness.stall` judge, writes the judgement, and breaks the streams of a hung
engine so that they continue elsewhere. Suspected engines are probed again until they answer.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import aiohttp
import msgspec
import structlog

from relume.controlplane.gateway.ports import Activity, GatewayPort
from relume.controlplane.replica.engine_calls import LOST, UNUSABLE, url_of
from relume.controlplane.replica.scheduler import Scheduler
from relume.events import vocabulary as v
from relume.events.log.errors import LogError
from relume.events.log.interface import RevisionGroup
from relume.events.vocabulary.enums import (
    EnginePhase,
    HealthState,
    ProbeResult,
    TimerKind,
    TransportKind,
)
from relume.events.wire.worker_calls import PROBE_PATH, STATE_PATH
from relume.policies.liveness import stall
from relume.policies.state.fleet import Worker

PROBE_MIN_S = 0.2
RECHECK_S = 0.25
FOUND_HUNG = "its agent found it hung"
LOOKS_APART_S = 0.25
"""Time for an engine to show work between two probes, also on a busy machine."""
log = structlog.get_logger("relume.stall")


class EngineState(msgspec.Struct, kw_only=True):
    """The part of `/relume/state` that identifies the engine and its progress.
    `steps` counts engine steps, `turns` those of its loop; `step_age_us` is the age of the step in
    execution (0: none), `expected_us` the longest that it should take (-1: unknown); `cpu_us` the
    CPU time of the thread that steps, `wait_us` the time it waited for a CPU; `unfinished` the
    requests its HTTP side waits for."""

    worker: str
    incarnation: int
    running: int = 0
    waiting: int = 0
    steps: int = -1
    step_age_us: int = 0
    cpu_us: int = -1
    unfinished: int = 0
    expected_us: int = -1
    wait_us: int = -1
    turns: int = -1

    @property
    def held(self) -> int:
        """Requests it has, by whichever source has more."""
        return max(self.running + self.waiting, self.unfinished)


class Probe(msgspec.Struct, frozen=True):
    """An answer, or why there is none."""

    outcome: ProbeResult
    state: EngineState | None = None


class StallWatch:
    """One for a replica. `now` is the loop's clock in seconds."""

    def __init__(
        self,
        scheduler: Scheduler,
        gateway: GatewayPort,
        now: Callable[[], float],
        period_s: float = 0.1,
    ) -> None:
        self._scheduler = scheduler
        self._gateway = gateway
        self._now = now
        self._period_s = period_s
        self._last_step: dict[str, float] = {}
        self._probing: dict[tuple[str, int], asyncio.Task[None]] = {}
        self._next_check: dict[tuple[str, int], float] = {}
        self._looked: dict[tuple[str, int], tuple[float, Probe]] = {}
        """The first look at an engine since it was last heard, which was then."""
        self._due: dict[tuple[str, int], float] = {}
        """Before then an engine cannot have been silent for half the least bound."""
        self._left = False
        self._hung: list[v.EngineHung] = []
        self._corrupt: list[v.HealthDecided] = []
        self._session: aiohttp.ClientSession | None = None
        self._judged = 0

    def seen(self, stream: str, position: int, event: Any) -> None:
        """Called with each event folded: an engine step is progress."""
        kind = type(event)
        if kind is v.EngineStep:
            if event.duration_us > 0:
                self._last_step[stream[2:]] = self._now()
        elif kind in (v.EngineDied, v.WorkerDeregistered, v.WorkerForgotten):
            self._left = True
        elif kind is v.EngineHung:
            self._hung.append(event)
        elif kind is v.HealthDecided and event.state == HealthState.QUARANTINED:
            self._corrupt.append(event)

    def folded(self, group: RevisionGroup) -> None:
        """Called when a whole group was folded: streams leave engines that their agents found
        hung, and those that the leader quarantined."""
        corrupt, self._corrupt = self._corrupt, []
        for decided in corrupt:
            self._leave_corrupt(decided.worker, decided.incarnation, decided.evidence[:200])
        found, self._hung = self._hung, []
        for event in found:
            activity = self._gateway.activity.get((event.worker, event.incarnation))
            if activity is not None and activity.open_streams:
                self._leave(event.worker, event.incarnation, FOUND_HUNG)

    def _leave_corrupt(self, name: str, incarnation: int, evidence: str) -> None:
        """Streams leave a quarantined engine. Those that left it before have tokens of it too."""
        elsewhere = self._scheduler.served_before(name, incarnation)
        self._gateway.break_streams(name, incarnation, TransportKind.CORRUPT, evidence)
        for live in elsewhere:
            detail = f"{name}:{incarnation} served it before: {evidence}"[:200]
            request = live.arrival.request
            self._gateway.doubt_stream(live.worker, live.incarnation, request, detail)

    def _leave(self, name: str, incarnation: int, evidence: str) -> None:
        """Suspect the engine and break its streams, which continue elsewhere."""
        if (name, incarnation) not in self._scheduler.view.suspects():
            self._tell(lambda: v.WorkerSuspected(name, incarnation, evidence))
        self._gateway.break_streams(name, incarnation, TransportKind.STALL, evidence)

    async def run(self) -> None:
        """Watch for ever; the caller owns the task."""
        try:
            async with asyncio.TaskGroup() as tasks:
                while True:
                    await asyncio.sleep(self._look(tasks))
        finally:
            if self._session is not None:
                await self._session.close()

    def _look(self, tasks: asyncio.TaskGroup) -> float:
        """Probe the engines that are due; returns the time until the next can be: half the least
        bound, from the last sign of the engine silent longest, and at least the period."""
        now = self._now()
        workers = self._scheduler.view.fleet.workers
        if self._left:
            self._left = False
            self._forget(now)
        config = stall.config_of(self._scheduler.view)
        activities, due = self._gateway.activity, self._due
        if len(due) > len(activities):
            due = self._due = {key: at for key, at in due.items() if key in activities}
        least_s = config.floor_us / 2e6
        soonest = now + least_s
        for key, activity in activities.items():
            at = due.get(key, 0.0)
            if at <= now:
                at = due[key] = self._judge(tasks, key, activity, now, config)
            soonest = min(soonest, at)
        suspects = self._scheduler.view.suspects()
        for name, incarnation in suspects:
            worker = workers[name]
            if worker.incarnation == incarnation and worker.engine == EnginePhase.READY:
                self._start(tasks, worker, self._recheck(worker, incarnation))
        return self._period_s if suspects else max(self._period_s, soonest - now)

    def _forget(self, now: float) -> None:
        """Engines that are gone and have no stream here any more, and workers that are."""
        workers, activities = self._scheduler.view.fleet.workers, self._gateway.activity
        for name, incarnation in [k for k, a in activities.items() if not a.open_streams]:
            worker = workers.get(name)
            if (
                worker is None
                or worker.incarnation != incarnation
                or worker.engine != EnginePhase.READY
            ):
                del activities[name, incarnation]
        self._last_step = {n: at for n, at in self._last_step.items() if n in workers}
        self._looked = {k: look for k, look in self._looked.items() if k[0] in workers}
        due = self._next_check.items()
        self._next_check = {k: at for k, at in due if at > now and k[0] in workers}

    def _judge(
        self,
        tasks: asyncio.TaskGroup,
        key: tuple[str, int],
        activity: Activity,
        now: float,
        config: stall.StallConfig,
    ) -> float:
        """Probe the engine if it is due; returns before when another check is useless."""
        (name, incarnation), least_s = key, config.floor_us / 2e6
        worker = self._scheduler.view.fleet.workers.get(name)
        if worker is None or activity.open_streams == 0 or worker.incarnation != incarnation:
            return now + least_s
        last = max(activity.last_byte, self._last_step.get(name, 0.0))
        bound = stall.bound_us(worker, config)
        if (now - last) * 2e6 >= bound:
            self._start(tasks, worker, self._examine(worker, incarnation, bound))
        return max(last + least_s, now + self._period_s)

    def _start(self, tasks: asyncio.TaskGroup, worker: Worker, work: Any) -> None:
        key = (worker.name, worker.incarnation)
        if key in self._probing or self._next_check.get(key, 0.0) > self._now():
            work.close()
            return
        task = tasks.create_task(work)
        self._probing[key] = task
        task.add_done_callback(lambda _: self._probing.pop(key, None))

    async def _examine(self, worker: Worker, incarnation: int, bound: int) -> None:
        """Probe a silent engine while the rest of its bound runs, then judge it. The last probe may
        be answered until the cap, if the bound is shorter."""
        name, key = worker.name, (worker.name, incarnation)
        activity = self._gateway.activity.get(key)
        if activity is None:
            return
        last = max(activity.last_byte, self._last_step.get(name, 0.0))
        deadline = last + bound / 1e6
        given_up = last + stall.config_of(self._scheduler.view).cap_us / 1e6
        heard, before = self._looked.pop(key, (0.0, Probe(ProbeResult.NONE)))
        if heard != last:
            first_s = max(PROBE_MIN_S, deadline - self._now() - PROBE_MIN_S)
            before = await self._ask(worker, incarnation, first_s)
        second_at = deadline - PROBE_MIN_S
        if before.outcome == ProbeResult.ANSWERED:
            second_at = max(second_at, self._now() + LOOKS_APART_S)
        while (wait_s := second_at - self._now()) > 0:
            await asyncio.sleep(wait_s)
        after = await self._ask(worker, incarnation, max(PROBE_MIN_S, given_up - self._now()))
        if (wait_s := deadline - self._now()) > 0:
            await asyncio.sleep(wait_s)
        progress = max(activity.last_byte, self._last_step.get(name, 0.0))
        if progress + bound / 1e6 > deadline or worker.incarnation != incarnation:
            return
        if activity.open_streams == 0:
            return
        self._tell(lambda: v.TimerFired(TimerKind.STALL, f"{name}:{incarnation}"))
        silent_us = int((self._now() - progress) * 1e6)
        look = _look_of(before, after)
        self._judged += 1
        scheduler = self._scheduler
        config = stall.config_of(scheduler.view)
        bound = stall.bound_us(worker, config)
        hung = stall.hung(silent_us, look, bound, config)
        self._tell(
            lambda: v.StallJudged(
                decision=f"{scheduler.view.replica}.{scheduler.decisions.boot}.stall{self._judged}",
                basis=scheduler.decisions.basis(),
                worker=name,
                incarnation=incarnation,
                silent_us=silent_us,
                probe=look.probe,
                probe_steps=look.steps,
                step_age_us=look.step_age_us,
                bound_us=bound,
                hung=hung,
                cpu_us=look.cpu_us,
                held=look.held,
                expected_us=look.expected_us,
                wait_us=look.wait_us,
                turns=look.turns,
            )
        )
        self._next_check[key] = self._now() + RECHECK_S
        if not hung and look.expected_us >= 0:
            # What its thread does adds up, until a turn of its loop.
            self._looked[key] = progress, after if look.steps > 0 or look.turns > 0 else before
        if hung:
            log.warning("engine_hung", worker=name, incarnation=incarnation, silent_us=silent_us)
            self._leave(name, incarnation, f"silent, probe {look.probe}")

    async def _recheck(self, worker: Worker, incarnation: int) -> None:
        """Probe a suspected engine twice; one that works or waits for work is cleared."""
        key = (worker.name, incarnation)
        before = await self._ask(worker, incarnation, PROBE_MIN_S * 2)
        if before.outcome == ProbeResult.ANSWERED:
            await asyncio.sleep(PROBE_MIN_S / 2)
            after = await self._ask(worker, incarnation, PROBE_MIN_S * 2)
        self._next_check[key] = self._now() + RECHECK_S
        if before.outcome != ProbeResult.ANSWERED:
            return
        look = _look_of(before, after)
        if look.held == 0 and look.expected_us >= 0:
            # Its server answers, but the loop behind it may hang: an idle one takes a turn if asked.
            turned = await self._turns(worker)
            look = msgspec.structs.replace(look, turns=look.turns + turned)
        if worker.incarnation != incarnation or not stall.recovered(look):
            return
        evidence = stall.evidence_of(look)
        cleared = v.WorkerCleared(
            worker.name,
            incarnation,
            evidence,
            probe=look.probe,
            steps=look.steps,
            cpu_us=look.cpu_us,
            held=look.held,
            step_age_us=look.step_age_us,
            expected_us=look.expected_us,
            turns=look.turns,
        )
        if self._tell(lambda: cleared):
            self._scheduler.wake()
            log.info("engine_cleared", worker=worker.name, evidence=evidence)

    def _tell(self, event: Callable[[], Any]) -> bool:
        """Write what `event` returns (taking a basis writes too); False when the log does
        not take it. Clients of a hung engine must not wait for room in a spool."""
        try:
            self._scheduler.emit(event())
        except LogError as error:
            log.warning("stall_not_written", reason=str(error))
            return False
        return True

    async def _ask(self, worker: Worker, incarnation: int, timeout_s: float) -> Probe:
        """Probe `worker`; another process at its address refuses."""
        try:
            async with self._get(worker, STATE_PATH, timeout_s) as answer:
                body = await answer.read()
            state = msgspec.json.decode(body, type=EngineState)
        except TimeoutError:
            return Probe(ProbeResult.SILENT)
        except UNUSABLE:
            return Probe(ProbeResult.REFUSED)
        if (state.worker, state.incarnation) != (worker.name, incarnation):
            return Probe(ProbeResult.REFUSED)
        return Probe(ProbeResult.ANSWERED, state)

    async def _turns(self, worker: Worker) -> bool:
        """Whether the engine's loop takes a turn."""
        try:
            async with self._get(worker, PROBE_PATH, PROBE_MIN_S * 2) as answer:
                return answer.status < HTTPStatus.BAD_REQUEST
        except LOST:
            return False

    def _get(self, worker: Worker, path: str, timeout_s: float) -> Any:
        if self._session is None:
            self._session = aiohttp.ClientSession()
        return self._session.get(
            url_of(worker, path), timeout=aiohttp.ClientTimeout(total=timeout_s)
        )


def _look_of(before: Probe, after: Probe) -> stall.ProbeEvidence:
    """What happened between two answers."""
    last = after.state
    if last is None:
        return stall.ProbeEvidence(probe=after.outcome)
    first = before.state
    if first is None or last.steps < 0:
        return stall.ProbeEvidence(
            probe=after.outcome, step_age_us=last.step_age_us, held=last.held
        )
    return stall.ProbeEvidence(
        probe=after.outcome,
        steps=last.steps - first.steps,
        step_age_us=last.step_age_us,
        cpu_us=_difference(first.cpu_us, last.cpu_us),
        held=last.held,
        expected_us=last.expected_us,
        wait_us=_difference(first.wait_us, last.wait_us),
        turns=_difference(first.turns, last.turns),
    )


def _difference(first: int, last: int) -> int:
    """-1 if one is unknown."""
    return last - first if first >= 0 and last >= 0 else -1
