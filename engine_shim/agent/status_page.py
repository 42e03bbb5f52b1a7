"""GET /state and /ready on loopback: what the agent knows, as JSON, for operators, tools and probes.

`/health` is `/state` under the name that probes ask for: the agent lives. `/ready` is 503 with the
reason until the worker may serve. A few lines of HTTP/1.0 rather than a framework: the agent stays
small. systemd gets the same, for a unit of `Type=notify`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

import msgspec

REQUEST_TIMEOUT_S = 5.0
_LIMIT_BYTES = 8192
_PATHS = "/state, /health and /ready"


class StatusServer:
    """An async context manager; `url` is where it listens. `describe` gives the state, `not_ready` why
    the worker may not serve (empty: it may)."""

    def __init__(
        self, port: int, describe: Callable[[], dict[str, Any]], not_ready: Callable[[], str]
    ) -> None:
        self._port = port
        self.describe = describe
        self.not_ready = not_ready
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
        path = request[1].split(b"?")[0] if len(request) > 1 else b""
        body: dict[str, Any]
        if not path or request[0] not in (b"GET", b"HEAD"):
            status, body = "405 Method Not Allowed", {"error": f"GET {_PATHS}"}
        elif path == b"/ready":
            why = self.not_ready()
            status = "503 Service Unavailable" if why else "200 OK"
            body = {"ready": not why, "why": why}
        elif path in (b"/state", b"/health"):
            status, body = "200 OK", self.describe()
        else:
            status, body = "404 Not Found", {"error": f"there is only {_PATHS} here"}
        payload = msgspec.json.encode(body) + b"\n"
        return (
            f"HTTP/1.0 {status}\r\ncontent-type: application/json\r\n"
            f"content-length: {len(payload)}\r\nconnection: close\r\n\r\n"
        ).encode() + (b"" if request[0] == b"HEAD" else payload)


def notice(why: str, is_leaving: bool) -> str:
    """The same for systemd, where the agent is a unit of `Type=notify`."""
    if is_leaving:
        return f"STOPPING=1\nSTATUS={why}"
    return f"STATUS={why}" if why else "READY=1\nSTATUS=ready"
