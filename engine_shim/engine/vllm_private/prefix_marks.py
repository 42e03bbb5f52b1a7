"""Reports to the agent what the engine's prefix cache gains and loses: `PrefixBlocksChanged`.

Theory of operation. Every entry of vLLM's prefix cache is made by `BlockPool._insert_block_hash`
and unmade by `_remove_cached_block_hashes` or `reset_prefix_cache`; those of this engine's pool are
wrapped. Of blocks only marks are noted (`relume.events.wire.prefix`), by numbers alone; gains and
losses are gathered and leave in one record after a step that computed prompts (before the step's
own record, so that it is known with the first token), after a step after which nothing runs, or
when there are `GATHERED`: blocks of output fill one by one.

vLLM's hash is the one gateways compute where the engine hashes as by default. Elsewhere
(`--prefix-caching-hash-algo`, PYTHONHASHSEED) the default's chain is computed beside it.

A record that the socket refuses is not lost: it stays gathered. That is bounded, since prefixes
that came and went meanwhile are not reported, and at most `prefix.MAX_TOLD` are. Engines with
several kinds of KV cache, or without prefix caching, report nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import islice
from typing import Any

from relume.events.log import codec
from relume.events.vocabulary import PrefixBlocksChanged
from relume.events.wire import prefix
from relume.events.wire.reports import frame

GATHERED = 64
"""Number of gathered changes that are reported without another reason."""
MOST = 2048
"""In one record."""
DEFAULT_ALGORITHM = "sha256"

Send = Callable[[bytes, int], bool]
"""A frame, and the number of lost ones that it reports; False: not accepted."""


class PrefixReport:
    """Of one engine's `pool`. `root` gives vLLM's NONE_HASH, which is not there at first."""

    def __init__(
        self, pool: Any, incarnation: int, algorithm: str, root: Callable[[], bytes], send: Send
    ) -> None:
        self._pool = pool
        self._block_tokens = pool.hash_block_size
        self._incarnation = incarnation
        self._algorithm = algorithm
        self._root = root
        self._send = send
        self._reported: dict[int, None] = {}
        self._stored: dict[int, None] = {}
        self._removed: dict[int, None] = {}
        self._reset = True
        self._mapped: dict[bytes, int] | None = None
        self._request: Any = None
        self._stock_insert = pool._insert_block_hash
        self._stock_remove = pool._remove_cached_block_hashes
        self._stock_cache = pool.cache_full_blocks
        self._stock_reset = pool.reset_prefix_cache
        pool.cache_full_blocks = self._first_cache
        pool._remove_cached_block_hashes = self._remove
        pool.reset_prefix_cache = self._reset_cache
        self.flush()

    def step(self, prefilled: bool, running: int) -> None:
        """A step is over; its record has not left."""
        gathered = len(self._stored) + len(self._removed)
        occasion = prefilled or not running or gathered >= GATHERED
        if self._reset or (gathered and occasion):
            self.flush()

    def flush(self) -> None:
        """What is gathered leaves, as far as one record takes it and the socket takes that."""
        stored = list(islice(self._stored, MOST))
        removed = list(islice(self._removed, MOST))
        event = PrefixBlocksChanged(
            incarnation=self._incarnation,
            stored=prefix.pack(stored),
            removed=prefix.pack(removed),
            reset=self._reset,
            block_tokens=self._block_tokens if self._reset else 0,
        )
        if self._send(frame(codec.encode(event)), -1):
            self._reset = False
            _forget(self._stored, stored)
            _forget(self._removed, removed)

    # --- what the pool does ---------------------------------------------------------------

    def _first_cache(self, request: Any, *args: Any, **options: Any) -> None:
        """By now vLLM has set where its chains begin."""
        pool = self._pool
        if self._algorithm == DEFAULT_ALGORITHM and self._root() == prefix.ROOT:
            pool.cache_full_blocks, pool._insert_block_hash = self._stock_cache, self._insert
        else:
            self._mapped = {}
            pool.cache_full_blocks, pool._insert_block_hash = self._cache, self._insert_mapped
        pool.cache_full_blocks(request, *args, **options)

    def _insert(self, key: bytes, block: Any, num_tokens: int | None) -> None:
        self._stock_insert(key, block, num_tokens)
        if num_tokens is not None and prefix.is_mark(num_tokens // self._block_tokens):
            self._gained(prefix.of_key(key))

    def _remove(self, block: Any) -> list[bytes]:
        keys = self._stock_remove(block)
        for key in keys:
            one = prefix.of_key(key) if self._mapped is None else self._mapped.get(key, -1)
            if one in self._reported and not self._holds(key):
                self._lost(one)
                if self._mapped is not None:
                    del self._mapped[key]
        return keys

    def _reset_cache(self) -> bool:
        if not self._stock_reset():
            return False
        self._reported.clear()
        if self._mapped is not None:
            self._mapped.clear()
        self._stored.clear()
        self._removed.clear()
        self._reset = True
        self.flush()
        return True

    def _holds(self, key: bytes) -> bool:
        """Another block may have the same tokens."""
        return self._pool.cached_block_hash_to_block.get_one_block(key) is not None

    def _gained(self, one: int) -> bool:
        reported = self._reported
        if one in reported or len(reported) >= prefix.MAX_REPORTED:
            return False
        reported[one] = None
        if one in self._removed:
            del self._removed[one]
        else:
            self._stored[one] = None
        return True

    def _lost(self, one: int) -> None:
        del self._reported[one]
        if one in self._stored:
            del self._stored[one]
        else:
            self._removed[one] = None

    # --- where vLLM's hashes are others ------------------------------------------------------

    def _cache(self, request: Any, *args: Any, **options: Any) -> None:
        self._request = request
        try:
            self._stock_cache(request, *args, **options)
        finally:
            self._request = None

    def _insert_mapped(self, key: bytes, block: Any, num_tokens: int | None) -> None:
        self._stock_insert(key, block, num_tokens)
        request, mapped = self._request, self._mapped
        if num_tokens is None or request is None or mapped is None:
            return
        blocks = num_tokens // self._block_tokens
        if prefix.is_mark(blocks) and key not in mapped:
            one = prefix.of_key(self._chain(request, blocks)[blocks - 1])
            if self._gained(one):
                mapped[key] = one

    def _chain(self, request: Any, blocks: int) -> list[bytes]:
        """The default's hashes of the request's first blocks, at least `count`; stored with it."""
        from vllm.v1.core.kv_cache_utils import generate_block_hash_extra_keys

        chain: list[bytes] = request.__dict__.setdefault("_relume_chain", [])
        size, tokens = self._block_tokens, request.all_token_ids
        for number in range(len(chain), blocks):
            begin, end = number * size, (number + 1) * size
            extra, _ = generate_block_hash_extra_keys(request, begin, end, 0)
            before = chain[-1] if chain else prefix.ROOT
            chain.append(prefix.link(before, tokens[begin:end], extra))
        return chain


def _forget(gathered: dict[int, None], reported: Iterable[int]) -> None:
    for one in reported:
        del gathered[one]


def of_scheduler(scheduler: Any, incarnation: int, send: Send) -> PrefixReport | None:
    """The report of the scheduler's prefix cache; None if it has none that can be reported."""
    from vllm.v1.core import kv_cache_utils

    manager = scheduler.kv_cache_manager
    pool = manager.block_pool
    one_kind = len(manager.kv_cache_config.kv_cache_groups) == 1
    if not manager.enable_caching or not one_kind or pool.hash_block_size != scheduler.block_size:
        return None
    algorithm = scheduler.cache_config.prefix_caching_hash_algo
    return PrefixReport(pool, incarnation, algorithm, lambda: kv_cache_utils.NONE_HASH, send)
