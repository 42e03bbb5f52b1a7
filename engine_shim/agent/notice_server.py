"""Death notices sent directly to gateways: a listening socket that names the dead engine
immediately.

An append to the log waits for an fsync and for the watchers' turn; a gateway with streams on the
dead engine should not wait. `tell` may be called from any thread (the one that waits for the death
is the quickest) and never waits: a listener whose socket is full is cut off, connects again and is
greeted with the last death.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Callable

from relume.engine_shim.agent.agent_logging import Logger
from relume.events.wire.notices import DeathNotice, hello_line

MAX_LISTENERS = 64


class NoticeBoard:
    """An async context manager; `address` (host:port) is where gateways connect, empty if the port
    cannot be bound. `epoch` returns that of the worker's stream; `told_at` is the time of the last
    notice, in seconds of CLOCK_MONOTONIC. Listens on the engine's address and, like the engine,
    requires no credentials.
    """

    def __init__(
        self,
        worker: str,
        host: str,
        port: int,
        advertise_host: str,
        epoch: Callable[[], int],
        logger: Logger,
    ) -> None:
        self._hello = hello_line(worker)
        self._host = host
        self._port = port
        self._advertise_host = advertise_host or host
        self._epoch = epoch
        self._logger = logger
        self._lock = threading.Lock()
        self._listener: socket.socket | None = None
        self._open: set[socket.socket] = set()
        self._died = 0
        self._line = b""
        self.address = ""
        self.notified_at = 0.0

    async def __aenter__(self) -> NoticeBoard:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        try:
            listener = socket.create_server((self._host, self._port), family=family, backlog=64)
        except OSError as error:
            self._logger.error("no notices: cannot listen", port=self._port, why=str(error))
            return self
        listener.setblocking(False)
        self._listener = listener
        self.address = f"{self._advertise_host}:{listener.getsockname()[1]}"
        asyncio.get_running_loop().add_reader(listener, self._accept)
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._listener is not None:
            asyncio.get_running_loop().remove_reader(self._listener)
            self._listener.close()
        for client in list(self._open):
            self._close(client)

    @property
    def listeners(self) -> int:
        """How many gateways listen."""
        return len(self._open)

    def tell(self, incarnation: int) -> None:
        """Send the notice that this engine is dead, once. From any thread, without waiting."""
        with self._lock:
            if incarnation <= self._died:
                return
            self._died = incarnation
            self.notified_at = time.monotonic()
            self._line = DeathNotice(self._epoch(), incarnation).line()
            for client in self._open:
                self._send(client, self._line)

    def _send(self, client: socket.socket, data: bytes) -> None:
        try:
            whole = client.send(data) == len(data)
        except OSError:
            whole = False
        if not whole:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)  # the loop sees its end and closes it

    def _accept(self) -> None:
        assert self._listener is not None
        try:
            client, _ = self._listener.accept()
        except OSError:
            return  # it left before its turn, or there are no descriptors left for it
        client.setblocking(False)
        if len(self._open) >= MAX_LISTENERS:
            self._logger.warning("listener for notices refused: too many", limit=MAX_LISTENERS)
            client.close()
            return
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        with self._lock:
            self._open.add(client)
            self._send(client, self._hello + self._line)
        asyncio.get_running_loop().add_reader(client, self._close, client)

    def _close(self, client: socket.socket) -> None:
        """The connection ended, or sent data, which it never should."""
        asyncio.get_running_loop().remove_reader(client)
        with self._lock:
            self._open.discard(client)
            client.close()
