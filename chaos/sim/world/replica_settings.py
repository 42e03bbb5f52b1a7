"""The configuration of simulated replicas: what a scenario says of it."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from relume.chaos.scenario.language import Fleet
from relume.controlplane.replica.loop import ReplicaConfig

PARTS = {
    "stall": "stall", "checkpoints": "checkpoints", "migration": "migration", "routing": "routing",
    "waiting": "waiting", "health": "health", "overdue": "overdue", "canary": "canary",
    "crosscheck": "cross_checks", "degradation": "degradation", "spares": "spares",
}  # fmt: skip
"""Fields of `ReplicaConfig` by the first part of the names of their settings."""


def replica_config(fleet: Fleet, config: ReplicaConfig) -> ReplicaConfig:
    """`config` with the settings of `fleet`."""
    changed: dict[str, Any] = {
        field: replace(getattr(config, field), **values)
        for part, field in PARTS.items()
        if (values := fleet.settings_of(part))
    }
    if policy := fleet.settings.get("routing.policy"):
        changed["policy"] = policy
    return replace(config, **changed)
