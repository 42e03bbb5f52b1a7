"""What is exact here? Asked of the engine itself before it says it is ready.

Continuing a request elsewhere recomputes its tokens in one prefill, in another batch. The
result is the same only where neither changes the largest logit: always so in float32 on
one kind of machine, not in general. So the engine decodes some prompts alone, then all
together, then continues each from the middle without its prefix cache, and compares.

What has state of its own along the output (a generator, penalties, a grammar) rests on
private parts of vLLM as well, so each is decoded, cut and continued in the same way.
Nothing of this is reported to the agent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from engine_shim.generation import CURRENT, UNREPORTED, Generation, Resume

logger = logging.getLogger(__name__)

PROMPT_LENGTHS = (3, 21, 50)
TOKENS = 16
CUTS = (1, 9)
TIMEOUT_S = 60.0

BATCH_MATTERS = "what else is in the batch changes greedy output here"
RECOMPUTE_DIFFERS = "recomputed tokens change greedy output here"
UNTESTED = "not tested: this engine does not decode prompts of the self-test's size"
LATE = "the self-test did not end in time"
STATE_DIFFERS = "taken up in the middle, it goes on differently here"

GREEDY = ("greedy", "stop_strings", "usage", "replay", "parsers", "choices")
"""What is exact where recomputed tokens are."""

FEATURES: Mapping[str, Mapping[str, Any]] = {
    "seeded": {"temperature": 0.9, "top_p": 0.95, "top_k": 200, "seed": 42},
    "penalties": {
        "presence_penalty": 0.7,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
        "min_tokens": TOKENS // 2,
    },
    "logprobs": {"logprobs": 2},
    "structured": {"structured_outputs": r"[a-z]{2}( [a-z]+[,.]){200}"},
}
"""Sampling parameters of what else is tested, over those of greedy decoding."""


async def verdicts(engine: Any) -> dict[str, bool | str]:
    """Ways to take a request up again: true where what follows is exact, or why it is not.
    `engine` is vLLM's AsyncLLM."""
    try:
        async with asyncio.timeout(TIMEOUT_S):
            greedy = await greedy_verdict(engine)
            if greedy is not True:
                return dict.fromkeys((*GREEDY, *FEATURES), greedy)
            features = {name: await feature_verdict(engine, name) for name in FEATURES}
    except TimeoutError:
        return dict.fromkeys((*GREEDY, *FEATURES), LATE)
    return dict.fromkeys(GREEDY, True) | features


async def greedy_verdict(engine: Any) -> bool | str:
    """True when greedy output did not change; else why it is not exact."""
    config = engine.model_config
    if config.max_model_len < PROMPT_LENGTHS[-1] + TOKENS or config.runner_type != "generate":
        return UNTESTED
    prompts = [_prompt(length, config.get_vocab_size()) for length in PROMPT_LENGTHS]
    alone = [await _decode(engine, prompt) for prompt in prompts]
    together = await asyncio.gather(*(_decode(engine, prompt) for prompt in prompts))
    if together != alone:
        return BATCH_MATTERS
    return await _continues(engine, prompts, alone, {}) or RECOMPUTE_DIFFERS


async def feature_verdict(engine: Any, name: str) -> bool | str:
    """The same for one of FEATURES, on an engine whose greedy output is exact."""
    vocabulary = engine.model_config.get_vocab_size()
    prompts = [_prompt(length, vocabulary) for length in PROMPT_LENGTHS]
    try:
        whole = await asyncio.gather(*(_decode(engine, p, (), FEATURES[name]) for p in prompts))
        return await _continues(engine, prompts, whole, FEATURES[name]) or STATE_DIFFERS
    except TimeoutError:
        raise
    except Exception as error:  # whatever vLLM makes of it: this engine cannot do it
        logger.warning("self-test of %s: %s", name, error)
        return f"not tested: {type(error).__name__}"


async def _continues(
    engine: Any, prompts: list[list[int]], whole: list[list[int]], options: Mapping[str, Any]
) -> bool:
    """Whether each output is the same when it is taken up at each of CUTS."""
    for cut in CUTS:
        parts = zip(prompts, whole, strict=True)
        rests = (_decode(engine, prompt, tuple(ids[:cut]), options) for prompt, ids in parts)
        if await asyncio.gather(*rests) != whole:
            return False
    return True


def _prompt(length: int, vocabulary: int) -> list[int]:
    """Token ids spread over the middle of the vocabulary, away from special tokens."""
    low, span = vocabulary // 8, vocabulary // 2
    return [low + (i * i * 7919 + i * 104_729 + length) % span for i in range(length)]


async def _decode(
    engine: Any,
    prompt: list[int],
    tail: tuple[int, ...] = (),
    options: Mapping[str, Any] | None = None,
) -> list[int]:
    """Output of `prompt`, `tail` of it already delivered. Runs in a context of its own, so
    that it is seen as one dispatched request."""
    options = dict(options or {})
    if pattern := options.pop("structured_outputs", ""):
        options["structured_outputs"] = StructuredOutputsParams(regex=pattern)

    async def decode() -> list[int]:
        CURRENT.set(Generation(UNREPORTED, 1, resume=Resume.of("continue", tail)))
        params = SamplingParams(
            **{"temperature": 0, **options},
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
