"""Load changes inside one engine step."""

from __future__ import annotations

from msgspec import Struct


class Change(Struct, frozen=True, array_like=True, gc=False):
    """One load change inside an engine step, of `request` and `attempt`."""

    request: str
    attempt: int


class RequestQueued(Change, frozen=True, tag="q"):
    """The engine took the request."""

    prompt_tokens: int
    dispatch: bytes = b""
    """The encoded `RouteDecided` that the request came with."""


class RequestAdmitted(Change, frozen=True, tag="a"):
    """The scheduler gave it blocks."""

    cached_tokens: int
    """Prompt tokens that were found in a cache."""
    blocks: int = 0


class PrefillChunkDone(Change, frozen=True, tag="c"):
    """A part of its prompt was computed in this step."""

    tokens: int
    """Prompt tokens computed in this step."""
    computed: int
    """Prompt tokens computed so far."""


class FirstToken(Change, frozen=True, tag="t"):
    """Its prefill ended and its first token left the model."""


class KvBlocksFilled(Change, frozen=True, tag="k"):
    """It holds `blocks` full KV blocks now."""

    blocks: int


class RequestPreempted(Change, frozen=True, tag="p"):
    """It lost its blocks and waits to be recomputed."""

    tokens: int = 0
    """Tokens of prompt and output to compute again; 0: unknown, as in records before this field."""
    generated: int = 0
    """Of these, tokens that this engine had generated for it; 0 also in records before this field."""


class EngineFinished(Change, frozen=True, tag="f"):
    """The engine is done with it."""

    reason: str
    """vLLM's finish reason: stop, length, abort, error."""
    output_tokens: int
    """Tokens that were generated."""


AnyChange = (
    RequestQueued
    | RequestAdmitted
    | PrefillChunkDone
    | FirstToken
    | KvBlocksFilled
    | RequestPreempted
    | EngineFinished
)
