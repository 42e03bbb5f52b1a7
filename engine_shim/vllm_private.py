"""Everything private of vLLM that we touch, in one place, for 0.32.x.

What is patched, all on the API side of the engine:

- `AsyncLLM.generate` follows what the handler takes from the engine, so that rendered
  bytes can be attributed to tokens;
- `AsyncLLM.add_request` sends our identity to EngineCore in `extra_args`, and keeps the
  client's KV-transfer parameters and anybody's forged identity away from it;
- `AsyncLLM._add_request` takes a request up where another engine left it: the output
  processor gets the *original* request and all delivered tokens as one synthetic output,
  so detokeniser, stop strings, parsers and usage stand exactly where they stood; the core
  gets a copy whose prompt is prompt + delivered tokens;
- `RequestOutputCollector` is replaced for our requests by one that never merges later
  tokens into the delivered ones.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import AsyncGenerator
from copy import copy
from typing import Any

import vllm
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

from engine_shim import identity, vllm_private_core
from engine_shim.generation import CURRENT, IDENTITY_KEY, EngineStopped, Generation, ReplayMismatch

SUPPORTED = "0.32."
MERGE_AFTER = 64
"""Outputs a slow reader may leave unread before further ones are merged into the last."""
MERGED_TOKENS = 32
"""And so many tokens a merged one may hold: it is rendered in one go, and the server serves
nobody else meanwhile (a thousand tokens with their log probabilities take seconds)."""


class UnsupportedVllm(RuntimeError):
    """The installed vLLM is not one whose private parts this module knows."""

    def __init__(self, found: str) -> None:
        super().__init__(f"vLLM {found} is installed; Relume's engine shim knows {SUPPORTED}x only")
        self.found = found


def check_version() -> None:
    """Raises UnsupportedVllm."""
    found = vllm.__version__
    if not found.startswith(SUPPORTED):
        raise UnsupportedVllm(found)


def install() -> None:
    """Patches this process; idempotent. Raises UnsupportedVllm."""
    check_version()
    if getattr(AsyncLLM, "_relume", False):
        return
    AsyncLLM._relume = True
    AsyncLLM.generate = _generate
    AsyncLLM.add_request = _add_request
    AsyncLLM._add_request = _add_single_request
    vllm_private_core.install()
    async_llm_module.RequestOutputCollector = _collector


_stock_generate = AsyncLLM.generate
_stock_add_request = AsyncLLM.add_request
_stock_add_single_request = AsyncLLM._add_request

_engines: weakref.WeakSet[AsyncLLM] = weakref.WeakSet()


def engines() -> list[AsyncLLM]:
    """The engines of this API process."""
    return list(_engines)


def unfinished() -> int:
    """Requests this API process gave to its engine and has not got to their end."""
    return sum(engine.output_processor.get_num_unfinished_requests() for engine in _engines)


# --- following what the handler takes ----------------------------------------------


def _generate(
    self: AsyncLLM, prompt: Any, sampling_params: SamplingParams, request_id: str, **options: Any
) -> AsyncGenerator[RequestOutput, None]:
    generation = CURRENT.get()
    stock = _stock_generate(self, prompt, sampling_params, request_id, **options)
    if generation is None:
        return stock
    generation.calls += 1
    return _followed(generation, sampling_params, stock)


async def _followed(
    generation: Generation, params: SamplingParams, outputs: AsyncGenerator[RequestOutput, None]
) -> AsyncGenerator[RequestOutput, None]:
    """`outputs` as they are; between two of them, what the handler made is flushed."""
    if params.n > 1:
        generation.finish = "multi"
    whole = params.output_kind == RequestOutputKind.FINAL_ONLY and not generation.multiple
    if whole:
        # Only the last output is shown to the handler, but all are seen here: the
        # gateway must know the tokens of a request that will answer in one piece.
        params.output_kind = RequestOutputKind.CUMULATIVE
    seen = 0
    try:
        async for output in outputs:
            if output.finished and any(c.finish_reason == "abort" for c in output.outputs):
                # The client is still there, so this is the engine's doing: not an end.
                raise EngineStopped
            if generation.multiple:
                generation.outputs += 1
            else:
                seen = _take(generation, output, seen if whole else 0)
            if not whole or output.finished:
                yield output
            if not output.finished and generation.flush is not None:
                await generation.flush()
    except (asyncio.CancelledError, GeneratorExit):
        raise
    except BaseException as error:
        wrapped = isinstance(error, EngineGenerateError) and error.__cause__
        cause = wrapped or error
        generation.failure, generation.error = failure_kind(cause), str(cause)
        raise
    finally:
        await outputs.aclose()


def _take(generation: Generation, output: RequestOutput, seen: int) -> int:
    """Notes the new tokens of `output`, which lie behind `seen`; returns the new `seen`."""
    (choice,) = output.outputs
    generation.take(choice.token_ids[seen:])
    if output.num_cached_tokens:
        generation.cached_tokens = output.num_cached_tokens
    if output.finished:
        generation.finish = choice.finish_reason or "-"
    return max(seen, len(choice.token_ids))


def failure_kind(error: BaseException) -> str:
    """The `:x` kind of what broke a generation; empty when the request itself was at fault."""
    match error:
        case VLLMClientError() | GracefulHTTPError():
            return ""
        case EngineDeadError() | EngineStopped():
            return "engine"
        case ReplayMismatch():
            return "mismatch"
    return "internal"


# --- outputs in order --------------------------------------------------------------


class OrderedCollector(RequestOutputCollector):
    """Hands outputs over one by one, in order, instead of merging what waits.

    Outputs that bring tokens the client already has are never merged with later ones: the
    first of a continued request, and in replay mode as many as bring the expected tokens.
    Those are held back, and compared, until all of them came again.
    """

    def __init__(
        self, output_kind: RequestOutputKind, request_id: str, mode: str, tail: tuple[int, ...]
    ) -> None:
        super().__init__(output_kind, request_id)
        self._items: deque[RequestOutput | Exception] = deque()
        self._expected = tail if mode == "replay" else ()
        self._held: list[RequestOutput] = []
        self._compared = 0
        self._sealed = 1 if tail and mode == "continue" else 0

    def put(self, output: Any) -> None:
        if self._expected and isinstance(output, RequestOutput):
            self._compare(output)
        elif self._mergeable() and isinstance(output, RequestOutput):
            self._items[-1].add(output, aggregate=self.aggregate)
        else:
            self._items.append(output)
        if self._items:
            self.ready.set()

    def _mergeable(self) -> bool:
        """Whether what waits last may take up more: only the latest of cumulative outputs
        counts, and a slow reader's queue has an end."""
        most = MERGE_AFTER if self.aggregate else 1
        if len(self._items) - self._sealed < most:
            return False
        last = self._items[-1]
        if not isinstance(last, RequestOutput):
            return False
        return not self.aggregate or len(last.outputs[0].token_ids) < MERGED_TOKENS

    def _compare(self, output: RequestOutput) -> None:
        """Holds `output` back until all expected tokens came again."""
        (choice,) = output.outputs
        fresh = choice.token_ids if self.aggregate else choice.token_ids[self._compared :]
        for index, actual in enumerate(fresh):
            if self._compared == len(self._expected):
                if self.aggregate:
                    # One output brings tokens on both sides of the cut; its text is one.
                    self._mismatch(None, fresh[index])
                    return
                break
            if actual != self._expected[self._compared]:
                self._mismatch(self._expected[self._compared], actual)
                return
            self._compared += 1
        self._held.append(output)
        if self._compared == len(self._expected):
            self._items.extend(self._held if self.aggregate else self._held[-1:])
            self._sealed = len(self._items) if self.aggregate else 0
            self._settle()
        elif output.finished:
            self._mismatch(self._expected[self._compared], None)

    def _mismatch(self, expected: int | None, actual: int | None) -> None:
        self._items.append(ReplayMismatch(self._compared, expected, actual))
        self._settle()

    def _settle(self) -> None:
        self._expected = ()
        self._held = []

    async def get(self) -> Any:
        while not self._items:
            await self.ready.wait()
        return self._pop()

    def get_nowait(self) -> Any:
        return self._pop() if self._items else None

    def _pop(self) -> Any:
        item = self._items.popleft()
        self._sealed = max(0, self._sealed - 1)
        if not self._items:
            self.ready.clear()
        if isinstance(item, Exception):
            raise item
        return item


def _collector(output_kind: RequestOutputKind, request_id: str) -> RequestOutputCollector:
    generation = CURRENT.get()
    if generation is None or generation.multiple or output_kind == RequestOutputKind.FINAL_ONLY:
        return RequestOutputCollector(output_kind, request_id)
    resume = generation.resume
    mode, tail = (resume.mode, resume.tail) if resume else ("", ())
    return OrderedCollector(output_kind, request_id, mode, tail)


# --- identity and resumption -------------------------------------------------------


async def _add_request(
    self: AsyncLLM, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any
) -> RequestOutputCollector:
    _engines.add(self)
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
        if generation.delivered and (generation.multiple or params.n > 1):
            raise VLLMUnprocessableEntityError("cannot resume: several choices or prompts")
        extra[IDENTITY_KEY] = generation.identity()
    params.extra_args = extra or None


async def _add_single_request(
    self: AsyncLLM,
    request: EngineCoreRequest,
    prompt: str | None,
    parent: Any,
    index: int,
    queue: RequestOutputCollector,
) -> None:
    generation = CURRENT.get()
    resume = generation.resume if generation is not None else None
    if resume is None or resume.mode == "replay" or not resume.tail:
        await _stock_add_single_request(self, request, prompt, parent, index, queue)
        return
    if reason := inexact(request.sampling_params, request):
        raise VLLMUnprocessableEntityError(f"cannot resume: {reason}")
    self.check_admission(request_id=request.request_id)
    self.output_processor.add_request(request, prompt, parent, index, queue)
    if _deliver_again(self, request, resume.tail, generation.cached_tokens):
        return
    await self.engine_core.add_request_async(_continuation(request, resume.tail))


def inexact(params: SamplingParams | None, request: EngineCoreRequest) -> str:
    """Why feeding delivered tokens as prompt would change what follows; empty if not."""
    if params is None or request.prompt_token_ids is None:
        return "no token prompt"
    if params.logprobs is not None or params.prompt_logprobs is not None:
        return "logprobs of delivered tokens are unknown"
    if params.structured_outputs is not None:
        return "the grammar would restart at its root"
    if params.presence_penalty or params.frequency_penalty:
        return "penalties count output tokens only"
    if params.bad_words:
        return "bad words are matched in output tokens only"
    if params.temperature and params.seed is not None:
        return "a seeded sampler would restart its sequence"
    if params.repetition_detection is not None or params.thinking_token_budget is not None:
        return "a limit counts output tokens only"
    return ""


def _deliver_again(
    engine: AsyncLLM, request: EngineCoreRequest, tail: tuple[int, ...], cached_tokens: int
) -> bool:
    """Feeds the delivered tokens to the output processor; True when they end the request."""
    finish_reason, stop_reason = _end_of(request, tail, engine.model_config.max_model_len)
    processor = engine.output_processor
    processor.process_outputs(
        [
            EngineCoreOutput(
                request_id=request.request_id,
                new_token_ids=list(tail),
                finish_reason=finish_reason,
                stop_reason=stop_reason,
                prefill_stats=PrefillStats(
                    num_prompt_tokens=len(request.prompt_token_ids or ()),
                    num_cached_tokens=cached_tokens,
                ),
            )
        ]
    )
    state = processor.request_states.get(request.request_id)
    if state is None:
        return True
    if state.stats is not None:
        # The next token's latency is counted from here, not from the epoch.
        state.stats.first_token_ts = state.stats.last_token_ts = time.monotonic()
    return False


def _end_of(request: EngineCoreRequest, tail: tuple[int, ...], max_model_len: int) -> tuple:
    """(finish reason, stop reason) when the last delivered token ended the request, by
    the scheduler's own rule."""
    probe = Request.from_engine_core_request(request, None)
    probe.append_output_token_ids(list(tail))
    if not check_stop(probe, max_model_len):
        return None, None
    return probe.get_finished_reason(), probe.stop_reason


def _continuation(request: EngineCoreRequest, tail: tuple[int, ...]) -> EngineCoreRequest:
    """What the core computes: the same request with the delivered tokens in its prompt."""
    params = request.sampling_params.clone()
    params.max_tokens -= len(tail)
    params.min_tokens = max(0, params.min_tokens - len(tail))
    continued = copy(request)
    continued.prompt_token_ids = [*request.prompt_token_ids, *tail]
    continued.sampling_params = params
    return continued


def verdicts(greedy: bool | str) -> dict[str, bool | str]:
    """Ways to take a request up again, and whether what follows is exact (or why not).
    `greedy` is the self-test's verdict, on which the text-level features rest."""
    return {
        "greedy": greedy,
        "stop_strings": greedy,
        "usage": greedy,
        "replay": greedy,
        "seeded": "a seeded sampler would restart its sequence",
        "penalties": "penalties count output tokens only",
        "structured": "the grammar would restart at its root",
        "logprobs": "logprobs of delivered tokens are unknown",
    }
