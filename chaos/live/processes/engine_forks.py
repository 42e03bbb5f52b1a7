"""A relay between agents and the zygote that makes engine starts fail on request.

It gives a start that must fail the path of a missing model: the zygote really forks the engine,
and the engine really dies while it loads.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from typing import Self


class Forks:
    """A socket at `path` in front of the one at `zygote`. `fail[worker]`: number of next starts
    that fail."""

    def __init__(self, path: Path, zygote: str) -> None:
        self.path = path
        self.fail: dict[str, int] = defaultdict(int)
        self._zygote = zygote
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_unix_server(self._serve, self.path)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            if not (line := await reader.readline()):
                return  # the client only checked for a listener
            far_reader, far_writer = await asyncio.open_unix_connection(self._zygote)
            far_writer.write(self._changed(line))
            await far_writer.drain()
            writer.write(await far_reader.readline())
            await writer.drain()
            far_writer.close()
        except OSError:
            pass
        finally:
            writer.close()

    def _changed(self, line: bytes) -> bytes:
        order = json.loads(line)
        worker = order["env"].get("RELUME_WORKER", "")
        if self.fail[worker] <= 0:
            return line
        self.fail[worker] -= 1
        argv = order["argv"]
        argv[argv.index("--model") + 1] += ".gone"
        return json.dumps(order).encode() + b"\n"
