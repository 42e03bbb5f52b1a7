"""Which decisions the replicas of the fleet know: each records in its settings what its build decides.

A decision that a replica cannot read, or does not follow, is not taken while that replica lives.
"""

from __future__ import annotations

from relume.policies.state.fleet import Fleet, Replica

LEADER_VERSION = "version.leader"
"""The setting by which replicas record how they fold what the leader decides by."""


def known_to_all(fleet: Fleet, setting: str) -> bool:
    """Whether every living replica has recorded `setting`."""
    return all(setting in r.settings for r in fleet.replicas.values() if r.alive)


def decided_for_all(fleet: Fleet, setting: str, least: int = 1) -> bool:
    """Whether the leader and every living replica have recorded a version of `least` or more as
    `setting`: it decides, and all follow."""
    leader = fleet.replicas.get(fleet.leader)
    if leader is None:
        return False
    replicas = (leader, *(r for r in fleet.replicas.values() if r.alive))
    return all(_version(r, setting) >= least for r in replicas)


def has_version(fleet: Fleet, setting: str, version: int) -> bool:
    """Whether every living replica has recorded `version` or more as `setting`; if no replica lives, every
    known one. A replica that recorded none has version 1."""
    replicas = fleet.replicas.values()
    alive = [replica for replica in replicas if replica.alive] or replicas
    return all((_version(replica, setting) or 1) >= version for replica in alive)


def _version(replica: Replica, setting: str) -> int:
    recorded = replica.settings.get(setting, "")
    return int(recorded) if recorded.isdecimal() else 0
