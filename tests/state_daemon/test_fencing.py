"""Which engine of a worker may write blocks: the newest that has."""

from __future__ import annotations

from typing import Any

import pytest

from relume.engine_shim.checkpoints.daemon.service import Service
from relume.events.wire.kv.kv_errors import Refusal
from relume.events.wire.kv.kv_messages import Hello


def hello(epoch: int, incarnation: int, worker: str = "w0") -> Hello:
    return Hello(
        version=1, worker=worker, epoch=epoch, incarnation=incarnation, role="writer", nonce=b""
    )


def test_an_engine_that_was_replaced_is_fenced_under_the_same_epoch_too() -> None:
    nothing: Any = None
    service = Service(nothing, "host", 1, b"", lambda: 0.0)
    service.fence(hello(5, 1))
    service.fence(hello(5, 2))
    service.fence(hello(5, 2))
    for epoch, incarnation in ((5, 1), (4, 9)):
        with pytest.raises(Refusal, match="has written"):
            service.fence(hello(epoch, incarnation))
    service.fence(hello(5, 1, "w1"))
    service.fence(hello(6, 1))
