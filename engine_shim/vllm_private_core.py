"""What is private of vLLM's EngineCore: utility methods of ours, called from the API process
as its own are. By one, other holders for a running request reach the connector; the other
stops a request that is to go on elsewhere."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore

from engine_shim.generation import IDENTITY_KEY
from engine_shim.handover import given_up


def install() -> None:
    """Adds the methods; idempotent."""
    EngineCore.relume_retarget = _retarget
    EngineCore.relume_hand_over = _hand_over


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


async def hand_over(engines: Iterable[AsyncLLM], request: str, attempt: int) -> bool:
    """Stops an attempt: once this returns nothing of it is computed, and its streams end behind
    what it had made. False when none of these engines runs it. Raises EngineDeadError."""
    for engine in engines:
        if await engine.engine_core.call_utility_async("relume_hand_over", request, attempt):
            engine.output_processor.abort_requests(given_up(request, attempt), internal=True)
            return True
    return False


def _hand_over(self: EngineCore, request: str, attempt: int) -> bool:
    """Between two steps. An abort leaves the blocks at the holders (CheckpointPlan.finished)."""
    found = []
    for engine_id, running in self.scheduler.requests.items():
        params = running.sampling_params
        mark = (params.extra_args or {}).get(IDENTITY_KEY) if params is not None else None
        if mark and (mark["r"], mark["a"]) == (request, attempt):
            found.append(engine_id)
    if found:
        self.abort_requests(found)
    return bool(found)
