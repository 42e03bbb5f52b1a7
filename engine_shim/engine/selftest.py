"""Self-test before an engine is ready: which features are exact?

Continuing a request elsewhere recomputes its tokens in one prefill, in another batch. The
result is the same only where neither changes the largest logit: always so in float32 on
one kind of machine, not in general. So the engine decodes some prompts alone, then all
together, then continues each from the middle without its prefix cache, and compares. A few tokens
seldom show a difference that ends one of many answers, so their log probabilities count too.

Features with state along the output (a generator, penalties, a grammar) also depend on private
parts of vLLM, so each is decoded, cut and continued in the same way. Nothing of this is reported to
the agent.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import aclosing
from itertools import chain
from typing import Any, NamedTuple

from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams, StructuredOutputsParams

from relume.engine_shim.generation import CURRENT, UNREPORTED, Generation
from relume.events.wire.resumption import DeliveredChoice, Resume

logger = logging.getLogger(__name__)

PROMPT_LENGTHS = (3, 21, 50)
TOKENS = 16
CUTS = (1, 9)
TIMEOUT_S = 60.0
LOGPROB_TOLERANCE = 1e-2
GREEDY_TOLERANCE = 1e-5
"""Of a log probability, where greedy output is exact. It moves by 0 on the CPU builds tried. On an
H100 in float32, without vLLM's batch invariance, other requests in the batch moved it by up to
1.2e-3, and 3 of 24 answers of 192 tokens differed after they were continued in the middle."""

BATCH_MATTERS = "what else is in the batch changes greedy output here"
RECOMPUTE_DIFFERS = "recomputed tokens change greedy output here"
UNTESTED = "not tested: this engine does not decode prompts of the self-test's size"
RESTORE = "restore"
"""Whether restored blocks are what they were; tested where checkpoints are configured
(`selftest_restore`)."""
LATE = "the self-test did not end in time"
STATE_DIFFERS = "continued from the middle, its output differs here"

GREEDY = ("greedy", "stop_strings", "usage", "replay", "parsers")
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
    "choices": {"temperature": 0.9, "seed": 42, "n": 2},
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


class SampledTokens(NamedTuple):
    """What was sampled: token ids and their log probabilities (if asked for), by choice."""

    ids: list[list[int]]
    logprobs: list[list[float]]

    def same(self, other: SampledTokens, tolerance: float = LOGPROB_TOLERANCE) -> bool:
        """Equal, log probabilities within `tolerance`."""
        pairs = zip(chain(*self.logprobs), chain(*other.logprobs), strict=False)
        close = all(abs(a - b) < tolerance for a, b in pairs)
        lengths = [list(map(len, decoded.logprobs)) for decoded in (self, other)]
        return self.ids == other.ids and lengths[0] == lengths[1] and close


async def greedy_verdict(engine: Any) -> bool | str:
    """True when greedy output did not change; else why it is not exact."""
    config = engine.model_config
    if config.max_model_len < PROMPT_LENGTHS[-1] + TOKENS or config.runner_type != "generate":
        return UNTESTED
    prompts, options = _prompts(engine), {"logprobs": 0}  # those of the sampled tokens
    alone = [await decode(engine, prompt, None, options) for prompt in prompts]
    together = await asyncio.gather(*(decode(engine, p, None, options) for p in prompts))
    if not all(a.same(b, GREEDY_TOLERANCE) for a, b in zip(alone, together, strict=True)):
        return BATCH_MATTERS
    same = await _continues(engine, prompts, alone, options, GREEDY_TOLERANCE)
    return same or RECOMPUTE_DIFFERS


async def feature_verdict(engine: Any, name: str) -> bool | str:
    """The same for one of FEATURES, on an engine whose greedy output is exact."""
    prompts, options = _prompts(engine), FEATURES[name]
    try:
        whole = await asyncio.gather(*(decode(engine, p, None, options) for p in prompts))
        return await _continues(engine, prompts, whole, options) or STATE_DIFFERS
    except TimeoutError:
        raise
    except Exception as error:  # whatever vLLM makes of it: this engine cannot do it
        logger.warning("self-test of %s: %s", name, error)
        return f"not tested: {type(error).__name__}"


async def _continues(
    engine: Any,
    prompts: list[list[int]],
    whole: list[SampledTokens],
    options: Mapping[str, Any],
    tolerance: float = LOGPROB_TOLERANCE,
) -> bool:
    """Whether each output is the same if it is continued at each of CUTS."""
    for cut in CUTS:
        tails = [
            SampledTokens([ids[:cut] for ids in w.ids], [p[:cut] for p in w.logprobs])
            for w in whole
        ]
        parts = zip(prompts, tails, strict=True)
        rests = await asyncio.gather(*(decode(engine, p, t, options) for p, t in parts))
        if not all(a.same(b, tolerance) for a, b in zip(rests, whole, strict=True)):
            return False
    return True


def _prompts(engine: Any) -> list[list[int]]:
    return [prompt_of(engine, length) for length in PROMPT_LENGTHS]


def prompt_of(engine: Any, length: int) -> list[int]:
    """Token ids spread over the middle of the vocabulary, away from special tokens."""
    vocabulary = engine.model_config.get_vocab_size()
    low, span = vocabulary // 8, vocabulary // 2
    return [low + (i * i * 7919 + i * 104_729 + length) % span for i in range(length)]


async def decode(
    engine: Any,
    prompt: list[int],
    tail: SampledTokens | None = None,
    options: Mapping[str, Any] | None = None,
    generation: Generation | None = None,
    salt: str | None = None,
    stop_at: int = 0,
) -> SampledTokens:
    """Output of `prompt`, `tail` of it already delivered. Runs in its own context, so that it
    counts as one dispatched request: as `generation`, or as an unreported one. `salt`: of the
    prefix cache, which is not read without one. `stop_at`: it is aborted after this number of
    tokens."""
    options = dict(options or {})
    if pattern := options.pop("structured_outputs", ""):
        options["structured_outputs"] = StructuredOutputsParams(regex=pattern)
    delivered = tuple(DeliveredChoice(tuple(ids)) for ids in tail.ids) if tail else ()

    async def run() -> SampledTokens:
        resume = Resume("continue", delivered)
        CURRENT.set(generation or Generation(UNREPORTED, 1, resume=resume))
        params = SamplingParams(
            **{"temperature": 0, **options},
            max_tokens=TOKENS,
            ignore_eos=True,
            detokenize=False,
            skip_reading_prefix_cache=salt is None,
            output_kind=RequestOutputKind.DELTA,
        )
        name = f"selftest-{len(prompt)}-{len(delivered)}-{salt}"
        choices = options.get("n", 1)
        decoded = SampledTokens([[] for _ in range(choices)], [[] for _ in range(choices)])
        prompt_input = tokens_input(prompt, cache_salt=salt)
        async with aclosing(engine.generate(prompt_input, params, name)) as outputs:
            async for output in outputs:
                for choice in output.outputs:
                    decoded.ids[choice.index] += choice.token_ids
                    found = zip(choice.token_ids, choice.logprobs or (), strict=False)
                    decoded.logprobs[choice.index] += [entry[i].logprob for i, entry in found]
                if stop_at and len(decoded.ids[0]) >= stop_at:
                    break
        if tail:  # a stream does not repeat what it has shown
            for whole, had in zip(decoded.logprobs, tail.logprobs, strict=True):
                whole[: len(had)] = had
        return decoded

    return await asyncio.create_task(run())
