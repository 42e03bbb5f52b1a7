"""TCP links between the members of an etcd, so that a run can cut one from the others.

All members know one address of each member, the same one. So who connects is found by the pid that
owns the other end of the connection.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Self

from relume.chaos.live.faults.tcp_links import Link

_LOCAL, _INODE = 1, 9
"""Columns of /proc/net/tcp."""


class PeerLinks:
    """An async context manager. `ports`: by member, the port on which its peers reach it; `targets`:
    by member, the one on which it listens. `pids()`: the members' processes."""

    def __init__(
        self,
        ports: Mapping[str, int],
        targets: Mapping[str, int],
        pids: Callable[[], Mapping[str, int]],
    ) -> None:
        self._ports = ports
        self._pids = pids
        self._cut: set[str] = set()
        self._links = {
            (source, target): Link(f"127.0.0.1:{port}")
            for target, port in targets.items()
            for source in targets
            if source != target
        }
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        for link in self._links.values():
            self._stack.push_async_callback(link.close)
        for target, port in self._ports.items():
            server = await asyncio.start_server(self._to(target), "127.0.0.1", port)
            self._stack.callback(server.close)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    def cut(self, member: str) -> None:
        """Nothing passes between `member` and any other."""
        self._cut.add(member)
        self._apply()

    def mend(self, member: str) -> None:
        """Undo `cut`."""
        self._cut.discard(member)
        self._apply()

    def _apply(self) -> None:
        for pair, link in self._links.items():
            if self._cut.isdisjoint(pair):
                link.mend()
            else:
                link.cut()

    def _to(
        self, target: str
    ) -> Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            port = writer.get_extra_info("peername")[1]
            source = _owner(port, self._pids())
            if (link := self._links.get((source, target))) is None:
                writer.transport.abort()  # its process has ended meanwhile
            else:
                await link.serve(reader, writer)

        return serve


def _owner(port: int, pids: Mapping[str, int]) -> str:
    """Name of the process that has the end of a TCP connection on `port`; empty: none of them."""
    wanted = {f"socket:[{inode}]" for inode in _inodes(port)}
    for name, pid in pids.items():
        try:
            for entry in os.scandir(f"/proc/{pid}/fd"):
                try:
                    if os.readlink(entry.path) in wanted:
                        return name
                except OSError:
                    continue
        except OSError:
            continue
    return ""


def _inodes(port: int) -> list[str]:
    found = []
    for table in ("tcp", "tcp6"):
        try:
            rows = Path(f"/proc/net/{table}").read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        columns = [row.split() for row in rows]
        found += [row[_INODE] for row in columns if int(row[_LOCAL].rpartition(":")[2], 16) == port]
    return found
