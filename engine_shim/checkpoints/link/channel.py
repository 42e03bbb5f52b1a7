"""Transports: how one message and one contiguous chunk get to a state daemon and back.

`Channel` is the base of `flush` and `fetch`. There is shared memory for one host
(`LocalChannel`) and ZeroMQ between hosts (`zmq_channel`); NCCL or RDMA would be others. A
channel belongs to one thread; only `wake` may be called from another.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import select
import socket
from collections.abc import Sequence
from typing import Protocol

from relume.engine_shim.checkpoints.link.image import Buffer
from relume.engine_shim.checkpoints.link.staging_memory import make_staging
from relume.events.wire.kv import local_frames
from relume.events.wire.kv.kv_errors import MalformedMessage, Unreachable

CONNECT_TIMEOUT_S = 2.0
SEND_TIMEOUT_S = 2.0


class Channel(Protocol):
    """One connection to one daemon. All methods raise Unreachable when it broke."""

    trusted: bool
    """The transport itself proves both ends; no challenge is made."""
    window_bytes: int
    """Maximum number of unanswered bytes."""
    read_bytes: int
    """Best number of bytes per request for blocks."""

    def send(self, header: bytes, parts: Sequence[Buffer]) -> None:
        """Sends a message whose chunk is `parts`, concatenated."""

    def receive(self, timeout_s: float) -> tuple[bytes, memoryview] | None:
        """The next message; None when none came, or `wake` was called."""

    def arena(self, offset: int, length: int) -> memoryview:
        """Bytes of the daemon's shared memory. Raises MalformedMessage without one."""

    def close(self) -> None: ...


class Wake:
    """Interrupts `receive` and `wait` from another thread."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self.fd, select.POLLIN)

    def set(self) -> None:
        os.eventfd_write(self.fd, 1)

    def wait(self, timeout_s: float) -> bool:
        """Sleeps until `set` or the end of the time; whether it was set."""
        woken = bool(self._poll.poll(timeout_s * 1000))
        if woken:
            self.clear()
        return woken

    def clear(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        os.close(self.fd)


class LocalChannel:
    """Unix socket for headers; chunks lie in shared memory in both directions."""

    trusted = True
    read_bytes = 64 << 20  # they stay where they lie

    def __init__(self, path: str, wake: Wake, staging_bytes: int = 32 << 20) -> None:
        """Connects. Raises Unreachable."""
        self._path = path
        self._wake = wake
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(CONNECT_TIMEOUT_S)
        self._buffer = bytearray()
        self._arena: mmap.mmap | None = None
        self._staging_fd, self._staging = make_staging(staging_bytes)
        # A chunk that does not fit after the last one goes to the beginning: half of the
        # memory is what is certain not to be overwritten before it is answered.
        self.window_bytes = staging_bytes // 2
        self._at = 0
        try:
            self._socket.connect(path)
            _, fds, _, _ = socket.recv_fds(self._socket, 1, 1)
            if not fds:
                raise Unreachable(path, "the daemon is full or refuses us")
            size = os.fstat(fds[0]).st_size
            self._arena = mmap.mmap(fds[0], size, prot=mmap.PROT_READ)
            os.close(fds[0])
            socket.send_fds(self._socket, [b"s"], [self._staging_fd])
        except OSError as error:
            self.close()
            raise Unreachable(path, str(error)) from None
        except Unreachable:
            self.close()
            raise
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._poll.register(wake.fd, select.POLLIN)

    def send(self, header: bytes, parts: Sequence[Buffer]) -> None:
        """A chunk is staged after the last one, and from the beginning when the end is reached: the
        sender keeps fewer bytes unanswered than the window."""
        size = sum(len(part) for part in parts)
        if size > self.window_bytes:
            raise Unreachable(self._path, f"a chunk of {size} bytes, staging is too small")
        offset = self._at if self._at + size <= len(self._staging) else 0
        at = offset
        for part in parts:
            self._staging[at : at + len(part)] = part
            at += len(part)
        self._at = at
        try:
            self._socket.settimeout(SEND_TIMEOUT_S)
            self._socket.sendall(local_frames.pack(header, size, local_frames.STAGED, offset))
        except OSError as error:
            raise Unreachable(self._path, str(error)) from None

    def receive(self, timeout_s: float) -> tuple[bytes, memoryview] | None:
        if message := self._take():
            return message
        ready = dict(self._poll.poll(max(0, timeout_s) * 1000))
        if self._wake.fd in ready:
            self._wake.clear()
        if self._socket.fileno() in ready:
            try:
                data = self._socket.recv(1 << 20)
            except OSError as error:
                raise Unreachable(self._path, str(error)) from None
            if not data:
                raise Unreachable(self._path, "closed by the daemon")
            self._buffer += data
        return self._take()

    def _take(self) -> tuple[bytes, memoryview] | None:
        head = local_frames.FRAME.size
        if len(self._buffer) < head:
            return None
        try:
            header_bytes, chunk_bytes, _, _ = local_frames.unpack(bytes(self._buffer[:head]))
        except MalformedMessage as error:
            raise Unreachable(self._path, str(error)) from None
        end = head + header_bytes + chunk_bytes
        if len(self._buffer) < end:
            return None
        header = bytes(self._buffer[head : head + header_bytes])
        chunk = memoryview(bytes(self._buffer[head + header_bytes : end]))
        del self._buffer[:end]
        return header, chunk

    def arena(self, offset: int, length: int) -> memoryview:
        if self._arena is None or offset + length > len(self._arena):
            raise MalformedMessage("outside the arena")
        return memoryview(self._arena)[offset : offset + length]

    def close(self) -> None:
        self._socket.close()
        if self._staging_fd >= 0:
            os.close(self._staging_fd)
            self._staging_fd = -1
        # Views handed out may still be alive; the mapping goes when they do.
        with contextlib.suppress(BufferError):
            self._staging.close()
        if self._arena is not None:
            with contextlib.suppress(BufferError):
                self._arena.close()
