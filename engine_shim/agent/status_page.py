"""GET /state on loopback: what the agent knows, as JSON, for operators and tools.

A dozen lines of HTTP/1.0 rather than a framework: the agent stays small, and nothing but
this one question is answered here.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

REQUEST_TIMEOUT_S = 5.0
_LIMIT_BYTES = 8192


class StatusServer:
    """An async context manager; `url` is where it listens. `describe` gives the answer."""

    def __init__(self, port: int, describe: Callable[[], dict[str, Any]]) -> None:
        self._port = port
        self.describe = describe
        self._server: asyncio.Server | None = None
        self.url = ""

    async def __aenter__(self) -> StatusServer:
        self._server = await asyncio.start_server(
            self._answer, "127.0.0.1", self._port, limit=_LIMIT_BYTES
        )
        host, port = self._server.sockets[0].getsockname()[:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(REQUEST_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._response(head))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # a client with an invalid request gets no answer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

    def _response(self, head: bytes) -> bytes:
        request = head.split(b"\r\n", 1)[0].split(b" ")
        if len(request) < 2 or request[0] not in (b"GET", b"HEAD"):
            status, body = "405 Method Not Allowed", {"error": "GET /state"}
        elif request[1].split(b"?")[0] not in (b"/state", b"/health"):
            status, body = "404 Not Found", {"error": "there is only /state and /health here"}
        else:
            status, body = "200 OK", self.describe()
        payload = msgspec.json.encode(body) + b"\n"
        return (
            f"HTTP/1.0 {status}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(payload)}\r\nconnection: close\r\n\r\n"
        ).encode() + (b"" if request[0] == b"HEAD" else payload)
