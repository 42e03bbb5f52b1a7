"""Which route is served how: some are protected by failover, a fixed list is relayed as it
is, a few are answered here, and everything else a worker may offer stays closed (its
control routes would let any client stop or reload it)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from relume.controlplane.gateway.openai.apis import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Api

PROTECTED: Mapping[str, Api] = {
    "/v1/completions": COMPLETIONS,
    "/v1/chat/completions": CHAT,
    "/v1/messages": MESSAGES,
    "/v1/responses": RESPONSES,
}
UNPROTECTED = "unprotected route"
"""The reason why a relayed request has no better resume guarantee."""

# vLLM 0.32's inference routes. What keeps state between calls (responses by id, LoRA
# loading) or controls the engine is not among them.
RELAYED_POST = frozenset(
    "/v1/embeddings /v2/embed /v1/score /score /v1/rerank /v2/rerank /rerank /pooling /classify "
    "/generative_scoring /tokenize /detokenize /v1/responses/render "
    "/v1/messages/count_tokens /v1/messages/render /v1/completions/render /v1/completions/derender "
    "/v1/chat/completions/render /v1/chat/completions/derender /v1/chat/completions/batch "
    "/v1/audio/transcriptions /v1/audio/translations /inference/v1/generate".split()
)
RELAYED_GET = frozenset(("/version", "/tokenizer_info"))

MODELS = "/v1/models"
HEALTH = "/health"
LIVE = "/live"
READY = "/ready"
LOCAL = frozenset((MODELS, HEALTH, LIVE, READY))

# Answered without an API key, for probes that have none.
OPEN = frozenset((HEALTH, LIVE, READY))


class Route(NamedTuple):
    """`kind`: protected, relayed, local, delegated; `methods` in the order of Allow."""

    kind: str
    methods: tuple[str, ...]


_POST = ("POST", "OPTIONS")
_GET = ("GET", "HEAD", "OPTIONS")


def find(path: str, delegated: frozenset[str]) -> Route | None:
    """The route of a path, or None when there is none."""
    if path in PROTECTED:
        return Route("protected", _POST)
    if path in LOCAL or path.startswith(MODELS + "/"):
        return Route("local", _GET)
    if path in delegated:
        return Route("delegated", _GET)
    if path in RELAYED_POST:
        return Route("relayed", _POST)
    if path in RELAYED_GET:
        return Route("relayed", _GET)
    return None
