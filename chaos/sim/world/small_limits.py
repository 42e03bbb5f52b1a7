"""Limits of the log and of engines that a scenario makes small (`fleet.limits`)."""

from __future__ import annotations

from msgspec.structs import replace

from relume.chaos.scenario.language import Limits
from relume.chaos.sim.engine.host_types import HostSpec
from relume.events.etcd.config import EtcdConfig


def log_limits(limits: Limits) -> EtcdConfig:
    """The settings of the log."""
    config = EtcdConfig()
    if limits.unwritten_kb:
        config = replace(config, memory_limit_bytes=limits.unwritten_kb << 10)
    if limits.segment_bytes:
        config = replace(config, linger_bytes=limits.segment_bytes)
    return config


def engine_limits(spec: HostSpec, limits: Limits) -> HostSpec:
    """The host type with a small batch or KV cache."""
    return replace(
        spec,
        max_seqs=limits.running or spec.max_seqs,
        kv_blocks=limits.kv_blocks or spec.kv_blocks,
    )
