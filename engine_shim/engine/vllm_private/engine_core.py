"""Private parts of vLLM's EngineCore: Relume's utility methods, called from the API process like
its own. One passes other holders for a running request to the connector; one stops a request that
will continue elsewhere; one does nothing, and so shows that the core's loop turns. Also the data
that travels with requests to the core."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from typing import Any

from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore

from relume.engine_shim import identity
from relume.engine_shim.engine.streams.handover import Refusal, given_up
from relume.engine_shim.generation import CURRENT, IDENTITY_KEY, Generation

_stock_rejected = AsyncLLM.notify_kv_transfer_request_rejected


def install() -> None:
    """Adds the methods; idempotent."""
    EngineCore.relume_retarget = _retarget
    EngineCore.relume_hand_over = _hand_over
    EngineCore.relume_turn = _turn
    AsyncLLM.notify_kv_transfer_request_rejected = _rejected


async def retarget(
    engines: Iterable[AsyncLLM], request: str, attempt: int, targets: tuple[str, ...]
) -> bool:
    """Has an attempt's blocks stored at `targets` from now on; False when none of these engines
    runs it, or it keeps no checkpoints. Raises EngineDeadError."""
    for engine in engines:
        call = engine.engine_core.call_utility_async
        if await call("relume_retarget", request, attempt, list(targets)):
            return True
    return False


def _retarget(self: EngineCore, request: str, attempt: int, targets: list[str]) -> bool:
    connector = self.scheduler.get_kv_connector()
    found = False
    for one in getattr(connector, "sub_connectors", [connector]):  # those of a MultiConnector
        if hasattr(one, "retarget"):
            found |= one.retarget(request, attempt, tuple(targets))
    return found


async def hand_over(
    engines: Iterable[AsyncLLM], request: str, attempt: int, unbegun: bool
) -> Refusal:
    """Stops an attempt: after this returns nothing of it is computed, and its streams end after
    what it had made. Not if it has generated a token and was to be `unbegun`. Raises
    EngineDeadError."""
    for engine in engines:
        call = engine.engine_core.call_utility_async
        refusal = Refusal(await call("relume_hand_over", request, attempt, unbegun))
        if not refusal:
            engine.output_processor.abort_requests(given_up(request, attempt), internal=True)
        if refusal != Refusal.GONE:
            return refusal
    return Refusal.GONE


def _hand_over(self: EngineCore, request: str, attempt: int, unbegun: bool) -> str:
    """Between two steps. An abort leaves the blocks at the holders (CheckpointPlan.finished)."""
    found = []
    for engine_id, running in self.scheduler.requests.items():
        params = running.sampling_params
        mark = (params.extra_args or {}).get(IDENTITY_KEY) if params is not None else None
        if mark and (mark["r"], mark["a"]) == (request, attempt):
            found.append(engine_id)
    if not found:
        return Refusal.GONE.value
    if unbegun and any(self.scheduler.requests[e].num_output_tokens for e in found):
        return Refusal.BEGUN.value
    self.abort_requests(found)
    return Refusal.NONE.value


async def turn(engines: Iterable[AsyncLLM]) -> None:
    """Returns when the loop of each core has taken a turn. Raises EngineDeadError."""
    for engine in engines:
        await engine.engine_core.call_utility_async("relume_turn")


def _turn(self: EngineCore) -> None:
    """Nothing, between two steps."""


def numbered(
    engine: AsyncLLM, generation: Generation, request: EngineCoreRequest, prompt: int
) -> EngineCoreRequest:
    """A request of the body's `prompt`-th prompt, with the number of its choice: its blocks are
    stored under that number. The order in which choices of several prompts reach a core (or several
    cores) says nothing of it."""
    state = engine.output_processor.request_states.get(request.request_id)
    choice = prompt * generation.width + (state.request_index if state is not None else 0)
    request_copy = copy(request)
    params = request_copy.sampling_params = copy(request.sampling_params)  # children share theirs
    extra = params.extra_args
    params.extra_args = {**extra, IDENTITY_KEY: {**extra[IDENTITY_KEY], "c": choice}}
    return request_copy


async def _rejected(
    self: AsyncLLM, request_id: str, kv_transfer_params: dict[str, Any], **options: Any
) -> None:
    """vLLM passes refused requests to its connector, with their clients' parameters for it; these
    are kept away from the core here too."""
    if CURRENT.get() is None and not identity.from_environment().agent_socket:
        await _stock_rejected(self, request_id, kv_transfer_params, **options)
