"""The last bytes of resumable streams, until their clients' ends have acknowledged them.

What was written to a connection may never arrive: the client's network can fail, or the gateway's
host. A resumable stream therefore ends when TCP acknowledges its last byte, not when that byte is
written. Until then the engine keeps it, and the holder of its resume token can resume it at any
replica.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from typing import Protocol

from relume.controlplane.gateway.context import ClientPort

LOOK_S = 0.05


def unacknowledged(transport: asyncio.Transport) -> int:
    """Bytes written to the connection that its other end has not acknowledged."""
    if buffered := transport.get_write_buffer_size():
        return buffered
    sock = transport.get_extra_info("socket")
    try:
        left = fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0")
    except (AttributeError, OSError, ValueError):
        return 0  # no TCP connection: written is all that can be known
    return int.from_bytes(left, sys.byteorder)


class Delivery(Protocol):
    """A session whose last bytes are on their way, offered by `request_session.RequestSession`."""

    delivering: ClientPort | None

    def arrived_whole(self) -> None: ...
    def client_gone(self) -> None: ...
    def on_fault(self, error: Exception) -> None: ...


class Deliveries:
    """The streams of one gateway that have come to their end."""

    def __init__(self) -> None:
        self._waiting: dict[ClientPort, Delivery] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, session: Delivery, client: ClientPort) -> None:
        """All of the stream is written to `client`."""
        older = self._waiting.get(client)
        self._waiting[client] = session
        if older is not None and older is not session and older.delivering is client:
            older.arrived_whole()  # its client continued with this one
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self.look)

    def on_next_request(self, client: ClientPort) -> None:
        """The client sends another request, so it has its last answer. Both facts go into one
        transaction."""
        session = self._waiting.pop(client, None)
        if session is not None:
            self._judge(session, client)

    def look(self) -> None:
        """End what has arrived, and let wait for its client what is lost."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        waiting, self._waiting = self._waiting, {}
        for client, session in waiting.items():
            self._judge(session, client)

    def _judge(self, session: Delivery, client: ClientPort) -> None:
        if session.delivering is not client:
            return
        try:
            if not client.undelivered:
                session.arrived_whole()
            elif client.lost:
                session.client_gone()
            else:
                self.add(session, client)
        except Exception as error:  # the edge of one request
            session.on_fault(error)
