"""Everything private of vLLM's API side that we touch, in one place, for 0.32.x.

What is patched:

- `AsyncLLM.generate` follows what the handler takes from the engine, so that rendered
  bytes can be attributed to tokens;
- `AsyncLLM.add_request` sends our identity to EngineCore in `extra_args`, and keeps the
  client's KV-transfer parameters and anybody's forged identity away from it;
- the engine core client's `add_request_async` continues a request where another engine left it: the
output processor gets the delivered tokens as synthetic outputs of the original
  request, so detokeniser, stop strings, parsers, log probabilities and usage are exactly where they
  were; the core gets the tokens that it must count as output (`resume_state`);
- `RequestOutputCollector` is replaced for our requests by one that never merges later
  tokens into the delivered ones (`outputs`);
- random ids in answers are derived from the request (`answer_ids`);
- completions of several prompts are followed where their outputs are merged.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import AsyncGenerator, Sequence
from contextvars import ContextVar
from copy import copy
from itertools import pairwise
from typing import Any

from vllm.entrypoints.openai.completion import serving as completion_serving
from vllm.entrypoints.serve.exception_handling.error_response import create_error_response
from vllm.exceptions import GracefulHTTPError, VLLMClientError, VLLMUnprocessableEntityError
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.core.sched.utils import check_stop
from vllm.v1.engine import EngineCoreOutput, EngineCoreRequest
from vllm.v1.engine import async_llm as async_llm_module
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.engine.output_processor import RequestOutputCollector
from vllm.v1.metrics.stats import PrefillStats
from vllm.v1.request import Request

from relume.engine_shim import identity
from relume.engine_shim.engine.streams import token_notes
from relume.engine_shim.engine.streams.handover import HandedOver, note_running
from relume.engine_shim.engine.vllm_private import answer_ids, engine_core
from relume.engine_shim.engine.vllm_private.delivered_tokens import TAIL, packed
from relume.engine_shim.engine.vllm_private.outputs import OrderedCollector, logprobs_of, record_of
from relume.engine_shim.generation import (
    CURRENT,
    IDENTITY_KEY,
    EngineStopped,
    Generation,
    ReplayMismatch,
)
from relume.events.vocabulary.enums import AttemptMode
from relume.events.wire.frames import FailureKind
from relume.events.wire.resumption import DeliveredChoice, Resume


def install() -> None:
    """Patches this process; idempotent."""
    if getattr(AsyncLLM, "_relume", False):
        return
    AsyncLLM._relume = True
    AsyncLLM.generate = _generate
    AsyncLLM.add_request = _add_request
    engine_core.install()
    async_llm_module.RequestOutputCollector = _collector
    completion_serving.merge_async_iterators = _merged
    answer_ids.pin()


_stock_generate = AsyncLLM.generate
_stock_add_request = AsyncLLM.add_request
_stock_merged = completion_serving.merge_async_iterators

_PROMPT: ContextVar[int] = ContextVar("relume_prompt", default=0)
"""Which of a body's prompts is being added to the engine."""

MOST_INTERVAL = 16
"""Maximum number of tokens that vLLM gathers before it sends them (`--stream-interval`). The
control plane counts steps: a stream silent for 32 of them is stuck
(`relume.policies.liveness.overdue`)."""

_engines: weakref.WeakSet[AsyncLLM] = weakref.WeakSet()


def engines() -> list[AsyncLLM]:
    """The engines of this API process."""
    return list(_engines)


def unfinished() -> int:
    """Requests this API process gave to its engine and has not got to their end."""
    return sum(engine.output_processor.get_num_unfinished_requests() for engine in _engines)


_SERVING = {
    "/v1/chat/completions": "openai_serving_chat",
    "/v1/messages": "anthropic_serving_messages",
}
"""The handler of a route, as the app's state names it."""


def parses_output(app_state: Any, path: str, body: dict[str, Any]) -> bool:
    """Whether a stateful parser reads what this request to `path` streams."""
    if path == "/v1/responses":
        responses = getattr(app_state, "openai_serving_responses", None)
        return responses is not None and bool(responses.parser or responses.use_harmony)
    serving = getattr(app_state, _SERVING.get(path, ""), None)
    parser = getattr(serving, "parser_cls", None)
    if parser is None:
        return False
    if parser.reasoning_parser_cls or body.get("tools") or body.get("functions"):
        return True
    return path == "/v1/messages" and "tool_addition" in str(body.get("messages"))


# --- following what the handler takes ----------------------------------------------


def _generate(
    self: AsyncLLM, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
) -> AsyncGenerator[RequestOutput, None]:
    generation = CURRENT.get()
    stock = _stock_generate(self, prompt, sampling_params, request_id, **options)
    if generation is None:
        return stock
    index = generation.calls
    generation.calls += 1
    generation.width = max(generation.width, sampling_params.n)
    return _followed(generation, index, sampling_params, stock)


async def _followed(
    generation: Generation,
    prompt: int,
    params: SamplingParams,
    outputs: AsyncGenerator[RequestOutput, None],
) -> AsyncGenerator[RequestOutput, None]:
    """`outputs` as they are; between two of them, what the handler made is flushed.
    `prompt`: which of the body's prompts they belong to."""
    whole = params.output_kind == RequestOutputKind.FINAL_ONLY
    generation.whole = whole
    if whole:
        # Only the last output is shown to the handler, but all are seen here: the
        # gateway must know the tokens of a request that will answer in one piece.
        params.output_kind = RequestOutputKind.CUMULATIVE
    _PROMPT.set(prompt)
    latest: dict[int, Any] = {}
    try:
        async for output in outputs:
            if any(c.finish_reason == "abort" for c in output.outputs):
                # The client is still there, so this is the engine's doing: not an end.
                if generation.moving:
                    raise HandedOver
                if output.finished:
                    raise EngineStopped
            if output.num_cached_tokens:
                generation.cached_tokens = output.num_cached_tokens
            if whole:
                _take_whole(generation, prompt, output, latest, params.logprobs)
                if not output.finished:
                    if generation.flush is not None:
                        await generation.flush()
                    continue
                output.outputs = [latest[index] for index in sorted(latest)]
                generation.choice = 0
            elif generation.calls == 1:
                _take(generation, prompt, output)
            yield output
            if generation.calls == 1 and not output.finished and generation.flush is not None:
                await generation.flush()
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        wrapped = isinstance(error, EngineGenerateError) and error.__cause__
        cause = wrapped or error
        generation.failure, generation.error = failure_kind(cause), str(cause)
        if not generation.failure:
            refused = create_error_response(cause)
            generation.refused = refused.error.code, refused.model_dump_json().encode()
        raise
    finally:
        await outputs.aclose()


def _take(generation: Generation, prompt: int, output: RequestOutput) -> None:
    """Notes the tokens that `output`, of a stream, brings."""
    for choice in output.outputs:
        generation.take(choice.token_ids, prompt * generation.width + choice.index)
        if output.finished:
            generation.finish = choice.finish_reason or "-"


def _take_whole(
    generation: Generation,
    prompt: int,
    output: RequestOutput,
    latest: dict[int, Any],
    ranks: int | None,
) -> None:
    """Notes what the cumulative `output` of a request in one piece brings beyond `latest`.
    `ranks`: how many log probabilities a token has beside its own."""
    for choice in output.outputs:
        latest[choice.index] = choice
        index = prompt * generation.width + choice.index
        ids, entries = choice.token_ids, choice.logprobs
        seen, known = generation.taken(index), generation.known(index)
        # What waited for its reader may bring tokens on both sides of where the client is.
        cuts = (seen, known, len(ids)) if seen < known < len(ids) else (seen, len(ids))
        for begin, end in pairwise(cuts):
            note = b""
            if ranks is not None:
                note = token_notes.encode(record_of(entry, ranks) for entry in entries[begin:end])
            generation.take(ids[begin:end], index, note)
        if output.finished:
            generation.finish = choice.finish_reason or "-"


async def _merged(*iterators: Any) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs of several prompts: which of them is rendered next is only known here."""
    generation = CURRENT.get()
    outputs = _stock_merged(*iterators)
    left = len(iterators)
    try:
        async for prompt, output in outputs:
            followed = generation if len(iterators) > 1 else None
            if followed is not None and followed.whole:
                followed = None
            if followed is not None:
                _take(followed, prompt, output)
            yield prompt, output
            left -= output.finished
            if followed is not None and left and followed.flush is not None:
                await followed.flush()
    finally:
        await outputs.aclose()


def failure_kind(error: BaseException) -> str:
    """The `:x` kind of what broke a generation; empty when the request itself was at fault."""
    match error:
        case VLLMClientError() | GracefulHTTPError():
            return ""
        case EngineDeadError() | EngineStopped():
            return FailureKind.ENGINE
        case ReplayMismatch():
            return FailureKind.MISMATCH
        case HandedOver():
            return FailureKind.MOVED
    return FailureKind.INTERNAL


def _collector(output_kind: RequestOutputKind, request_id: str) -> RequestOutputCollector:
    generation = CURRENT.get()
    if generation is None or output_kind == RequestOutputKind.FINAL_ONLY:
        return RequestOutputCollector(output_kind, request_id)
    resume = generation.resume
    expected = (
        resume.choice(0).ids if resume is not None and resume.mode == AttemptMode.REPLAY else ()
    )
    return OrderedCollector(output_kind, request_id, expected)


# --- identity and resumption -------------------------------------------------------


async def _add_request(
    self: AsyncLLM, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any
) -> RequestOutputCollector:
    if self not in _engines:
        _engines.add(self)
        _hook_core(self)
        processor = self.output_processor
        processor.stream_interval = min(processor.stream_interval, MOST_INTERVAL)
    if isinstance(params, SamplingParams):
        _stamp(params, CURRENT.get())
    return await _stock_add_request(self, request_id, prompt, params, *args, **options)


def _stamp(params: SamplingParams, generation: Generation | None) -> None:
    extra = dict(params.extra_args or {})
    extra.pop(IDENTITY_KEY, None)
    if generation is not None or identity.from_environment().agent_socket:
        # The client must not name KV blocks: they might be another tenant's.
        extra.pop("kv_transfer_params", None)
        extra.pop("ec_transfer_params", None)
    if generation is not None:
        if params.stream_interval is not None:
            params.stream_interval = min(params.stream_interval, MOST_INTERVAL)
        resume = generation.resume
        reason = ""
        if resume is not None and generation.delivered:
            reason = inexact(params, resume.mode, generation.multiple)
        if reason:
            raise VLLMUnprocessableEntityError(f"cannot resume: {reason}")
        if generation.uncached:
            params.skip_reading_prefix_cache = True
        extra[IDENTITY_KEY] = generation.identity()
    params.extra_args = extra or None


def inexact(params: SamplingParams, mode: str, multiple: bool) -> str:
    """Why `mode` would change what follows the delivered tokens; empty if not."""
    if mode == AttemptMode.REPLAY:
        return "several choices or prompts are not compared" if multiple else ""
    if params.prompt_logprobs is not None:
        return "log probabilities of the prompt would be sent twice"
    if params.logprob_token_ids is not None:
        return "log probabilities of chosen tokens are not stored"
    if params.thinking_token_budget is not None:
        return "the budget's state is not carried over"
    return ""


def _hook_core(engine: AsyncLLM) -> None:
    """Have each request of `engine` looked at on its way to the core."""
    core = engine.engine_core
    add = core.add_request_async

    async def add_request(request: EngineCoreRequest) -> None:
        generation = CURRENT.get()
        if generation is not None:
            note_running(generation, request.request_id)
            request = engine_core.numbered(engine, generation, request, _PROMPT.get())
        resume = generation.resume if generation is not None else None
        if (
            generation is None
            or resume is None
            or resume.mode == AttemptMode.REPLAY
            or not generation.delivered
        ):
            await add(request)
        elif continued := _taken_up(engine, generation, resume, request):
            await add(continued)

    core.add_request_async = add_request


def _taken_up(
    engine: AsyncLLM, generation: Generation, resume: Resume, request: EngineCoreRequest
) -> EngineCoreRequest | None:
    """What the core must compute of a resumed request; None if it is at its end. Raises
    VLLMUnprocessableEntityError."""
    processor = engine.output_processor
    state = processor.request_states.get(request.request_id)
    if state is None:
        return None  # its delivered tokens ended it
    first = _PROMPT.get() * generation.width
    if state.request_index == 0:
        # All of them before the core may say anything: what the handler shows once for all
        # choices is known to the client if any of them has a token.
        for other in [s for s in processor.request_states.values() if s.queue is state.queue]:
            held = resume.choice(first + other.request_index)
            if held.ids:
                _deliver_again(engine, generation, _child(request, other.request_id), held)
    if request.request_id not in processor.request_states:
        return None
    held = resume.choice(first + state.request_index)
    return _continuation(request, generation, held, first + state.request_index)


def _child(request: EngineCoreRequest, request_id: str) -> EngineCoreRequest:
    """The request of another choice, as far as its end is concerned."""
    child = copy(request)
    child.request_id = request_id
    return child


def _deliver_again(
    engine: AsyncLLM, generation: Generation, request: EngineCoreRequest, held: DeliveredChoice
) -> None:
    """Feeds the delivered tokens to the output processor, which may find them complete."""
    processor = engine.output_processor
    state = processor.request_states[request.request_id]
    try:
        finish_reason, stop_reason = _end_of(request, held.ids, engine.model_config.max_model_len)
        logprobs = logprobs_of(request.sampling_params, held, generation.whole)
    except ValueError as error:
        processor.abort_requests([request.request_id], internal=True)
        raise VLLMUnprocessableEntityError(f"cannot resume: {error}") from None
    size = 1 if generation.stepwise and not generation.whole else len(held.ids)
    for at in range(0, len(held.ids), size):
        last = at + size >= len(held.ids)
        processor.process_outputs(
            [
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=list(held.ids[at : at + size]),
                    new_logprobs=logprobs.slice_request(at, size) if logprobs else None,
                    finish_reason=finish_reason if last else None,
                    stop_reason=stop_reason if last else None,
                    prefill_stats=_prefill_stats(engine, generation, request),
                )
            ]
        )
        if isinstance(state.queue, OrderedCollector):
            state.queue.seal()
    if state.stats is not None:
        # The next token's latency is counted from here, not from the epoch.
        state.stats.first_token_ts = state.stats.last_token_ts = time.monotonic()


def _prefill_stats(
    engine: AsyncLLM, generation: Generation, request: EngineCoreRequest
) -> PrefillStats:
    """What the first worker's engine counted of the prompt. It wrote all of its whole blocks that
    were not cached."""
    prompt, cache = len(request.prompt_token_ids or ()), engine.vllm_config.cache_config
    whole = prompt - prompt % cache.block_size if cache.enable_prefix_caching else 0
    return PrefillStats(
        num_prompt_tokens=prompt,
        num_cached_tokens=generation.cached_tokens,
        num_cache_creation_tokens=max(0, whole - generation.cached_tokens),
    )


def _end_of(request: EngineCoreRequest, tail: Sequence[int], max_model_len: int) -> tuple:
    """(finish reason, stop reason) when the last delivered token ended the request, by
    the scheduler's own rule. Raises ValueError without a prompt of tokens."""
    if request.prompt_token_ids is None:
        raise ValueError("no token prompt")
    probe = Request.from_engine_core_request(request, None)
    probe.append_output_token_ids(list(tail))
    if not check_stop(probe, max_model_len):
        return None, None
    return probe.get_finished_reason(), probe.stop_reason


def _continuation(
    request: EngineCoreRequest, generation: Generation, held: DeliveredChoice, choice: int
) -> EngineCoreRequest:
    """What the core is to compute: the same request, with what was delivered of it."""
    params = request.sampling_params.clone()
    mark = {**generation.identity(), "c": choice}
    if held.ids:
        mark[TAIL] = packed(held.ids)
    params.extra_args = {**(params.extra_args or {}), IDENTITY_KEY: mark}
    continued = copy(request)
    continued.sampling_params = params
    return continued
