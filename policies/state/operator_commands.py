"""Operators' commands in the fold: the command, the leader's decision, the agents' effects.

An effect is pending until its agent says that it was applied or refused. The newest word
on a target counts: a later effect on the same target (held, draining, restart) of a worker
takes an earlier one's place, so what the leader states again can never undo what came after.

A command that its replica could not write for longer than its lease waited in the replica's spool: it
lands under a new epoch, before the replica says that it is back. It is `late`, and does nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UNSET, UnsetType

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import AdminCommand, EffectKind
from relume.policies.agreement import LEADER_VERSION, has_version
from relume.policies.state import unreadable
from relume.policies.state.fleet import Drain, DrainOrder, Fleet, OpenCommand, PendingEffect

COMMANDS = 10_000
"""Number of admin command ids stored, to make a resend a no-op (I16)."""

NO_DRAIN = Drain(principal="", reason="", deadline_tick=-1)
"""What is known of the drain of a command that says nothing more."""
NO_ORDER = DrainOrder(reason="", deadline_ticks=0, force=False)
"""A command that says nothing more, as those of earlier builds."""

LATE_VERSION = 3
"""Of the leader's decisions: since then a command that waited for the log is refused."""

_TARGETS = {"hold": "held", "release": "held", "drain": "draining", "undrain": "draining"}


def begin_landing(fleet: Fleet, stream: str) -> None:
    """A replica's stream has a new epoch: what comes waited for the log, until the replica says that it
    is back, or begins anew."""
    if stream not in _landing(fleet) and has_version(fleet, LEADER_VERSION, LATE_VERSION):
        fleet.landing = (*_landing(fleet), stream)


def end_landing(fleet: Fleet, stream: str) -> None:
    """It has said so."""
    if stream in (landing := _landing(fleet)):
        fleet.landing = tuple(name for name in landing if name != stream) or UNSET


def _landing(fleet: Fleet) -> tuple[str, ...]:
    return () if isinstance(fleet.landing, UnsetType) else fleet.landing


def _on_effects_decided(fleet: Fleet, stream: str, epoch: int, event: v.EffectsDecided) -> None:
    if event.again >= 0:
        if pending := fleet.pending_effects.get(f"{event.decision}#{event.again}"):
            pending.due = False
        return
    command = fleet.open_commands.pop(event.decision, None)
    for index, effect in enumerate(event.effects):
        _supersede(fleet, effect)
        key = f"{event.decision}#{index}"
        fleet.pending_effects[key] = PendingEffect(
            decision=event.decision, index=index, cause=event.cause, effect=effect
        )
        worker = fleet.workers.get(effect.worker)
        if worker is None:
            continue
        if effect.kind in (EffectKind.DRAIN, EffectKind.UNDRAIN):
            worker.draining = effect.kind == EffectKind.DRAIN
            worker.drained_tick = fleet.tick if worker.draining else -1
            worker.drain = _drain_of(fleet, command) if worker.draining else UNSET
        elif effect.kind in (EffectKind.HOLD, EffectKind.RELEASE):
            worker.held = effect.kind == EffectKind.HOLD


def _drain_of(fleet: Fleet, command: OpenCommand | None) -> Drain | UnsetType:
    if command is None or isinstance(order := command.drain, UnsetType):
        return UNSET
    deadline_tick = fleet.tick + order.deadline_ticks if order.deadline_ticks > 0 else -1
    return Drain(principal=command.principal, reason=order.reason, deadline_tick=deadline_tick)


def _supersede(fleet: Fleet, effect: v.Effect) -> None:
    target = _TARGETS.get(effect.kind, effect.kind)
    for key, pending in list(fleet.pending_effects.items()):
        other = pending.effect
        if other.worker == effect.worker and _TARGETS.get(other.kind, other.kind) == target:
            del fleet.pending_effects[key]


def agent_started(fleet: Fleet, worker: str) -> None:
    """The agent has what it carried out; what it never saw may be trimmed."""
    for pending in fleet.pending_effects.values():
        if pending.effect.worker == worker:
            pending.due = True


def _on_effect_applied(fleet: Fleet, stream: str, epoch: int, event: v.EffectApplied) -> None:
    fleet.pending_effects.pop(f"{event.decision}#{event.index}", None)


def _on_admin_commanded(fleet: Fleet, stream: str, epoch: int, event: v.AdminCommanded) -> None:
    if event.command_id in fleet.commands:
        if event.command_id in fleet.open_commands:
            fleet.open_commands[event.command_id].tries += 1
        return
    fleet.commands[event.command_id] = True
    late: bool | UnsetType = True if stream in _landing(fleet) else UNSET
    if event.command == AdminCommand.TRUST and late is UNSET:
        unreadable.acknowledge(fleet, event.target, event.command_id)
    order = DrainOrder(reason=event.reason, deadline_ticks=event.deadline_ticks, force=event.force)
    fleet.open_commands[event.command_id] = OpenCommand(
        principal=event.principal,
        command=event.command,
        target=event.target,
        value=event.value,
        drain=order if order != NO_ORDER else UNSET,
        late=late,
    )
    while len(fleet.commands) > COMMANDS:
        del fleet.commands[next(iter(fleet.commands))]


def _on_config_changed(fleet: Fleet, stream: str, epoch: int, event: v.ConfigChanged) -> None:
    fleet.open_commands.pop(event.decision, None)
    if event.key:
        fleet.config[event.key] = event.value


def _on_detail_decided(fleet: Fleet, stream: str, epoch: int, event: v.DetailDecided) -> None:
    fleet.detail = event.detail


HANDLERS: dict[type, Callable[[Fleet, str, int, Any], None]] = {
    v.EffectsDecided: _on_effects_decided,
    v.EffectApplied: _on_effect_applied,
    v.AdminCommanded: _on_admin_commanded,
    v.ConfigChanged: _on_config_changed,
    v.DetailDecided: _on_detail_decided,
}
