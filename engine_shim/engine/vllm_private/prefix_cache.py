"""Empties vLLM's prefix cache while requests run.

`BlockPool.reset_prefix_cache` refuses while any block is in use. Here blocks in use stay with their
requests, and no other request finds them any more.
"""

from __future__ import annotations

from typing import Any


def empty(scheduler: Any) -> None:
    """Remove all blocks from the scheduler's prefix cache."""
    pool = scheduler.kv_cache_manager.block_pool
    cached = {block.block_id for block in pool.blocks if block.block_hash is not None}
    pool.evict_blocks(cached)
