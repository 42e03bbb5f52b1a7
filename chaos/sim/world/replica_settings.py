"""The configuration of simulated replicas: what a scenario says of it."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from relume.chaos.scenario.language import Fleet
from relume.controlplane.replica.loop import ReplicaConfig
from relume.policies.degradation.degradation_settings import ON

PARTS = {
    "stall": "stall", "checkpoints": "checkpoints", "migration": "migration", "routing": "routing",
    "waiting": "waiting", "health": "health", "overdue": "overdue", "canary": "canary",
    "crosscheck": "cross_checks", "degradation": "degradation", "spares": "spares",
}  # fmt: skip
"""Fields of `ReplicaConfig` by the first part of the names of their settings."""


def replica_config(fleet: Fleet, config: ReplicaConfig) -> ReplicaConfig:
    """`config` with the settings of `fleet`."""
    by_part: dict[str, dict[str, Any]] = {
        "waiting": dict(fleet.waiting),
        "crosscheck": dict(fleet.cross_checks),
        "degradation": {"mode": ON, **fleet.degradation} if fleet.degradation else {},
        "spares": dict(fleet.spares),
    }
    for key, value in fleet.settings.items():
        part, _, name = key.partition(".")
        by_part.setdefault(part, {})[name] = value
    changed: dict[str, Any] = {
        PARTS[part]: replace(getattr(config, PARTS[part]), **values)
        for part, values in by_part.items()
        if values
    }
    if policy := fleet.settings.get("routing.policy"):
        changed["policy"] = policy
    return replace(config, **changed)
