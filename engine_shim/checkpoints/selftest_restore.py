"""Self-test before an engine is ready: does it restore what it checkpoints?

A request is cut after some blocks, whose checkpoint a holder on a thread of this process has. It
continues twice: recomputed, and restored by the load path of every restore. Both must continue
alike. Otherwise the engine neither restores nor writes checkpoints: the test cannot show which of
the two is wrong.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Mapping
from typing import Any

from relume.engine_shim.checkpoints.connector_settings import settings_of
from relume.engine_shim.checkpoints.daemon.errors import StateDaemonError
from relume.engine_shim.checkpoints.daemon.own_holder import OwnHolder, own_holder
from relume.engine_shim.checkpoints.daemon.store.block_store import BlockStore
from relume.engine_shim.engine.selftest import (
    FEATURES,
    LATE,
    TOKENS,
    UNTESTED,
    SampledTokens,
    decode,
    prompt_of,
)
from relume.engine_shim.generation import SELF_TEST, Generation
from relume.events.wire.resumption import Resume

logger = logging.getLogger(__name__)

BLOCKS = 2
"""The last of them ends with generated tokens."""
CUT = 9
BUDGET_BYTES = 256 << 20
TIMEOUT_S = 30.0
HELD_S = 5.0
TRIES = 3
"""A busy machine may be late for a look-up."""
INEXACT_TOLERANCE = 0.5
"""Of a log probability, where recomputation itself does not give the same bits."""

RESTORE_DIFFERS = "restored blocks change what follows here"
NOT_HELD = "its blocks did not reach a holder"
NOT_RESTORED = "its blocks were held, but not restored"
NO_HOLDER = "not tested: there is no room for a holder"


async def verdict(engine: Any, exact: Mapping[str, bool | str]) -> bool | str | None:
    """True when restored blocks are what they were; else why they are not to be used. None for
    an engine that takes no part in checkpoints. `engine` is vLLM's AsyncLLM; `exact` says what
    recomputation gives here."""
    if settings_of(engine.vllm_config) is None:
        return None
    size = BLOCKS * engine.vllm_config.cache_config.block_size - CUT // 2
    if engine.model_config.max_model_len < size + TOKENS:
        return UNTESTED
    try:
        async with asyncio.timeout(TIMEOUT_S):
            with own_holder(BUDGET_BYTES) as holder:
                found = await _Test(engine, holder, prompt_of(engine, size), exact).verdict()
    except TimeoutError:
        found = LATE
    except (OSError, StateDaemonError) as error:
        found = f"{NO_HOLDER} ({error})"
    if found is not True:
        logger.error("this engine's checkpoints are not used: %s", found)
    return found


class _Test:
    def __init__(
        self, engine: Any, holder: OwnHolder, prompt: list[int], exact: Mapping[str, bool | str]
    ) -> None:
        self._engine = engine
        self._holder = holder
        self._prompt = prompt
        self._exact = exact.get("greedy") is True
        self._ranks = engine.vllm_config.parallel_config.tensor_parallel_size
        self._name = f"{SELF_TEST}{os.getpid()}"
        self._attempts = itertools.count(1)
        sampling = FEATURES["seeded"] if exact.get("seeded") is True else {}
        self._options = {**sampling, "logprobs": 1}

    async def verdict(self) -> bool | str:
        found: bool | str = NOT_HELD
        for _ in range(TRIES):
            found = await self._once()
            if found not in (NOT_HELD, NOT_RESTORED):
                break
        return found

    async def _once(self) -> bool | str:
        cut = await self._decode(None, CUT, checkpoint=(self._holder.endpoint,))
        tail = SampledTokens([cut.ids[0][:CUT]], [cut.logprobs[0][:CUT]])
        if not await self._held():
            return NOT_HELD
        before = await self._holder.ask(_served)
        computed, restored = await asyncio.gather(
            decode(self._engine, self._prompt, tail, self._options),
            self._decode(tail, 0, restore=(self._holder.endpoint,)),
        )
        if await self._holder.ask(_served) < before + BLOCKS * self._ranks:
            return NOT_RESTORED
        alike = SampledTokens.same if self._exact else _near
        return alike(restored, computed) or RESTORE_DIFFERS

    async def _decode(
        self, tail: SampledTokens | None, stop_at: int, **places: Any
    ) -> SampledTokens:
        """As a dispatched request, cut after `stop_at` tokens. The prefix cache cannot help: each
        attempt has its own salt."""
        attempt = next(self._attempts)
        resume = Resume.of("continue", tail.ids[0]) if tail else None
        generation = Generation(self._name, attempt, resume=resume, **places)
        salt = f"{self._name}/{attempt}"
        return await decode(
            self._engine, self._prompt, tail, self._options, generation, salt, stop_at
        )

    async def _held(self) -> bool:
        """Whether all ranks' blocks arrive."""
        for _ in range(int(HELD_S / 0.01)):
            positions, _ = await self._holder.ask(lambda store: store.position(self._name))
            if sum(p.blocks >= BLOCKS for p in positions) == self._ranks:
                return True
            await asyncio.sleep(0.01)
        return False


def _served(store: BlockStore) -> int:
    return store.stats()["served"]


def _near(one: SampledTokens, other: SampledTokens) -> bool:
    """Whether the first token after the cut was about as probable in both."""
    first, second = one.logprobs[0][CUT], other.logprobs[0][CUT]
    return abs(first - second) < INEXACT_TOLERANCE
