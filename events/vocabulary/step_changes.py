"""Load changes inside one engine step."""

from __future__ import annotations

from msgspec import Struct


class Change(Struct, frozen=True, array_like=True, gc=False):
    """One load change inside an engine step, of `request` and `attempt`."""

    request: str
    attempt: int


class RequestQueued(Change, frozen=True, tag="q"):
    """The engine took the request; `dispatch` is the encoded `RouteDecided` it came with."""

    prompt_tokens: int
    dispatch: bytes = b""


class RequestAdmitted(Change, frozen=True, tag="a"):
    """The scheduler gave it blocks; `cached_tokens` of its prompt need no computing."""

    cached_tokens: int
    blocks: int = 0


class PrefillChunkDone(Change, frozen=True, tag="c"):
    """`tokens` of its prompt were computed in this step; `computed` in all."""

    tokens: int
    computed: int


class FirstToken(Change, frozen=True, tag="t"):
    """Its prefill ended and its first token left the model."""


class KvBlocksFilled(Change, frozen=True, tag="k"):
    """It holds `blocks` full KV blocks now."""

    blocks: int


class RequestPreempted(Change, frozen=True, tag="p"):
    """It lost its blocks and waits to be recomputed: `tokens` of prompt and output (0: unknown, as
    in records before this field)."""

    tokens: int = 0


class EngineFinished(Change, frozen=True, tag="f"):
    """The engine is done with it. `reason` as vLLM says it: stop, length, abort, error."""

    reason: str
    output_tokens: int


AnyChange = (
    RequestQueued
    | RequestAdmitted
    | PrefillChunkDone
    | FirstToken
    | KvBlocksFilled
    | RequestPreempted
    | EngineFinished
)
