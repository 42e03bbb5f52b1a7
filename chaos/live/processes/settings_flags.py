"""Flags of `relume serve` for the recorded settings of a scenario's fleet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from relume.policies.recorded_settings import INTEGERS

_FLAGS = {
    "routing.policy": "--policy", "routing.shed": "--routing-shed", "migration.moves": "--migration-moves",
    "checkpoints.placement": "--checkpoint-placement", "checkpoints.recovery": "--checkpoint-recovery",
    "checkpoints.holders": "--checkpoint-holders", "degradation.mode": "--degradation",
}  # fmt: skip
"""Settings with a flag of their own."""

_LIMITS = {
    "routing": "--routing-limits", "waiting": "--waiting-limits", "migration": "--migration-limits",
    "health": "--health-limits", "overdue": "--overdue-limits", "canary": "--canary-limits",
    "crosscheck": "--crosscheck-limits", "degradation": "--degradation-limits", "spares": "--spares",
}  # fmt: skip
"""The flag that takes all numbers of a part."""


def flags_of(settings: Mapping[str, int | str]) -> list[str]:
    """The flags that give replicas these settings; see `without_flag` for the others."""
    flags: list[str] = []
    limits: dict[str, list[str]] = {}
    for key, value in settings.items():
        part, _, name = key.partition(".")
        if key in _FLAGS:
            flags += (_FLAGS[key], str(value))
        elif part in _LIMITS and key in INTEGERS:
            limits.setdefault(_LIMITS[part], []).append(f"{name}={value}")
    for flag, values in limits.items():
        flags += (flag, ",".join(values))
    return flags


def without_flag(settings: Mapping[str, int | str]) -> Iterator[str]:
    """Settings that no flag of `relume serve` has."""
    for key in settings:
        if key not in _FLAGS and not (key in INTEGERS and key.partition(".")[0] in _LIMITS):
            yield key
