"""An engine's connection to the pools of its host."""

from __future__ import annotations

import os
import socket

from relume.engine_shim.pools import pool_messages as m

ANSWER_S = 5.0


class PoolsAway(Exception):
    """The state daemon does not answer, or refuses; why, in words."""


class PoolClient:
    """While it is open, the daemon evicts no pool that it opened."""

    def __init__(self, path: str, timeout_s: float = ANSWER_S) -> None:
        """Connects. Raises PoolsAway."""
        self._path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket.settimeout(timeout_s)
        try:
            self._socket.connect(path)
        except OSError as error:
            self._socket.close()
            raise PoolsAway(f"{path}: {error}") from None

    def open(self, name: str, size: int) -> tuple[m.Filling | m.Opened | m.Busy, int]:
        """The answer, and a descriptor of ours if it has one, else -1. Raises PoolsAway."""
        answer, fd = self._ask(m.Open(name, size))
        if isinstance(answer, m.Busy):
            return answer, -1
        if isinstance(answer, m.Done) or fd < 0 or os.fstat(fd).st_size != size:
            _close(fd)
            raise PoolsAway(f"{self._path} does not answer as a state daemon does")
        return answer, fd

    def seal(self, name: str, digest: bytes) -> None:
        """Raises PoolsAway."""
        self._ask(m.Seal(name, digest))

    def drop(self, name: str) -> None:
        """Raises PoolsAway."""
        self._ask(m.Drop(name))

    def close(self) -> None:
        self._socket.close()

    def _ask(self, request: m.Request) -> tuple[m.Filling | m.Opened | m.Busy | m.Done, int]:
        """The answer, and the descriptor with it, or -1."""
        fd = -1
        try:
            self._socket.send(m.encode(request))
            packet, fds, _, _ = socket.recv_fds(self._socket, m.MAX_PACKET, 1)
            fd = fds[0] if fds else -1
            answer = m.decode_answer(packet)
        except (OSError, m.Malformed) as error:
            _close(fd)
            raise PoolsAway(f"{self._path}: {error}") from None
        if isinstance(answer, m.Refused):
            _close(fd)
            raise PoolsAway(answer.why)
        return answer, fd


def _close(fd: int) -> None:
    if fd >= 0:
        os.close(fd)
