"""Private parts of vLLM's scheduler side that we touch, for 0.32.x: taking a request up.

A request that comes with delivered tokens is made what vLLM has after a preemption: those
tokens are its *output*, nothing of it is computed, and its grammar stands behind them. So
penalties, min_tokens, limits and masks see what they would have seen, and prefill, prefix
cache and connector treat prompt and output alike. The model runner is told the same way
(`vllm_private_runner`).
"""

from __future__ import annotations

import array
import sys
from collections.abc import Sequence
from typing import Any

from vllm.v1.request import Request, RequestStatus

from relume.engine_shim.generation import IDENTITY_KEY

TAIL = "t"
"""Key of the delivered tokens in the identity: uint32, this machine's byte order."""


def packed(tail: Sequence[int]) -> bytes:
    """Delivered tokens as they travel inside the engine."""
    return array.array("I", tail).tobytes()


def delivered_of(params: Any) -> list[int]:
    """The tokens a request was taken up with, from its sampling parameters."""
    mark = (params.extra_args or {}).get(IDENTITY_KEY) if params is not None else None
    if not mark or TAIL not in mark:
        return []
    return array.array("I", mark[TAIL]).tolist()


def take_up(request: Request) -> int:
    """Give a request new to the scheduler its delivered tokens; returns how many."""
    tail = delivered_of(request.sampling_params)
    if not tail:
        return 0
    request.append_output_token_ids(tail)
    # A prefix hit may reach behind the prompt, which these figures assert it does not.
    request.prefill_stats = None
    return len(tail)


def waits_for_grammar(request: Request) -> bool:
    """Whether its grammar is still being compiled."""
    return request.status == RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR


def advance_grammar(scheduler: Any, request: Request) -> bool:
    """Lead the grammar of a request just promoted over its delivered tokens. When it does
    not take them the request is ended with an error, and False returned."""
    tail = list(request.output_token_ids)
    if not tail or scheduler.structured_output_manager.accept_tokens(request, tail):
        return True
    scheduler.grammar_compile_error_reqs.add(request.request_id)
    return False


def patch_runner() -> None:
    """Patch the model runner if it lives in this process."""
    if "vllm.v1.worker.gpu_model_runner" in sys.modules:
        from relume.engine_shim import vllm_private_runner

        vllm_private_runner.install()
