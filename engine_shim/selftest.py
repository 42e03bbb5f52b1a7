"""Is greedy decoding exact here? Asked of the engine itself before it says it is ready.

Continuing a request elsewhere recomputes its tokens in one prefill, in another batch. The
result is the same only where neither changes the largest logit: always so in float32 on
one kind of machine, not in general. So the engine decodes some prompts alone, then all
together, then continues each from the middle without its prefix cache, and compares.
Nothing of this is reported to the agent.
"""

from __future__ import annotations

import asyncio
from typing import Any

from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from engine_shim.generation import CURRENT, UNREPORTED, Generation, Resume

PROMPT_LENGTHS = (3, 21, 50)
TOKENS = 16
CUTS = (1, 9)
TIMEOUT_S = 60.0

BATCH_MATTERS = "what else is in the batch changes greedy output here"
RECOMPUTE_DIFFERS = "recomputed tokens change greedy output here"
UNTESTED = "not tested: this engine does not decode prompts of the self-test's size"


async def greedy_verdict(engine: Any) -> bool | str:
    """True when greedy output did not change; else why it is not exact.

    `engine` is vLLM's AsyncLLM. Raises TimeoutError after TIMEOUT_S.
    """
    config = engine.model_config
    if config.max_model_len < PROMPT_LENGTHS[-1] + TOKENS or config.runner_type != "generate":
        return UNTESTED
    prompts = [_prompt(length, config.get_vocab_size()) for length in PROMPT_LENGTHS]
    async with asyncio.timeout(TIMEOUT_S):
        alone = [await _decode(engine, prompt) for prompt in prompts]
        together = await asyncio.gather(*(_decode(engine, prompt) for prompt in prompts))
        if together != alone:
            return BATCH_MATTERS
        for cut in CUTS:
            rests = await asyncio.gather(
                *(
                    _decode(engine, prompt, tuple(ids[:cut]))
                    for prompt, ids in zip(prompts, alone, strict=True)
                )
            )
            if rests != alone:
                return RECOMPUTE_DIFFERS
    return True


def _prompt(length: int, vocabulary: int) -> list[int]:
    """Token ids spread over the middle of the vocabulary, away from special tokens."""
    low, span = vocabulary // 8, vocabulary // 2
    return [low + (i * i * 7919 + i * 104_729 + length) % span for i in range(length)]


async def _decode(engine: Any, prompt: list[int], tail: tuple[int, ...] = ()) -> list[int]:
    """Greedy output of `prompt`, `tail` of it already delivered. Runs in a context of its
    own, so that it is seen as one dispatched request."""

    async def decode() -> list[int]:
        CURRENT.set(Generation(UNREPORTED, 1, resume=Resume("continue", tail)))
        params = SamplingParams(
            temperature=0,
            max_tokens=TOKENS,
            ignore_eos=True,
            detokenize=False,
            skip_reading_prefix_cache=True,
            output_kind=RequestOutputKind.DELTA,
        )
        name = f"selftest-{len(prompt)}-{len(tail)}"
        ids: list[int] = []
        async for output in engine.generate(tokens_input(prompt), params, name):
            ids += output.outputs[0].token_ids
        return ids

    return await asyncio.create_task(decode())
