"""The self-test finds an engine whose greedy output depends on batch or recomputation."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any

import pytest

from relume.engine_shim.generation import CURRENT

pytestmark = pytest.mark.full


@pytest.fixture
def selftest() -> Any:
    """The module. Importing it takes seconds, and every process of a run collects this one."""
    from relume.engine_shim.engine import selftest

    return selftest


class Decoder:
    """Stands for AsyncLLM: tokens are a function of the prompt, of how many requests run
    (when `batch_matters`) and of the tail (when `recompute_differs`). `moved`: what these two
    change is the log probabilities, by so much, and no token."""

    def __init__(
        self,
        batch_matters: bool = False,
        recompute_differs: bool = False,
        seeds_differ: bool = False,
        moved: float = 0.0,
    ) -> None:
        self.model_config = SimpleNamespace(
            max_model_len=512, runner_type="generate", get_vocab_size=lambda: 1000
        )
        self._batch_matters = batch_matters
        self._recompute_differs = recompute_differs
        self._seeds_differ = seeds_differ
        self._moved = moved
        self._running = 0

    async def generate(self, prompt: Any, params: Any, name: str) -> Any:
        generation = CURRENT.get()
        assert generation is not None and generation.resume is not None
        assert params.skip_reading_prefix_cache
        tail = generation.resume.choice(0).ids
        self._running += 1
        with contextlib.ExitStack() as stack:
            stack.callback(self._leave)
            seed = sum(prompt["prompt_token_ids"])
            ids = [(seed * (i + 1)) % 997 for i in range(params.max_tokens)]
            assert tuple(ids[: len(tail)]) == tail
            await asyncio.sleep(0)
            differs = self._batch_matters and self._running > 1
            differs |= bool(tail) and self._recompute_differs
            if (differs and not self._moved) or (tail and self._seeds_differ and params.seed):
                ids[-1] += 1
            logprob = -1.0 + (self._moved if differs else 0.0)
            for token in ids:
                found = {token: SimpleNamespace(logprob=logprob)}
                logprobs = None if params.logprobs is None else [found]
                yield SimpleNamespace(
                    outputs=[
                        SimpleNamespace(index=index, token_ids=[token], logprobs=logprobs)
                        for index in range(params.n)
                    ]
                )
                await asyncio.sleep(0)

    def _leave(self) -> None:
        self._running -= 1


async def test_engine_that_always_says_the_same_is_exact(selftest: Any) -> None:
    verdicts = await selftest.verdicts(Decoder())
    assert set(verdicts.values()) == {True}
    assert {"greedy", "seeded", "penalties", "structured", "logprobs"} <= set(verdicts)


async def test_batch_dependence_is_found(selftest: Any) -> None:
    verdicts = await selftest.verdicts(Decoder(batch_matters=True))
    assert set(verdicts.values()) == {selftest.BATCH_MATTERS}


async def test_difference_by_recomputation_is_found(selftest: Any) -> None:
    verdicts = await selftest.verdicts(Decoder(recompute_differs=True))
    assert set(verdicts.values()) == {selftest.RECOMPUTE_DIFFERS}


@pytest.mark.parametrize("cause", ("batch_matters", "recompute_differs"))
async def test_greedy_is_not_exact_if_only_log_probabilities_move(
    selftest: Any, cause: str
) -> None:
    """Without batch-invariant kernels an H100 moved them by 1.2e-3; the few tokens were the same."""
    verdicts = await selftest.verdicts(Decoder(**{cause: True}, moved=1e-3))
    assert set(verdicts.values()) == {getattr(selftest, cause.upper())}


async def test_last_bits_of_log_probabilities_do_not_count(selftest: Any) -> None:
    verdicts = await selftest.verdicts(Decoder(batch_matters=True, moved=1e-6))
    assert set(verdicts.values()) == {True}


async def test_generator_in_a_wrong_state_is_found(selftest: Any) -> None:
    verdicts = await selftest.verdicts(Decoder(seeds_differ=True))
    differ = {name for name, verdict in verdicts.items() if verdict == selftest.STATE_DIFFERS}
    assert differ == {"seeded", "choices"}
    assert {verdicts[name] for name in verdicts.keys() - differ} == {True}


async def test_engine_too_small_to_test_says_so(selftest: Any) -> None:
    small = Decoder()
    small.model_config.max_model_len = 32
    assert set((await selftest.verdicts(small)).values()) == {selftest.UNTESTED}
