"""The leader's steps of a rolling restart. Pure: from the fold alone, so that the next leader goes on
where the last one stopped, and replay takes each decision again.

    begun -> draining -> restarting -> checking -> returned -> draining -> ... -> done

- A step takes workers of one failure domain, as many as leave enough open (`migration.drain_floor`,
  at least one).
- They get no requests, and what runs there leaves or ends, as in a drain.
- Their engines are restarted when nothing runs there, or when the time to drain is over. If too few others
  are open before that, since another worker failed, they get requests again and come later.
- An engine is checked when it is ready: it has to answer a canary rightly, where canaries were sent
  to the one before.
- Then they get requests again. The next step waits while a worker of the model is unwell, or its host
  was lost since the rollout began: the restart may be what hosts do not survive. So does a step of which
  a host was lost. A worker that says that it leaves is left out.
"""

from __future__ import annotations

from typing import Any

from msgspec import UNSET, UnsetType

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import EffectKind, EnginePhase, RolloutStage
from relume.policies.agreement import LEADER_VERSION, has_version
from relume.policies.health.health_life import EXCLUDED
from relume.policies.health.judgement import LeaderSettings
from relume.policies.health.open_workers import could_serve, is_open, open_without
from relume.policies.migration.migration_settings import config_of
from relume.policies.rollout.rollout_records import active, is_watchful, lost_hosts
from relume.policies.rollout.rollout_state import Rollout
from relume.policies.state.fleet import Fleet, OpenCommand, Worker

SETTLE_TICKS = 2
"""Time for which a replica may still send a request that it decided before it read of the drain."""
RETURN_TICKS = 300
"""Time in which an engine should be ready again and have answered its canary; then the rollout says that
it waits."""


def refusal(fleet: Fleet, command: OpenCommand) -> str:
    """Why no rolling restart of the model begins; empty if it does."""
    if (rollout := active(fleet)) is not None:
        return f"a rolling restart of {rollout.model} goes on: wait, or cancel it"
    if not _all_of(fleet, command.target):
        return f"no worker of model {command.target!r} has an engine to restart"
    return ""


def begun(fleet: Fleet, command_id: str, command: OpenCommand) -> v.RolloutDecided:
    """The rollout that the command asks for."""
    names = _all_of(fleet, command.target)
    return v.RolloutDecided(
        rollout=command_id, model=command.target, stage=RolloutStage.BEGUN,
        workers=names, left=len(names),
    )  # fmt: skip


def cancelled(fleet: Fleet) -> v.RolloutDecided | None:
    """Its end by an operator: what drains gets requests again."""
    rollout = active(fleet)
    return None if rollout is None else _decided(rollout, RolloutStage.CANCELLED)


def owed(fleet: Fleet) -> list[Any]:
    """The next step, if one is due at this tick."""
    rollout = active(fleet)
    if rollout is None:
        return []
    if not _away_of_step(fleet, rollout) and (found := _STAGES[rollout.stage](fleet, rollout)):
        return found
    reason = _obstacle(fleet, rollout)
    if reason == rollout.paused:
        return []
    stage = RolloutStage.PAUSED if reason else RolloutStage.RESUMED
    return [_decided(rollout, stage, reason=reason)]


def restarts(fleet: Fleet, decided: list[Any]) -> list[Any]:
    """The effects of the present stage, for a leader whose predecessor may have died between a
    decision and its effects. An agent carries out none of them twice. None if the leader has just
    `decided` that the rollout is cancelled (since version 3 of `leader`)."""
    rollout = active(fleet)
    if rollout is None or rollout.stage not in _EFFECTS:
        return []
    if any(type(e) is v.RolloutDecided and e.stage == RolloutStage.CANCELLED for e in decided):
        if has_version(fleet, LEADER_VERSION, 3):
            return []
    return _effects(fleet, rollout, rollout.stage)


def _all_of(fleet: Fleet, model: str) -> tuple[str, ...]:
    """The workers to restart, domain by domain."""
    found = [
        (w.domain, w.name)
        for w in fleet.workers.values()
        if w.model == model and w.present and not w.held and w.engine == EnginePhase.READY
    ]
    return tuple(name for _, name in sorted(found))


def _next(fleet: Fleet, rollout: Rollout) -> list[Any]:
    todo = [w for name in rollout.todo if (w := fleet.workers.get(name)) and w.present]
    if not todo:
        return [_decided(rollout, RolloutStage.DONE)]
    if _obstacle(fleet, rollout):
        return []
    names = _step(fleet, rollout, todo)
    left = len(todo) - len(names)
    return [_decided(rollout, RolloutStage.DRAINING, names, left)]


def _step(fleet: Fleet, rollout: Rollout, todo: list[Worker]) -> tuple[str, ...]:
    """The workers of the next domain that may leave at once."""
    spare = open_without(fleet, rollout.model) - _floor(fleet)
    names = []
    for worker in todo:
        if worker.domain != todo[0].domain:
            break
        if is_open(fleet, worker):
            spare -= 1
            if spare < 0:
                break
        names.append(worker.name)
    return tuple(names)


def _floor(fleet: Fleet) -> int:
    """How many workers of the model stay open during a step."""
    return max(config_of(LeaderSettings(fleet)).drain_floor, 1)


def _drained(fleet: Fleet, rollout: Rollout) -> list[Any]:
    if is_watchful(fleet) and (reason := _uncovered(fleet, rollout)):
        return [_decided(rollout, RolloutStage.RETURNED, tuple(rollout.workers), reason=reason)]
    ticks = fleet.tick - rollout.since
    busy = any(w.attempts for w in _of_step(fleet, rollout))
    if ticks < SETTLE_TICKS or (busy and ticks < rollout.drain_ticks):
        return []
    stage = RolloutStage.RESTARTING
    return [_decided(rollout, stage, tuple(rollout.workers)), *_effects(fleet, rollout, stage)]


def _uncovered(fleet: Fleet, rollout: Rollout) -> str:
    """Why the step is given up: too few others are open by now, and its workers could serve."""
    if open_without(fleet, rollout.model, rollout.workers) >= _floor(fleet):
        return ""
    step = _of_step(fleet, rollout)
    could = [
        w.name for w in step if could_serve(fleet, w) and not w.draining and w.leaving is UNSET
    ]
    return (
        f"too few workers of {rollout.model} are open without {', '.join(could)}" if could else ""
    )


def _restarted(fleet: Fleet, rollout: Rollout) -> list[Any]:
    if not all(_is_new(w, rollout) for w in _of_step(fleet, rollout)):
        return []
    stage = RolloutStage.CHECKING
    return [_decided(rollout, stage, tuple(rollout.workers)), *_effects(fleet, rollout, stage)]


def _checked(fleet: Fleet, rollout: Rollout) -> list[Any]:
    workers = _of_step(fleet, rollout)
    if not all(_is_new(w, rollout) and _is_right(w) for w in workers):
        return []
    return [_decided(rollout, RolloutStage.RETURNED, tuple(rollout.workers))]


def _of_step(fleet: Fleet, rollout: Rollout) -> list[Worker]:
    """The workers of the present step that are still there."""
    found = (fleet.workers.get(name) for name in rollout.workers)
    return [w for w in found if w is not None and w.present and not w.held]


def _is_new(worker: Worker, rollout: Rollout) -> bool:
    newer = worker.incarnation > rollout.workers[worker.name]
    return newer and worker.engine == EnginePhase.READY


def _is_right(worker: Worker) -> bool:
    """Whether its engine answered its last canaries rightly, if its agent sends any."""
    record = worker.canary
    if isinstance(record, UnsetType):
        return True
    return record.incarnation == worker.incarnation and record.good > 0 and not record.wrong


def _obstacle(fleet: Fleet, rollout: Rollout) -> str:
    """Why the next step waits; empty if it does not."""
    late = fleet.tick - rollout.since > RETURN_TICKS
    if rollout.stage not in (RolloutStage.BEGUN, RolloutStage.RETURNED):
        if away := _away_of_step(fleet, rollout):
            return f"{', '.join(away)}: host lost"
        names = ", ".join(rollout.workers)
        return f"{names}: not back after {RETURN_TICKS} ticks" if late and names else ""
    unwell = [why for w in fleet.workers.values() if (why := _unwell(fleet, w, rollout.model))]
    unwell += [f"{name}: host lost" for name in _away(fleet, rollout)]
    if unwell:
        return "; ".join(sorted(unwell))
    todo = [w for name in rollout.todo if (w := fleet.workers.get(name)) and w.present]
    if todo and not _step(fleet, rollout, todo):
        return f"too few workers of {rollout.model} would stay open without {todo[0].name}"
    return ""


def _away(fleet: Fleet, rollout: Rollout) -> list[str]:
    """Workers whose hosts were lost, and that no operator drains."""
    found = (fleet.workers.get(name) for name in lost_hosts(rollout))
    return [w.name for w in found if w is not None and not w.draining]


def _away_of_step(fleet: Fleet, rollout: Rollout) -> list[str]:
    """The same, of the present step: nothing more is decided about it meanwhile."""
    return [name for name in _away(fleet, rollout) if name in rollout.workers]


def _unwell(fleet: Fleet, worker: Worker, model: str) -> str:
    if worker.model != model or not worker.present or worker.held or worker.draining:
        return ""
    if worker.health is not UNSET and worker.health.state in EXCLUDED:
        return f"{worker.name} is {worker.health.state}"
    record = worker.canary
    if record is not UNSET and record.wrong and record.incarnation == worker.incarnation:
        if is_watchful(fleet):
            return f"{worker.name} answers a canary wrongly"
    return "" if worker.engine == EnginePhase.READY else f"{worker.name}: engine {worker.engine}"


def _decided(
    rollout: Rollout,
    stage: RolloutStage,
    workers: tuple[str, ...] = (),
    left: int = -1,
    reason: str = "",
) -> v.RolloutDecided:
    return v.RolloutDecided(
        rollout=rollout.rollout,
        model=rollout.model,
        stage=stage,
        workers=workers or tuple(rollout.workers),
        left=len(rollout.todo) if left < 0 else left,
        reason=reason,
    )


def _effects(fleet: Fleet, rollout: Rollout, stage: RolloutStage) -> list[Any]:
    """One decision for each worker; its name is the same however often it is taken."""
    kind = _EFFECTS[stage]
    found = []
    for worker in _of_step(fleet, rollout):
        if kind == EffectKind.RESTART and worker.incarnation != rollout.workers[worker.name]:
            continue  # it began anew by itself
        effect = v.Effect(kind, worker.name, worker.incarnation, "rollout")
        found.append(
            v.EffectsDecided(
                decision=f"{rollout.rollout}.{kind}.{worker.name}.{worker.incarnation}",
                basis=v.Basis(fleet.revision, 0),
                cause=f"{rollout.principal}: rolling restart of {rollout.model}",
                effects=(effect,),
            )
        )
    return found


_EFFECTS = {
    RolloutStage.RESTARTING: EffectKind.RESTART,
    RolloutStage.CHECKING: EffectKind.CANARY,
}
_STAGES = {
    RolloutStage.BEGUN: _next,
    RolloutStage.RETURNED: _next,
    RolloutStage.DRAINING: _drained,
    RolloutStage.RESTARTING: _restarted,
    RolloutStage.CHECKING: _checked,
}
