"""The delivered tokens of a resumed request, as they travel inside the engine.

They lie in its sampling parameters; the API process packs them, the scheduler and the model
runner read them.
"""

from __future__ import annotations

import array
from collections.abc import Sequence
from typing import Any

from relume.engine_shim.generation import IDENTITY_KEY

TAIL = "t"
"""Key of the delivered tokens in the identity: uint32, this machine's byte order."""


def packed(tail: Sequence[int]) -> bytes:
    """Delivered tokens as they travel inside the engine."""
    return array.array("I", tail).tobytes()


def delivered_of(params: Any) -> list[int]:
    """The delivered tokens of a resumed request, from its sampling parameters."""
    mark = (params.extra_args or {}).get(IDENTITY_KEY) if params is not None else None
    if not mark or TAIL not in mark:
        return []
    return array.array("I", mark[TAIL]).tolist()
