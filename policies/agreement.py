"""Which decisions the replicas of the fleet know: each records in its settings what its build decides.

A decision that a replica cannot read, or does not follow, is not taken while that replica lives.
"""

from __future__ import annotations

from relume.policies.state.fleet import Fleet


def known_to_all(fleet: Fleet, setting: str) -> bool:
    """Whether every living replica has recorded `setting`."""
    return all(setting in r.settings for r in fleet.replicas.values() if r.alive)


def decided_for_all(fleet: Fleet, setting: str) -> bool:
    """The same, and there is a leader that has: it decides, and all follow."""
    leader = fleet.replicas.get(fleet.leader)
    return leader is not None and setting in leader.settings and known_to_all(fleet, setting)
