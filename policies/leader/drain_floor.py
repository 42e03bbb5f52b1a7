"""A drain that would leave too few open workers of a model is refused, unless it is forced.

Counted from the fold at the command. Two commands in one group of the log are decided one after the
other, each before the effects of the first are folded: a worker that an earlier open command is to
drain does not count.
"""

from __future__ import annotations

from msgspec import UnsetType

from relume.events.vocabulary.enums import AdminCommand
from relume.policies.health.judgement import LeaderSettings
from relume.policies.health.open_workers import is_open, open_without
from relume.policies.migration.migration_settings import config_of
from relume.policies.state.fleet import Fleet

TOO_FEW = "too few workers: "
"""How such a refusal begins."""


def refusal(fleet: Fleet, command_id: str) -> str:
    """Why the worker of this open command is not drained; empty if it is."""
    command = fleet.open_commands[command_id]
    worker = fleet.workers[command.target]
    is_forced = not isinstance(command.drain, UnsetType) and command.drain.force
    floor = config_of(LeaderSettings(fleet)).drain_floor
    if is_forced or not floor or not is_open(fleet, worker):
        return ""
    leaving = {worker.name}
    for earlier, other in fleet.open_commands.items():
        if earlier == command_id:
            break
        if other.command == AdminCommand.DRAIN:
            leaving.add(other.target)
    left = open_without(fleet, worker.model, leaving)
    if left >= floor:
        return ""
    return (
        f"{TOO_FEW}without {worker.name} {left} of model {worker.model} would be open, the minimum "
        f"is {floor} (migration.drain_floor); add a worker first, or force the drain (--force, in "
        'the API {"force": true})'
    )
