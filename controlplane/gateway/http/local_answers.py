"""Answers that need no worker: is it alive, can it serve, which models are there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from relume.controlplane.gateway.http import routes
from relume.controlplane.gateway.http.replies import Reply, error_reply
from relume.controlplane.stream.error_codes import DRAINING, NO_WORKER_READY


def live(running: bool) -> Reply:
    """Whether the gateway itself works."""
    if not running:
        return error_reply(503, "the gateway is broken", code="broken")
    return Reply(status=200, body=b'{"status":"live"}')


def ready(draining: bool, retry_after_s: int) -> Reply:
    """Whether requests should be sent here: also without a worker, when they wait for one."""
    if draining:
        return error_reply(503, DRAINING, retry_after_s=retry_after_s)
    return Reply(status=200, body=b'{"status":"ready"}')


def health(draining: bool, ready: bool, retry_after_s: int) -> Reply:
    """Whether a request sent now could be served."""
    if draining:
        return error_reply(503, DRAINING, retry_after_s=retry_after_s)
    if not ready:
        return error_reply(503, NO_WORKER_READY, retry_after_s=retry_after_s)
    return Reply(status=200, body=b'{"status":"ok"}')


def models(path: str, names: Sequence[str], lengths: Mapping[str, int], created: int) -> Reply:
    """The list of models, or the one that `path` names, with the fields that vLLM gives. Null as
    `max_model_len`: no worker serves the model now."""
    found = [
        {
            "id": name,
            "object": "model",
            "created": created,
            "owned_by": "relume",
            "root": name,
            "parent": None,
            "max_model_len": lengths.get(name),
        }
        for name in names
    ]
    if path == routes.MODELS:
        return Reply(status=200, body=msgspec.json.encode({"object": "list", "data": found}))
    wanted = path[len(routes.MODELS) + 1 :]
    for model in found:
        if model["id"] == wanted:
            return Reply(status=200, body=msgspec.json.encode(model))
    return error_reply(404, f"no model {wanted[:200]!r}", param="model", code="model_not_found")
