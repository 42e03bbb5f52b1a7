"""Reports that agents cannot read, sent to their report sockets beside those of their engines.

A real engine has no switch for that. To its agent, the sender is a process of the present engine.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from relume.events.wire.reports import Hello, frame, hello_frame

MALFORMED = frame(b"\x92\xadengine_step/1\x01")
"""A step without its fields."""
PERIOD_S = 0.02


class GarbledReports:
    """While it runs, each of these report sockets gets a malformed step for a `share` of the periods.
    `sockets`: by path, the incarnation of the engine."""

    def __init__(self, sockets: Mapping[Path, int], share: float) -> None:
        self._sockets = sockets
        self._share = share
        self._writers: list[asyncio.StreamWriter] = []
        self._task: asyncio.Task[None] | None = None

    async def begin(self) -> None:
        """Raises OSError if an agent does not listen."""
        for path, incarnation in self._sockets.items():
            _, writer = await asyncio.open_unix_connection(path)
            self._writers.append(writer)
            writer.write(hello_frame(Hello(os.getpid(), "chaos", incarnation)))
        self._task = asyncio.create_task(self._run())

    async def end(self) -> None:
        """They get only what their engines report."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        for writer in self._writers:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _run(self) -> None:
        due = 0.0
        while True:
            due += self._share
            if due >= 1.0:
                due -= 1.0
                for writer in self._writers:
                    writer.write(MALFORMED)  # to one whose agent died, it is dropped
            await asyncio.sleep(PERIOD_S)
