"""A TCP link that a run can cut, in one direction or both, or slow down.

A cut link accepts bytes and forwards none: no reset, no answer, as in a partition. Once mended, it
forwards the bytes that arrived meanwhile, as TCP would retransmit them.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Self

from relume.events.wire.frames import encode_tokens

FRAME = encode_tokens(0, ())[:3]
"""First bytes of a frame with tokens."""


class Link:
    """A link from `host`:`port` (0: any free one) to `target`, "host:port" (which may be set
    later). `to`: towards the target; `fro`: back from it. `delay_s`: time that data waits, in both
    directions; data that arrives meanwhile leaves with it or waits as long again."""

    def __init__(self, target: str = "", host: str = "127.0.0.1", port: int = 0) -> None:
        self.target = target
        self.host = host
        self.port = port
        self.delay_s = 0.0
        self._tear: Callable[[int], int] | None = None
        self._ways = {"to": asyncio.Event(), "fro": asyncio.Event()}
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._near: set[asyncio.StreamWriter] = set()
        self.mend()

    @property
    def endpoint(self) -> str:
        return f"{self.host}:{self.port}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self.serve, self.host, self.port)
        self.port = self._server.sockets[0].getsockname()[1]
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        await self.close()

    async def close(self) -> None:
        """End all its connections."""
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    @property
    def passes(self) -> dict[str, bool]:
        """Whether it forwards, by direction."""
        return {way: passes.is_set() for way, passes in self._ways.items()}

    def cut(self, *ways: str) -> None:
        """Stop forwarding in these directions (default: both)."""
        for way in ways or tuple(self._ways):
            self._ways[way].clear()

    def mend(self) -> None:
        """Forward again, beginning with the bytes that arrived meanwhile."""
        for way in self._ways.values():
            way.set()

    def tear(self, after: Callable[[int], int]) -> None:
        """Break the connection on which the next frame of an answer arrives, after forwarding only
        the first `after(bytes)` of the bytes read."""
        self._tear = after

    def send(self, data: bytes) -> int:
        """Bytes that the target has not sent go back on each connection, between two that it has. Returns
        on how many."""
        for writer in self._near:
            writer.write(data)
        return len(self._near)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Relay a connection that was accepted."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            await self._ways["to"].wait()
            host, _, port = self.target.rpartition(":")
            far_reader, far_writer = await asyncio.open_connection(host, int(port))
            try:
                await self._both(reader, writer, far_reader, far_writer)
            finally:
                far_writer.transport.abort()
        except (OSError, asyncio.CancelledError):
            pass  # cancelled by `__aexit__` alone; the stream's own callback would complain
        finally:
            self._tasks.discard(task)
            writer.transport.abort()

    async def _both(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        far_reader: asyncio.StreamReader,
        far_writer: asyncio.StreamWriter,
    ) -> None:
        """Relay until either end is gone; forward the bytes already on their way first."""
        pipes = [
            asyncio.create_task(self._pipe("to", reader, far_writer)),
            asyncio.create_task(self._pipe("fro", far_reader, writer)),
        ]
        self._near.add(writer)
        try:
            await asyncio.wait(pipes, return_when=asyncio.FIRST_COMPLETED)
            self._near.discard(writer)
            with contextlib.suppress(OSError):
                for side in (writer, far_writer):
                    if side.can_write_eof():
                        side.write_eof()
            await asyncio.wait(pipes, timeout=0.5)
        finally:
            self._near.discard(writer)
            for pipe in pipes:
                pipe.cancel()
            await asyncio.gather(*pipes, return_exceptions=True)

    async def _pipe(
        self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(65536):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self._ways[way].wait()
                tear = self._tear
                if tear is not None and way == "fro" and FRAME in data:
                    self._tear = None
                    writer.write(data[: tear(len(data))])
                    return
                writer.write(data)
                await writer.drain()
