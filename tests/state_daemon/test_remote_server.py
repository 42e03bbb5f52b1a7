"""The daemon's ZeroMQ server, where its end comes at an awkward moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from relume.engine_shim.checkpoints.daemon.remote_server import RemoteConfig, RemoteServer
from relume.engine_shim.checkpoints.daemon.service import Reply

KEYS = {"curve_public": "p", "curve_secret": "s"}


class Router:
    """A socket whose answer leaves when the test says so."""

    def __init__(self) -> None:
        self.left: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    def send_multipart(self, *_: Any, **__: Any) -> asyncio.Future[Any]:
        return self.left


async def test_an_end_that_comes_as_an_answer_leaves_is_an_end() -> None:
    server: Any = RemoteServer(None, RemoteConfig(host="127.0.0.1", port=1, **KEYS))  # type: ignore[arg-type]
    router = Router()
    sending = asyncio.create_task(server._send(router, b"\0name", Reply(b"header")))
    while not sending.get_coro().cr_await:
        await asyncio.sleep(0)
    router.left.set_result(None)
    sending.cancel()
    with pytest.raises(asyncio.CancelledError):
        await sending
