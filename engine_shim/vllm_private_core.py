"""What is private of vLLM's EngineCore: a utility method of ours, called from the API process
as its own are, by which other holders for a running request reach the connector."""

from __future__ import annotations

from collections.abc import Iterable

from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core import EngineCore


def install() -> None:
    """Adds the method; idempotent."""
    EngineCore.relume_retarget = _retarget


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
