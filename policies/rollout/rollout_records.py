"""What the fold makes of the leader's decisions about a rolling restart."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET, UnsetType

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import RolloutStage
from relume.policies.agreement import decided_for_all
from relume.policies.rollout.rollout_state import Rollout
from relume.policies.state.fleet import Fleet, Leaving

VERSION = "version.rollout"
"""The setting by which replicas record that they wait for lost hosts."""
WATCHFUL = 3
"""The version since which what fails elsewhere holds up a step that drains, and a wrong answer to one
canary the next one."""
DRAIN_TICKS = 120
"""Time for which requests may leave a worker, unless the operator says another."""
ENDED = (RolloutStage.DONE, RolloutStage.CANCELLED)


def active(fleet: Fleet) -> Rollout | None:
    """The rollout that goes on."""
    rollout = fleet.rollout
    if isinstance(rollout, UnsetType) or rollout.stage in ENDED:
        return None
    return rollout


def _on_decided(fleet: Fleet, stream: str, epoch: int, event: v.RolloutDecided) -> None:
    if event.stage == RolloutStage.BEGUN:
        _begin(fleet, event)
        return
    rollout = active(fleet)
    if rollout is None or rollout.rollout != event.rollout:
        return
    if event.stage in (RolloutStage.PAUSED, RolloutStage.RESUMED):
        rollout.paused = event.reason
        return
    rollout.stage, rollout.since, rollout.paused = event.stage, fleet.tick, ""
    if event.stage == RolloutStage.DRAINING:
        _drain(fleet, rollout, event.workers)
    elif event.stage == RolloutStage.RETURNED or event.stage in ENDED:
        if is_watchful(fleet):
            rollout.todo = [*_old(fleet, rollout), *rollout.todo]
        for name in rollout.workers:
            if (worker := fleet.workers.get(name)) is not None:
                worker.rolling = UNSET
        rollout.workers = {}
        if event.stage in ENDED:
            rollout.todo, rollout.lost = [], UNSET


def is_watchful(fleet: Fleet) -> bool:
    """Whether all replicas follow `WATCHFUL`."""
    return decided_for_all(fleet, VERSION, WATCHFUL)


def _old(fleet: Fleet, rollout: Rollout) -> list[str]:
    """Workers of the step that have the engine that was to end."""
    found = ((fleet.workers.get(name), old) for name, old in rollout.workers.items())
    return [w.name for w, old in found if w is not None and w.present and w.incarnation == old]


def _begin(fleet: Fleet, event: v.RolloutDecided) -> None:
    command = fleet.open_commands.get(event.rollout)
    order = UNSET if command is None else command.drain
    ticks = 0 if isinstance(order, UnsetType) else order.deadline_ticks
    fleet.rollout = Rollout(
        rollout=event.rollout,
        model=event.model,
        principal="" if command is None else command.principal,
        stage=RolloutStage.BEGUN,
        since=fleet.tick,
        drain_ticks=ticks or DRAIN_TICKS,
        todo=list(event.workers),
    )


def _drain(fleet: Fleet, rollout: Rollout, names: tuple[str, ...]) -> None:
    """In the second half of the time requests move at any pause."""
    half = max(rollout.drain_ticks // 2, 1)
    for name in names:
        if (worker := fleet.workers.get(name)) is not None:
            rollout.workers[name] = worker.incarnation
            worker.rolling = Leaving(since_tick=fleet.tick, deadline_tick=fleet.tick + half)
    gone = [name for name in rollout.todo if name not in fleet.workers]
    rollout.todo = [name for name in rollout.todo if name not in (*names, *gone)]


def lost_hosts(rollout: Rollout) -> list[str]:
    """Workers of its model whose host was lost since it began, and is not back."""
    return [] if isinstance(rollout.lost, UnsetType) else rollout.lost


def _on_lost(fleet: Fleet, stream: str, epoch: int, event: v.WorkerLost) -> None:
    rollout, worker = active(fleet), fleet.workers.get(event.worker)
    if rollout is None or worker is None or worker.present or worker.model != rollout.model:
        return
    if decided_for_all(fleet, VERSION):
        rollout.lost = sorted({*lost_hosts(rollout), worker.name})


def _on_back(fleet: Fleet, stream: str, epoch: int, event: Any) -> None:
    """The worker's agent writes again: it is there, or it says that it leaves."""
    _not_lost(fleet, stream[2:])


def _on_forgotten(fleet: Fleet, stream: str, epoch: int, event: v.WorkerForgotten) -> None:
    if event.worker not in fleet.workers:
        _not_lost(fleet, event.worker)


def _not_lost(fleet: Fleet, name: str) -> None:
    rollout = active(fleet)
    if rollout is not None and name in lost_hosts(rollout):
        rollout.lost = [other for other in lost_hosts(rollout) if other != name] or UNSET


HANDLERS: dict[type, Callable[[Fleet, str, int, Any], None]] = {
    v.RolloutDecided: _on_decided,
    v.WorkerLost: _on_lost,
    v.WorkerRegistered: _on_back,
    v.StreamResumed: _on_back,
    v.WorkerDeregistered: _on_back,
    v.WorkerForgotten: _on_forgotten,
}
"""To be called after those that say which workers are there."""
