"""Which decisions the replicas of the fleet know: each records in its settings what its build decides.

A decision that a replica cannot read, or does not follow, is not taken while that replica lives. Text that
is no version counts as version 0, which follows nothing: a record of a replica must not end the others.
"""

from __future__ import annotations

from relume.policies.state.fleet import Fleet, Replica

LEADER_VERSION = "version.leader"
"""The setting by which replicas record how they fold what the leader decides by."""
_MOST_DIGITS = 9


def known_to_all(fleet: Fleet, setting: str, least: int = 0) -> bool:
    """Whether every living replica has recorded `setting`, and a version of `least` or more if that is
    given. For what any replica may write, and for what the fold makes of it. True if no replica lives."""
    return all(
        setting in r.settings and (not least or version_of(r, setting) >= least)
        for r in fleet.replicas.values()
        if r.alive
    )


def decided_for_all(fleet: Fleet, setting: str, least: int = 1) -> bool:
    """Whether the leader and every living replica have recorded a version of `least` or more as
    `setting`. For what the leader alone decides: it decides, and all follow. False without a leader."""
    leader = fleet.replicas.get(fleet.leader)
    if leader is None:
        return False
    replicas = (leader, *(r for r in fleet.replicas.values() if r.alive))
    return all(version_of(r, setting) >= least for r in replicas)


def has_version(fleet: Fleet, setting: str, version: int) -> bool:
    """Whether every living replica has recorded `version` or more as `setting`; if no replica lives, every
    known one. A replica that recorded none has version 1. For what the fold makes of any event, also
    between the death of the last replica and the start of the next."""
    replicas = fleet.replicas.values()
    alive = [replica for replica in replicas if replica.alive] or replicas
    return all((version_of(replica, setting) or 1) >= version for replica in alive)


def leaders_version(fleet: Fleet, setting: str, unrecorded: int = 1) -> int:
    """The version that the leader has recorded as `setting`, `unrecorded` if it has recorded none, and 1
    without a leader. For the form of what `decided_for_all` says is decided."""
    leader = fleet.replicas.get(fleet.leader)
    if leader is None:
        return 1
    return version_of(leader, setting) if leader.settings.get(setting) else unrecorded


def version_of(replica: Replica, setting: str) -> int:
    """The version that the replica has recorded as `setting`; 0 if none, or text that is none."""
    recorded = replica.settings.get(setting, "")
    return int(recorded) if recorded.isdecimal() and len(recorded) <= _MOST_DIGITS else 0
