"""What the leader owes the fleet: `step(fleet, event)` returns events to write.

Called with each event of the canonical fold, after folding it. Synchronous and pure;
what it returns goes into stream `fleet` by the leader alone, so a follower that becomes
leader starts from the same fold and owes nothing twice.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET, UnsetType

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import (
    AdminCommand,
    EffectKind,
    EnginePhase,
    Guarantee,
    HealthState,
    RequestOutcome,
)
from relume.policies.canary import canary_settings
from relume.policies.crosscheck import disputes
from relume.policies.degradation import batch_limits, decisions
from relume.policies.health import canary_evidence, cross_check_evidence, evidence, prefix_caches
from relume.policies.health.health_life import is_quarantined
from relume.policies.health.judgement import LeaderSettings
from relume.policies.leader import drain_floor, feature_level
from relume.policies.recorded_settings import CHOICES, INTEGERS
from relume.policies.rollout import rollout_steps
from relume.policies.spares import spare_decisions
from relume.policies.state import coverage, unreadable
from relume.policies.state.fleet import Fleet, OpenCommand, Request, Unheard, Worker
from relume.policies.state.lifecycles import departed_workers, stream_resumption, unacknowledged

GONE_TICKS = 2
"""An owner key must be missing this many ticks before its worker counts as lost."""

HEALTHY_TICKS = 8
"""And the log must have been healthy this long: one lease TTL or more, so that every living writer
has had time to own its stream again. `relume.controlplane.serve_settings.check` refuses shorter
ticks."""


RESTATE_TICKS = 60
"""An effect that its living agent has not answered is stated again so often."""

AGENT_COMMANDS = ("drain", "undrain", "hold", "release", "restart")
"""Commands that become effects for the worker's agent."""

QUARANTINE, DISPUTE = "quarantine.", "dispute."
"""How the names of decisions begin that no operator's command asked for."""

RESIGN = "resign"
"""Command on the leader itself: it writes `LeaderResigned` and lets another replica lead."""

MOST_SILENT_MS = 60_000
"""Maximum time without a tick, after which the leader carries out no command that lands then."""
LATE = "it waited for the log and was not carried out; send it again"
"""Why such a command is refused, and one that landed with its replica's spool."""


def step(fleet: Fleet, event: Any, log_was_away: bool = False) -> list[Any]:
    """Events the leader has to write because of `event`; none for most. `log_was_away`: the last tick
    is older than `MOST_SILENT_MS` by the leader's clock, which is not in the log."""
    if (carrying_out := _OF_COMMANDS.get(type(event))) is not None:
        found = carrying_out(fleet, event, log_was_away)
    else:
        handler = _HANDLERS.get(type(event))
        found = handler(fleet, event) if handler is not None else []
    return [*found, *verdicts] if (verdicts := evidence.owed(fleet)) else found


def on_tick(fleet: Fleet, event: v.Tick) -> list[Any]:
    """Declare lost what has been without owner long enough, remove what has been for very long, end
    orphans, release blocks of ended requests, send again the effects that agents have not
    answered, raise the feature level, decide spares and how short of capacity the fleet is, and take the
    next step of a rolling restart."""
    out = [*spare_decisions.owed(fleet), *_unanswered(fleet, event.number)]
    if released := coverage.to_release(fleet, event.number):
        out.append(v.CheckpointsReleased(released))
    out += [_ended(r) for r in stream_resumption.expired(fleet, event.number)]
    out += [_ended_unheard(*found) for found in unacknowledged.expired(fleet, event.number)]
    out += prefix_caches.owed_late(fleet)
    if event.number - fleet.healthy_since_tick < HEALTHY_TICKS:
        return out
    for worker in fleet.workers.values():
        if worker.present and _gone(fleet, f"w.{worker.name}", event.number):
            out.append(v.WorkerLost(worker.name, worker.epoch, "lease lapsed"))
    for replica in fleet.replicas.values():
        if replica.alive and _gone(fleet, f"r.{replica.name}", event.number):
            out.append(v.ReplicaLost(replica.name, replica.epoch))
    out += departed_workers.due(fleet, event.number)
    out += feature_level.owed(fleet, event.number)
    out += [*decisions.owed(fleet), *batch_limits.owed(fleet)]
    return out + rollout_steps.owed(fleet)


def _unanswered(fleet: Fleet, tick: int) -> list[Any]:
    """Pending effects to send again: to agents that restarted, and periodically to all."""
    present = [name for name, worker in fleet.workers.items() if worker.present]
    return [
        v.EffectsDecided(
            decision=p.decision,
            basis=v.Basis(fleet.revision, 0),
            cause=p.cause,
            effects=(p.effect,),
            again=p.index,
        )
        for p in fleet.pending_effects.values()
        if p.effect.worker in present and (p.due or tick % RESTATE_TICKS == 0)
    ]


def _gone(fleet: Fleet, stream: str, tick: int) -> bool:
    since = fleet.gone.get(stream, -1)
    return since >= 0 and tick - since >= GONE_TICKS


def on_orphans(
    fleet: Fleet, event: v.ReplicaLost | v.ReplicaStarted | v.ReplicaStopped
) -> list[Any]:
    """Client connections are broken: each open request gets its terminal event, unless its
    client may still come back (`relume.policies.state.lifecycles.stream_resumption`).

    The fold counts what orphaned a request; only the first time is answered, so two events about
    one death do not end a request twice (I1).
    """
    owner = f"r.{event.replica}"
    requests = fleet.requests.values()
    left = [r for r in requests if r.owner == owner and r.orphaned == 1]
    return [_ended(r) for r in left if stream_resumption.ended_at_once(r)]


def on_leader_elected(
    fleet: Fleet, event: v.LeaderElected, log_was_away: bool = False
) -> list[Any]:
    """What an earlier leader may have left undone: orphans of gone replicas, open commands.

    What it did write comes before this event: its stream was fenced.
    """
    orphans = [r for r in fleet.requests.values() if r.orphaned]
    out: list[Any] = [_ended(r) for r in orphans if r.expired or stream_resumption.ended_at_once(r)]
    out += [_ended_unheard(*found) for found in unacknowledged.expired(fleet)]
    for command_id, command in fleet.open_commands.items():
        if command.command == RESIGN:  # addressed to an earlier leader, which is gone
            out.append(_decided(fleet, command_id, command, ()))
        else:
            out += _carried_out(fleet, command_id, command, log_was_away)
    out += rollout_steps.restarts(fleet, out)
    for worker in fleet.workers.values():
        if not isinstance(health := worker.health, UnsetType) and (
            health.state == HealthState.QUARANTINED
            and health.condemned == worker.incarnation
            and worker.engine == EnginePhase.READY
        ):
            out += _restarted(fleet, worker)  # its agent knows what it applied before
        if is_quarantined(worker):
            out += [*_voided(fleet, worker), *prefix_caches.left_undone(fleet, worker)]
    return out


def on_admin_commanded(
    fleet: Fleet, event: v.AdminCommanded, log_was_away: bool = False
) -> list[Any]:
    """An operator's command becomes effects on agents, or a new setting; a resend nothing."""
    command = fleet.open_commands.get(event.command_id)
    if command is None or command.tries > 1:
        return []
    return _carried_out(fleet, event.command_id, command, log_was_away)


def _carried_out(
    fleet: Fleet, command_id: str, command: OpenCommand, log_was_away: bool
) -> list[Any]:
    """The answer to a command, and what follows from it. What the fold did at once (`trust`) was not
    refused."""
    if command.late is not UNSET or (log_was_away and command.command != AdminCommand.TRUST):
        return _refused(command_id, LATE)
    if command.command == AdminCommand.CONFIG:
        if command.target in INTEGERS and not command.value.isdecimal():
            return _refused(command_id, f"{command.target} takes an integer")
        choices = CHOICES.get(command.target)
        if choices and command.value not in choices:
            return _refused(command_id, f"{command.target} takes {', '.join(choices)}")
        return [v.ConfigChanged(command.target, command.value, command_id)]
    if command.command == RESIGN:
        if not any(r.alive and r.name != fleet.leader for r in fleet.replicas.values()):
            return _refused(command_id, "no other replica is there to lead")
        resigned = v.LeaderResigned(fleet.leader, f"asked by {command.principal}")
        return [_decided(fleet, command_id, command, ()), resigned]
    if command.command in (AdminCommand.ROLLOUT, AdminCommand.CANCEL_ROLLOUT):
        return _rollout(fleet, command_id, command)
    worker = fleet.workers.get(command.target)
    if worker is not None and command.command == AdminCommand.TRUST:
        was_unreadable = unreadable.is_acknowledged_by(fleet, worker.name, command_id)
        if not was_unreadable and (why := canary_evidence.cannot_be_trusted(worker)):
            return _refused(command_id, why)
        return [_decided(fleet, command_id, command, ())]  # what follows is decided with it
    if worker is None or command.command not in AGENT_COMMANDS:
        return _refused(command_id, f"nothing to {command.command}: {command.target}")
    if command.command == AdminCommand.DRAIN and (why := drain_floor.refusal(fleet, command_id)):
        return _refused(command_id, why)
    incarnation = worker.incarnation if command.command == AdminCommand.RESTART else 0
    effect = v.Effect(EffectKind(command.command), worker.name, incarnation, command.value)
    return [_decided(fleet, command_id, command, (effect,))]


def _rollout(fleet: Fleet, command_id: str, command: OpenCommand) -> list[Any]:
    """The beginning or the end of a rolling restart. The rollout first: it looks at the open command."""
    if command.command == AdminCommand.CANCEL_ROLLOUT:
        if (end := rollout_steps.cancelled(fleet)) is None:
            return _refused(command_id, "no rolling restart goes on")
        return [end, _decided(fleet, command_id, command, ())]
    if why := rollout_steps.refusal(fleet, command):
        return _refused(command_id, why)
    begun = rollout_steps.begun(fleet, command_id, command)
    return [begun, _decided(fleet, command_id, command, ())]


def _decided(
    fleet: Fleet, command_id: str, command: OpenCommand, effects: tuple[v.Effect, ...]
) -> v.EffectsDecided:
    cause = f"{command.principal}: {command.command} {command.target}"
    return v.EffectsDecided(
        decision=command_id, basis=v.Basis(fleet.revision, 0), cause=cause, effects=effects
    )


def _refused(command_id: str, why: str) -> list[Any]:
    return [v.ConfigChanged("", why, command_id)]


def _ended(request: Request) -> v.RequestEnded:
    return v.RequestEnded(
        request=request.request,
        outcome=RequestOutcome.FAILED,
        status=0,
        tokens=-1,
        finish="error",
        attempts=request.attempt,
        verdict=request.verdict,
        detail="its gateway is gone"
        + (" and its client did not come back" if request.expired else ""),
    )


def _ended_unheard(request: str, dispatched: Unheard) -> v.RequestEnded:
    detail = "its gateway was gone before it wrote of it; its engine did"
    return v.RequestEnded(
        request=request,
        outcome=RequestOutcome.FAILED,
        status=0,
        tokens=-1,
        finish="error",
        attempts=dispatched.attempt,
        verdict=Guarantee.NONE,
        detail=detail,
    )


def on_health_decided(fleet: Fleet, event: v.HealthDecided) -> list[Any]:
    """Spares follow. What a quarantined worker wrote to holders is not used: blocks of live requests are voided,
    those of ended ones, which others may share, released at once. Engines that may have them in their
    prefix caches empty these. Its engine is restarted, once:
    that loads its weights again. If the next one is as wrong, the worker stays as it is."""
    worker = fleet.workers.get(event.worker)
    out = spare_decisions.owed(fleet)
    if event.state != HealthState.QUARANTINED or worker is None:
        return out
    out += _voided(fleet, worker)
    if prefix_caches.is_verdict(event):
        out += prefix_caches.owed(fleet, worker, event.good_tick, fleet.tick)
    if released := coverage.to_release(fleet, fleet.tick, at_once=True):
        out.append(v.CheckpointsReleased(released))
    return out + (_restarted(fleet, worker) if worker.incarnation == event.incarnation else [])


def on_route_decided(fleet: Fleet, event: v.RouteDecided) -> list[Any]:
    """A replica that did not know of a quarantine yet sent a request there."""
    worker = fleet.workers.get(event.worker)
    if worker is None or not is_quarantined(worker) or not fleet.holders:
        return []
    attempts = ((event.request, event.attempt),)
    return [v.CheckpointsVoided(worker.name, worker.incarnation, attempts)]


def on_cross_checked(fleet: Fleet, event: v.CrossChecked) -> list[Any]:
    """Two engines answer one request differently: each has its canaries sent at once."""
    names = cross_check_evidence.canaries_due(fleet, event)
    effects = tuple(
        v.Effect(EffectKind.CANARY, name, fleet.workers[name].incarnation, "disputed")
        for name in names
        if name in fleet.workers
    )
    if not effects:
        return []
    return [
        v.EffectsDecided(
            decision=f"{DISPUTE}{event.decision}",
            basis=v.Basis(fleet.revision, 0),
            cause=f"{event.worker} and {event.by} answer {event.request} differently",
            effects=effects,
        )
    ]


def _voided(fleet: Fleet, worker: Worker) -> list[Any]:
    attempts = coverage.to_void(fleet, worker.name) if fleet.holders else ()
    size = coverage.RELEASED_AT_ONCE
    return [
        v.CheckpointsVoided(worker.name, worker.incarnation, attempts[at : at + size])
        for at in range(0, len(attempts), size)
    ]


def _restarted(fleet: Fleet, worker: Worker) -> list[Any]:
    if not canary_settings.config_of(LeaderSettings(fleet)).restart:
        return []
    effect = v.Effect(EffectKind.RESTART, worker.name, worker.incarnation, "quarantined")
    return [
        v.EffectsDecided(
            decision=f"{QUARANTINE}{worker.name}.{worker.incarnation}",
            basis=v.Basis(fleet.revision, 0),
            cause=_why_wrong(worker),
            effects=(effect,),
        )
    ]


def _why_wrong(worker: Worker) -> str:
    checks = disputes.record_of(worker)
    if checks is not None and checks.outvoted:
        return "most engines contradict its answers"
    return "its answers to canaries are wrong"


_OF_COMMANDS: dict[type, Callable[[Fleet, Any, bool], list[Any]]] = {
    v.LeaderElected: on_leader_elected,
    v.AdminCommanded: on_admin_commanded,
}
_HANDLERS: dict[type, Callable[[Fleet, Any], list[Any]]] = {
    v.Tick: on_tick,
    v.ReplicaLost: on_orphans,
    v.ReplicaStarted: on_orphans,
    v.ReplicaStopped: on_orphans,
    v.HealthDecided: on_health_decided,
    v.RouteDecided: on_route_decided,
    v.CrossChecked: on_cross_checked,
}
