"""The state daemon's socket for pools: engines of this host and user."""

from __future__ import annotations

import asyncio
import itertools
import logging
import socket

from relume.engine_shim.checkpoints.daemon.local_server import (
    CONNECTIONS,
    private_listener,
    same_user,
)
from relume.engine_shim.pools import pool_messages as m
from relume.engine_shim.pools.pools import NoPool, Pools

logger = logging.getLogger("relume.state")


class PoolServer:
    """Serves `path` until cancelled. A packet is answered at once, so nothing waits for a slow engine."""

    def __init__(self, pools: Pools, path: str) -> None:
        self._pools = pools
        self._path = path
        self._listener: socket.socket | None = None
        self._open: dict[int, socket.socket] = {}
        self._numbers = itertools.count(1)

    def bind(self) -> None:
        """Listens from here on. Raises OSError."""
        self._listener = private_listener(self._path, socket.SOCK_SEQPACKET)

    async def serve(self) -> None:
        """Answers until cancelled; call `bind` first."""
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        try:
            while True:
                connection, _ = await loop.sock_accept(self._listener)
                if len(self._open) >= CONNECTIONS or not same_user(connection):
                    connection.close()
                    continue
                connection.setblocking(False)
                number = next(self._numbers)
                self._open[number] = connection
                loop.add_reader(connection.fileno(), self._read, number)
        finally:
            for number in list(self._open):
                self._close(number)
            self._listener.close()

    def _read(self, number: int) -> None:
        connection = self._open[number]
        try:
            packet = connection.recv(m.MAX_PACKET)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:
            self._close(number)
            return
        try:
            answer, fd = self._answer(number, m.decode_request(packet))
            socket.send_fds(connection, [m.encode(answer)], [fd] if fd >= 0 else [])
        except (OSError, m.Malformed) as error:  # also one that asks and never reads
            logger.warning("a connection for pools is closed: %s", error)
            self._close(number)

    def _answer(self, number: int, request: m.Request) -> tuple[m.Answer, int]:
        try:
            match request:
                case m.Open(name, size):
                    return self._pools.open(number, name, size)
                case m.Seal(name, digest):
                    self._pools.seal(number, name, digest)
                case m.Drop(name):
                    self._pools.drop(name)
        except NoPool as refusal:
            return refusal.answer(), -1
        return m.Done(), -1

    def _close(self, number: int) -> None:
        connection = self._open.pop(number)
        asyncio.get_running_loop().remove_reader(connection.fileno())
        connection.close()
        self._pools.left(number)
