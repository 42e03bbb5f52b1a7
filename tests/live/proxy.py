"""A TCP proxy that can be cut: what a network partition looks like to one process."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Self


class CutProxy:
    """Forwards connections from a port of its own to `target` (host:port) until `cut`.

    A cut proxy takes bytes and forwards none: no reset, no answer, as in a partition.
    """

    def __init__(self, target: str) -> None:
        self._host, _, port = target.rpartition(":")
        self._port = int(port)
        self._open = asyncio.Event()
        self._open.set()
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.endpoint = ""

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.endpoint = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def cut(self) -> None:
        """Forward nothing any more, in either direction."""
        self._open.clear()

    def mend(self) -> None:
        """Forward again, what came meanwhile first."""
        self._open.set()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        tasks = [
            asyncio.ensure_future(self._pipe(reader, far_writer)),
            asyncio.ensure_future(self._pipe(far_reader, writer)),
        ]
        self._tasks.update(tasks)
        for task in tasks:
            task.add_done_callback(self._tasks.discard)
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        for side in (writer, far_writer):
            with contextlib.suppress(OSError):
                side.close()

    async def _pipe(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                await self._open.wait()
                writer.write(data)
                await writer.drain()
