"""A connector that saves the bytes of another block under each block's tokens and digest."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relume.engine_shim.checkpoints import connector
from relume.engine_shim.checkpoints.staging.staged_cache import Buffer


class _Shifted(connector.StagedCache):
    """Copies each block's neighbour in its place."""

    def begin(self, filled: Sequence[Buffer]) -> None:
        for buffer in filled:
            buffer.block_ids = [block_id - 1 for block_id in buffer.block_ids]
        super().begin(filled)


class WrongBlocks(connector.RelumeConnector):
    """In the engine's one process."""

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        stock, connector.StagedCache = connector.StagedCache, _Shifted
        try:
            super().register_kv_caches(kv_caches)
        finally:
            connector.StagedCache = stock


class RelumeConnector(WrongBlocks):
    """The same under the name by which an engine tests itself."""
