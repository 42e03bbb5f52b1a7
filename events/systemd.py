"""What a unit of `Type=notify` tells systemd, in the protocol of sd_notify(3)."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable

NOTICE_PERIOD_S = 0.5


async def keep_informed(state: Callable[[], str]) -> None:
    """Send `state()` whenever it changes, and when this task is cancelled: lines such as READY=1 and
    STATUS=text. It ends at once where this process is no unit of `Type=notify`."""
    address = os.environ.pop("NOTIFY_SOCKET", "")  # it is not for child processes
    if not address:
        return
    sent, period_s = "", 0.0
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.setblocking(False)
        while True:
            try:
                await asyncio.sleep(period_s)
            finally:  # a process that stops within the period says so too
                if (text := state()) != sent:
                    with contextlib.suppress(OSError):  # systemd does not listen: say it again
                        channel.sendto(text.encode(), _path(address))
                        sent = text
            period_s = NOTICE_PERIOD_S


def _path(address: str) -> str:
    """As the kernel takes it: "@" begins the name of an abstract socket."""
    return "\0" + address[1:] if address.startswith("@") else address
