"""The last bytes of resumable streams, until their clients' ends have acknowledged them.

What was written to a connection may never arrive: the client's network goes, or the host of
the gateway. So a resumable stream is not over with its last byte written, but when TCP says
that the other end has it. Until then it is live: its engine keeps it, and whoever shows its
claim goes on with it, at any replica.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from typing import TYPE_CHECKING

from relume.controlplane.gateway.context import ClientPort

if TYPE_CHECKING:
    from relume.controlplane.gateway.resumable import Resumable

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


class Deliveries:
    """The streams of one gateway that have come to their end."""

    def __init__(self) -> None:
        self._waiting: dict[ClientPort, Resumable] = {}
        self._timer: asyncio.TimerHandle | None = None

    def add(self, exchange: Resumable, client: ClientPort) -> None:
        """All of the stream is written to `client`."""
        older = self._waiting.get(client)
        self._waiting[client] = exchange
        if older is not None and older is not exchange and older.delivering is client:
            older.arrived_whole()  # its client went on to this one
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self.look)

    def asked(self, client: ClientPort) -> None:
        """The client asks for something else: it has its last answer. So both are written of
        in one transaction."""
        exchange = self._waiting.pop(client, None)
        if exchange is not None:
            self._judge(exchange, client)

    def look(self) -> None:
        """End what has arrived, and let wait for its client what is lost."""
        timer, self._timer = self._timer, None
        if timer is not None:
            timer.cancel()
        waiting, self._waiting = self._waiting, {}
        for client, exchange in waiting.items():
            self._judge(exchange, client)

    def _judge(self, exchange: Resumable, client: ClientPort) -> None:
        if exchange.delivering is not client:
            return
        try:
            if not client.undelivered:
                exchange.arrived_whole()
            elif client.lost:
                exchange.client_gone()
            else:
                self.add(exchange, client)
        except Exception as error:  # the edge of one request
            exchange.on_fault(error)
