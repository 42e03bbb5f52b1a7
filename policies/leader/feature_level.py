"""The feature level of the fleet: announced by replicas, raised by the leader, never lowered.

A replica announces its build's level among its settings, in `ReplicaStarted`. So builds from before
levels fold it as any setting, and all have the same state until the level is raised. Then no such
build is left: it announces nothing, which is less than any level that can be raised to.

A replica that owns its stream and has not started yet may be an old one, so the leader waits for it.
One that comes while the leader decides reads `FeatureLevelRaised` after its start, and ends
(`FleetTooNew`).

The level is stated again from time to time: agents read only what the log still has of stream
`fleet`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from msgspec import UnsetType

from relume.events import vocabulary as v
from relume.events.log.errors import LogError
from relume.events.log.feature_levels import FIRST_LEVEL
from relume.policies.agreement import version_of
from relume.policies.state.fleet import Fleet

SETTING = "feature_level"
"""The setting by which a replica announces the highest level that it reads."""

RESTATE_TICKS = 60
"""A raised level is stated again so often."""


class FleetTooNew(LogError):
    """The fleet writes events that this build cannot read. Remedy: start the build that the other
    replicas have, or a newer one."""

    def __init__(self, fleet_level: int, level: int) -> None:
        super().__init__(
            f"the fleet has feature level {fleet_level}, and this build reads up to level {level}"
        )
        self.fleet_level = fleet_level
        self.level = level


def settings_of(level: int) -> tuple[tuple[str, str], ...]:
    """As a replica of a build with that level announces it."""
    return ((SETTING, str(level)),)


def in_force(fleet: Fleet) -> int:
    """The level of which events may be written."""
    return FIRST_LEVEL if isinstance(fleet.feature_level, UnsetType) else fleet.feature_level


def check_build(fleet: Fleet, level: int) -> None:
    """Raises FleetTooNew if a build of that level does not read what the fleet writes."""
    if (required := in_force(fleet)) > level:
        raise FleetTooNew(required, level)


def read_by_all(fleet: Fleet) -> int:
    """The highest level that each live replica reads; 0: one is from before levels, or none lives."""
    alive = (replica for replica in fleet.replicas.values() if replica.alive)
    return min((version_of(replica, SETTING) for replica in alive), default=0)


def owed(fleet: Fleet, tick: int) -> list[Any]:
    """What the leader has to write at a tick of a healthy log."""
    was = in_force(fleet)
    level = max(read_by_all(fleet), was)
    is_due = level > was and not _has_unknown_owner(fleet)
    if not is_due and (was == FIRST_LEVEL or tick % RESTATE_TICKS):
        return []
    return [
        v.FeatureLevelRaised(
            level=level if is_due else was,
            was=was,
            replicas=tuple(name for name, replica in fleet.replicas.items() if replica.alive),
        )
    ]


def _has_unknown_owner(fleet: Fleet) -> bool:
    """Whether a replica owns its stream under an epoch in which it has not started yet."""
    known = {
        f"r.{name}": replica.epoch for name, replica in fleet.replicas.items() if replica.alive
    }
    owners = fleet.owners.items()
    return any(known.get(name) != epoch for name, epoch in owners if name.startswith("r."))


def on_raised(fleet: Fleet, stream: str, epoch: int, event: v.FeatureLevelRaised) -> None:
    """The level holds from here on."""
    if event.level > in_force(fleet):
        fleet.feature_level = event.level


HANDLERS: dict[type, Callable[[Fleet, str, int, Any], None]] = {v.FeatureLevelRaised: on_raised}
