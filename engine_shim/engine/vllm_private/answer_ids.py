"""Random ids in answers, for vLLM 0.32.x: derived from the request, so that every attempt of it
gives the same ones. A request that is not ours keeps vLLM's own."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Callable

from vllm.renderers import chat_utils

from relume.engine_shim.generation import CURRENT, reported

_ITEMS = "vllm.entrypoints.openai.responses."
_TOOL_CALLS = ("vllm.tool_parsers.", "vllm.parser.")
_ANTHROPIC = "vllm.entrypoints.anthropic.serving"

_stock_uuid = chat_utils.random_uuid


class _Uuids:
    """In place of the module `uuid`, of which `uuid4` is used: signatures of thinking."""

    def uuid4(self) -> uuid.UUID:
        generation = CURRENT.get()
        return uuid.uuid4() if generation is None else uuid.UUID(generation.item_id())


def pin() -> None:
    """Pin the ids of every parser and API loaded so far; idempotent."""
    for name in list(sys.modules):
        if name.startswith(_TOOL_CALLS):
            _replace(name, _tool_call_uuid)
        elif name.startswith(_ITEMS):
            _replace(name, _item_uuid)
    chat_utils.random_uuid = _tool_call_uuid
    if (anthropic := sys.modules.get(_ANTHROPIC)) is not None:
        vars(anthropic)["uuid"] = _Uuids()


def _replace(module: str, made: Callable[[], str]) -> None:
    names = vars(sys.modules[module])
    if names.get("random_uuid") is _stock_uuid:
        names["random_uuid"] = made


def _tool_call_uuid() -> str:
    generation = CURRENT.get()
    return _stock_uuid() if generation is None else generation.tool_call_id()


def _item_uuid() -> str:
    generation = CURRENT.get()
    if generation is None or not reported(generation.request):
        return _stock_uuid()
    return generation.item_id()
