"""Runs a continuation in the simulator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

from msgspec import Struct

from relume.chaos.outcome import Outcome
from relume.chaos.sim.engine.step_cost import StepCost
from relume.chaos.sim.replica_process import Plane
from relume.chaos.sim.sim_fleet import Settings, SimFleet, run
from relume.chaos.sim.world.worker_machine import WorkerSettings
from relume.chaos.whatif.start import DOWN_S, Start
from relume.controlplane.replay.what_if import POLICY, WEIGHT, ChangedView, weight
from relume.controlplane.replica.loop import ReplicaConfig
from relume.events import vocabulary as v
from relume.events.log.errors import LogError
from relume.events.vocabulary.enums import AdminCommand, EnginePhase
from relume.policies.admission import admission_settings as waiting_settings
from relume.policies.checkpoints import checkpoint_settings
from relume.policies.liveness import overdue, stall
from relume.policies.migration import migration_settings
from relume.policies.routing import choose_worker as routing
from relume.policies.routing import routing_settings
from relume.policies.routing.choose_worker import Choice
from relume.policies.routing.route_query import RouteQuery
from relume.policies.state.fleet import Fleet
from relume.policies.state.overlay.view import View

PINNED = "as recorded"
PATIENCE_S = 600.0
"""Maximum virtual time of a continuation beyond twice the log's own."""


class Rules(Struct, frozen=True):
    """Settings of a continuation: of replicas, and the weight of a held request. Operators'
    commands do not change `fixed`."""

    replica: ReplicaConfig
    request_tokens: str | None = None
    fixed: frozenset[str] = frozenset()


def rules_of(stream: str, fold: Fleet, changed: dict[str, str]) -> Rules:
    """The settings in force for the replica of `stream`, with some changed."""
    view = ChangedView(stream, fold, changed, 0)
    recorded = fold.replicas.get(stream[2:])
    policy = changed.get(POLICY, recorded.policy if recorded is not None else "least_load")
    config = ReplicaConfig(
        policy=policy,
        stall=stall.config_of(view),
        checkpoints=checkpoint_settings.config_of(view),
        migration=migration_settings.config_of(view),
        routing=routing_settings.config_of(view),
        waiting=waiting_settings.config_of(view),
        overdue=overdue.config_of(view),
    )
    return Rules(config, changed.get(WEIGHT), frozenset(changed))


class ContinuedFleet(SimFleet):
    """A fleet that begins as `start` says. `first`: the worker of the first decision's request, by
    its id; `paces`: costs of steps on workers that have a pace of their own."""

    def __init__(
        self,
        *args: Any,
        start: Start,
        first: dict[str, str],
        paces: Mapping[str, StepCost],
        fixed: frozenset[str],
    ) -> None:
        super().__init__(*args)
        self._fixed = fixed
        self._paces = paces
        self._start = start
        self._pins = start.pins | first

    async def prepare(self) -> None:
        """Kill engines that were down, and pin live requests to their workers."""
        start, loop = self._start, self.loop
        warm = dict(start.warm)
        for name, host in self.hosts.items():
            host.warm = warm
            host.loads = list(start.loads.get(name, ()))
            if name in self._paces and host.engine is not None:
                host.cost = self._paces[name]
                host.engine.pace()
            if name in start.down and host.engine is not None:
                host.engine.kill()
        if start.down:
            await asyncio.sleep(DOWN_S)
            await self._until_seen(start.down)
        for at_ns, command, target, value in start.commands:
            if command != "config" or target not in self._fixed:
                loop.call_later(at_ns / 1e9, self._command, command, target, value)
        if any(at_ns == 0 for at_ns, *_ in start.commands):
            await asyncio.sleep(DOWN_S)
        for plane in self.planes.values():
            self._pin(plane)

    async def _until_seen(self, down: list[str]) -> None:
        for _ in range(40):
            folds = [plane.fleet.workers for plane in self.planes.values() if plane.running]
            if all(f[name].engine != EnginePhase.READY for f in folds for name in down):
                return
            await asyncio.sleep(0.25)

    def _pin(self, plane: Plane) -> None:
        """Send requests of `pins` to their recorded workers; continue the count of decisions."""
        replica = plane.replica
        if replica is None:
            return
        scheduler, pins = replica.scheduler, self._pins
        assign: Callable[..., Any] = scheduler.assign
        seeds = len(self._start.made) // len(self.planes)
        had = self._start.decided.get(f"r.{plane.name}", 0)
        workers = replica.fleet.workers  # their order, that of registration, breaks ties
        for name in self.hosts:
            workers[name] = workers.pop(name)
        scheduler.view.indexes.clear()
        replica.fleet.replicas[plane.name].decisions += max(had - seeds, 0)

        def pinned(request: str, cause: str, delivered: int) -> Any:
            live = scheduler.live.get(request)
            worker = pins.pop(live.arrival.client_id, "") if live is not None else ""
            if not worker:
                return assign(request, cause, delivered)
            scheduler.pinned = PINNED
            routing.RECORDED[PINNED] = partial(_to, worker)
            try:
                return assign(request, cause, delivered)
            finally:
                scheduler.pinned = ""
                del routing.RECORDED[PINNED]

        scheduler.assign = pinned  # type: ignore[method-assign]

    def _command(self, command: str, target: str, value: str) -> None:
        """Give an operator's command through a replica that serves."""
        for plane in self.planes.values():
            replica, process = plane.replica, plane.process
            if replica is None or process is None or process.stopped:
                continue
            name = f"what-if:{self.loop.now_ns}:{command}:{target}"
            event = v.AdminCommanded(
                command_id=name,
                principal="what-if",
                command=AdminCommand(command),
                target=target,
                value=value,
            )
            try:
                process.context.run(replica.scheduler.emit, event)
            except LogError:
                continue
            return


def _to(worker: str, view: View, query: RouteQuery) -> Choice:
    """That worker, if it is eligible for the request; else like `least_load`."""
    choice = routing.least_load(view, query)
    for candidate in choice.candidates:
        if candidate.worker == worker and not candidate.excluded:
            return Choice(
                worker=candidate.worker,
                incarnation=candidate.incarnation,
                candidates=choice.candidates,
            )
    return choice


def go_on(
    start: Start,
    cost: StepCost,
    paces: Mapping[str, StepCost],
    rules: Rules,
    first: dict[str, str],
    lasts_s: float,
) -> Outcome:
    """The continuation under `rules`; the log's own lasted `lasts_s`."""
    settings = Settings(
        workers=WorkerSettings(jitter=0.0), replica=rules.replica, steps=cost, spec=start.host
    )
    make = partial(ContinuedFleet, start=start, first=first, paces=paces, fixed=rules.fixed)
    scope = weight(rules.request_tokens) if rules.request_tokens else nullcontext()
    with scope:
        return run(
            start.scenario, start.schedule.seed, settings=settings, schedule=start.schedule,
            until_s=2 * lasts_s + PATIENCE_S, make=make,
        )  # fmt: skip
