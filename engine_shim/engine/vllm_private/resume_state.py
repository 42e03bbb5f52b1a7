"""Private parts of vLLM's scheduler side that we touch, for 0.32.x: taking a request up.

A request that comes with delivered tokens is made what vLLM has after a preemption: those
tokens are its *output*, nothing of it is computed, and its grammar is after them. So
penalties, min_tokens, limits and masks see what they would have seen, and prefill, prefix
cache and connector treat prompt and output alike. The model runner gets the same (`model_runner`).
"""

from __future__ import annotations

import sys
from typing import Any

from vllm.v1.request import Request, RequestStatus

from relume.engine_shim.engine.vllm_private.delivered_tokens import delivered_of


def take_up(request: Request) -> int:
    """Give a request new to the scheduler its delivered tokens; returns how many."""
    tail = delivered_of(request.sampling_params)
    if not tail:
        return 0
    request.append_output_token_ids(tail)
    # A prefix hit may reach beyond the prompt, which these statistics assert it does not.
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
        from relume.engine_shim.engine.vllm_private import model_runner

        model_runner.install()
