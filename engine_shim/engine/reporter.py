"""The engine's end of the report socket: reports out, the lifeline in.

Sending never blocks: what the socket does not take waits in a bounded buffer, and what
that does not take is dropped and counted, so that the next record can say so. A thread
waits on the same socket: EOF means that the agent is gone, and the process ends at once
(`os._exit`), since an engine without an agent would live a second life unseen.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import threading

from relume.engine_shim.engine.hosts import deathwatch
from relume.events.wire.reports import Hello, hello_frame

ORPHANED_EXIT = 70
BUFFER_BYTES = 1 << 20
CONNECT_TIMEOUT_S = 5.0


class AgentUnreachable(ConnectionError):
    """The agent that should watch this engine does not answer on its socket."""

    def __init__(self, path: str, reason: OSError) -> None:
        super().__init__(f"agent socket {path}: {reason}; an engine does not run unwatched")
        self.path = path


class Reporter:
    """One connection to the agent. `send` may be called from any thread."""

    def __init__(self, path: str, hello: Hello) -> None:
        self._lock = threading.Lock()
        self._pending = bytearray()
        self._lost = 0
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._connected = threading.Event()
        self._holding = threading.Event()
        self._alive_path = deathwatch.path_of(path, hello.pid)
        threading.Thread(target=self._watch, name="relume-lifeline", daemon=True).start()
        self._holding.wait(CONNECT_TIMEOUT_S)
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(CONNECT_TIMEOUT_S)
        try:
            self._socket.connect(path)
            self._socket.sendall(hello_frame(hello))
        except OSError as error:
            self._socket.close()
            raise AgentUnreachable(path, error) from error
        self._socket.setblocking(False)
        self._connected.set()

    @property
    def has_lost(self) -> bool:
        """Whether frames were dropped since the last `take_lost`."""
        return self._lost > 0

    def take_lost(self) -> int:
        """Frames dropped since the last call; the caller reports the number."""
        with self._lock:
            lost, self._lost = self._lost, 0
        return lost

    def send(self, frame: bytes, lost: int = 0) -> bool:
        """Queues `frame`; False when it was dropped.

        `lost` is the count the frame itself carries, which is not lost with it.
        """
        with self._lock:
            if self._pending:
                if len(self._pending) + len(frame) > BUFFER_BYTES:
                    self._lost += 1 + lost
                    return False
                self._pending += frame
                return True
            sent = self._write(frame)
            if sent < len(frame):
                self._pending += frame[sent:]
                os.eventfd_write(self._wake, 1)
        return True

    def _write(self, data: bytes | bytearray) -> int:
        """Bytes the socket took now. A broken socket takes all: the lifeline acts on it."""
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def _watch(self) -> None:
        # This thread lasts as long as the process: it holds the mutex that shows its death early.
        self._alive = deathwatch.hold(self._alive_path)
        self._holding.set()
        self._connected.wait()
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        poll.register(self._socket, select.POLLIN)
        while True:
            for fd, events in poll.poll():
                if fd == self._wake:
                    with contextlib.suppress(BlockingIOError):
                        os.eventfd_read(self._wake)
                elif events & ~select.POLLOUT and self._at_end():
                    os._exit(ORPHANED_EXIT)
            with self._lock:
                if self._pending:
                    del self._pending[: self._write(self._pending)]
                wanted = select.POLLIN | (select.POLLOUT if self._pending else 0)
            poll.modify(self._socket, wanted)

    def _at_end(self) -> bool:
        try:
            return self._socket.recv(4096) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
