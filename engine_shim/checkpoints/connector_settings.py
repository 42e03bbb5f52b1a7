"""Whether an engine takes part in checkpoints, and by which settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NAME = "RelumeConnector"


def settings_of(vllm_config: Any) -> Mapping[str, Any] | None:
    """`kv_connector_extra_config` of our connector, alone or one of a `MultiConnector`'s; None
    for an engine that takes no part in checkpoints."""
    transfer = vllm_config.kv_transfer_config
    if transfer is None:
        return None
    extra = transfer.kv_connector_extra_config or {}
    if transfer.kv_connector == NAME:
        return extra
    for inner in extra.get("connectors", ()) if transfer.kv_connector == "MultiConnector" else ():
        if inner.get("kv_connector") == NAME:
            return inner.get("kv_connector_extra_config") or {}
    return None
