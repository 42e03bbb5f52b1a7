"""Answers a canary: a known prompt through the engine's whole pipeline, greedy, uncached.

Nothing of it is reported to the agent as a request, nothing is read from the prefix cache, and no
block is checkpointed. Log probabilities are vLLM's own (`logprobs`), so no switch of the engine is
needed: they move with any logit of their position.
"""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing
from itertools import count
from typing import Any

import msgspec
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams

from relume.engine_shim.canary_prompts import COUNT, PROMPTS, TOKENS, TOP, prompt_of
from relume.engine_shim.engine.cpu_clocks import WaitForCpu
from relume.engine_shim.engine.progress import Progress
from relume.engine_shim.engine.step_waits import waits_us
from relume.engine_shim.generation import CURRENT, UNREPORTED, Generation
from relume.events.decode_errors import UNREADABLE
from relume.events.wire.worker_calls import CanaryAnswered, CanaryRequest

logger = logging.getLogger(__name__)

_numbers = count(1)
_front = WaitForCpu()
"""Of the thread that serves HTTP; it waits for the thread that steps, where that is another one."""


async def respond(
    engine: Any, body: bytes, incarnation: int, page: Progress
) -> tuple[int, dict[str, Any]]:
    """Status and content of the answer to `CANARY_PATH`. `page`: on which the engine counts."""
    try:
        request = msgspec.json.decode(body, type=CanaryRequest)
    except UNREADABLE as error:
        return 400, {"error": str(error)}
    if request.incarnation != incarnation:
        return 409, {"error": "stale incarnation", "incarnation": incarnation}
    if request.prompts != PROMPTS or not 0 <= request.canary < COUNT:
        return 404, {"error": "no such canary"}
    try:
        return 200, msgspec.structs.asdict(await answer(engine, request.canary, page))
    except Exception as error:  # process edge: whatever vLLM makes of it is an answer
        logger.warning("canary %d: %s", request.canary, error)
        return 500, {"error": f"{type(error).__name__}: {error}"[:200]}


async def answer(engine: Any, canary: int, page: Progress) -> CanaryAnswered:
    """The engine's answer to one canary. `engine` is vLLM's AsyncLLM."""
    config = engine.model_config
    prompt = prompt_of(canary, config.get_vocab_size(), config.max_model_len)
    params = SamplingParams(
        temperature=0,
        max_tokens=TOKENS,
        logprobs=TOP,
        ignore_eos=True,
        detokenize=False,
        skip_reading_prefix_cache=True,
        output_kind=RequestOutputKind.DELTA,
    )
    name = f"canary-{canary}-{next(_numbers)}"
    return await asyncio.create_task(_decode(engine, prompt, params, name, page))


async def _decode(
    engine: Any, prompt: list[int], params: SamplingParams, name: str, page: Progress
) -> CanaryAnswered:
    """In a task of its own, so that it counts as one unreported request."""
    CURRENT.set(Generation(UNREPORTED, 1))
    before, began, arrived = page.read(), time.monotonic(), _arrived(page)
    computed = page.computed()
    _front.lap_us()
    tokens: list[int] = []
    logprobs: list[float] = []
    async with aclosing(engine.generate(tokens_input(prompt), params, name)) as outputs:
        async for output in outputs:
            for choice in output.outputs:
                tokens += choice.token_ids
                for entry in choice.logprobs or ():
                    found = sorted((one.logprob for one in entry.values()), reverse=True)
                    logprobs += found[:TOP]
    took_us = int((time.monotonic() - began) * 1e6)
    after = page.read()
    waited_us = waits_us(took_us, _waited_us(before, after), computed, page.computed())
    return CanaryAnswered(
        tokens=tuple(tokens),
        logprobs=tuple(logprobs),
        took_us=took_us,
        alone=_is_idle(before) and _is_idle(after) and _arrived(page) == arrived,
        wait_us=max(waited_us, _front.lap_us(), 0),
    )


def _arrived(page: Progress) -> int:
    """Prompt tokens that ever came, without those of canaries: a request may come and go while one
    is computed."""
    return page.load()[3]


def _waited_us(before: dict[str, int], after: dict[str, int]) -> int:
    """Time for which the thread that steps waited for a CPU; 0 if the system does not say."""
    known = min(before["wait_us"], after["wait_us"]) >= 0
    return after["wait_us"] - before["wait_us"] if known else 0


def _is_idle(state: dict[str, int]) -> bool:
    return not state["running"] and not state["waiting"]
