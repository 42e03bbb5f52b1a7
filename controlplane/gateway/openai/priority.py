"""What a client says its request is worth, as the weight of its checkpoint: a holder that
must evict compares weight times tokens (engine_shim/checkpoints/daemon/worth.py)."""

from __future__ import annotations

from relume.controlplane.gateway.errors import ClientError
from relume.events.wire.headers import PRIORITY

USUAL = 1
MOST = 100
"""Of any request: the maximum weight of a checkpoint, in usual ones."""


def checkpoint_weight(header: bytes | None, priority: int) -> int:
    """0 to `MOST`, from the client's `PRIORITY`; without it from the body's
    `priority`, which as in vLLM is 0 usually and lower for what is more urgent: a negative
    one weighs that much more, a positive one nothing. Raises ClientError."""
    if header is None:
        return 0 if priority > 0 else min(USUAL - priority, MOST)
    text = header.strip()
    if not (text.isdigit() and len(text) <= 3 and int(text) <= MOST):
        raise ClientError(400, f"{PRIORITY} must be a number from 0 to {MOST}")
    return int(text)
