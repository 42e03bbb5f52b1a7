"""Notices: what an agent sends to gateways immediately, beside the log, in lines of ASCII.

    relume-notice/1 <worker>        first: the sender
    died <epoch> <incarnation>      that engine is dead (again after a reconnection)

Only the agent sends. The log stays the record: `EngineDied` replaces a lost notice, and a lost
connection says nothing about the engine.
"""

from __future__ import annotations

from msgspec import Struct

from relume.events.wire.errors import NoticeError

MAX_LINE_BYTES = 128
MAX_NUMBER = 2**63 - 1
"""Maximum epoch and incarnation: the log has both as signed 64-bit numbers."""
_HELLO = "relume-notice/1"


class DeathNotice(Struct, frozen=True):
    """Engine `incarnation` is dead, says the owner of its worker's stream under `epoch`."""

    epoch: int
    incarnation: int

    def line(self) -> bytes:
        """Its line on the wire."""
        return f"died {self.epoch} {self.incarnation}\n".encode()


def hello_line(worker: str) -> bytes:
    """The first line of a connection to the agent of `worker`."""
    return f"{_HELLO} {worker}\n".encode()


class NoticeReader:
    """Takes bytes of one connection to the agent of `worker`; holds one line at most."""

    def __init__(self, worker: str) -> None:
        self._hello = hello_line(worker)[:-1]
        self._rest = b""
        self.greeted = False

    def feed(self, data: bytes) -> list[DeathNotice]:
        """The notices that are complete now. Raises NoticeError."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        if len(self._rest) > MAX_LINE_BYTES:
            raise NoticeError(f"a line of more than {MAX_LINE_BYTES} bytes")
        found = []
        for line in lines:
            if self.greeted:
                found.append(_died(line))
            elif line == self._hello:
                self.greeted = True
            else:
                raise NoticeError(f"{line[:MAX_LINE_BYTES]!r} came where {self._hello!r} was due")
        return found


def _died(line: bytes) -> DeathNotice:
    if len(line) > MAX_LINE_BYTES:
        raise NoticeError(f"a line of {len(line)} bytes")
    word, *numbers = line.split(b" ")
    if word != b"died" or len(numbers) != 2 or not all(n.isdigit() for n in numbers):
        raise NoticeError(f"{line[:MAX_LINE_BYTES]!r} is no notice")
    notice = DeathNotice(int(numbers[0]), int(numbers[1]))
    if notice.epoch > MAX_NUMBER or notice.incarnation > MAX_NUMBER:
        raise NoticeError(f"{line!r} has a number of more than 63 bits")
    return notice
