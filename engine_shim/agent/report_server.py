"""The agent's end of the report socket: step records in, and the lifeline out.

Every vLLM process of the engine connects and sends a hello; while the connection is open it knows
that its agent lives. Step records are decoded only to see that they can be: the bytes go to the log,
and one that cannot be read there would take the worker out of service.

The sockets are read with plain `recv` from reader callbacks rather than by transports,
so that `end` can empty them at the moment the engine dies: its last steps then come before its
death in the log, and nothing of it after.

Garbage: a stranger's connection is closed. A connection that said hello as the present
engine is never closed for what it sends, since EOF would end the engine: a bad frame is
dropped, and when framing itself is lost the connection is muted and stays a lifeline. What is
dropped by the engine's fault, and a report of which only a part came, becomes a fact of the log
(`unread_reports`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from relume.engine_shim.agent.agent_logging import Logger
from relume.engine_shim.agent.journal import MAX_RECORD_BYTES, RETRY_S, Journal
from relume.engine_shim.agent.unread_reports import UnreadReports
from relume.events.failpoints import failpoint_client
from relume.events.failpoints.points import Failpoint
from relume.events.log.codec import decode, encode
from relume.events.log.errors import LogError
from relume.events.log.feature_levels import is_newer, level_of, lowered
from relume.events.wire.errors import ReportError
from relume.events.wire.reports import Hello, Layout, Ready, ReportReader, Weights, parse

MAX_CONNECTIONS = 256
HELLO_TIMEOUT_S = 5.0
RECEIVE_BYTES = 256 * 1024
MAX_DRAIN_READS = 64
_STEP_TAGS = (
    b"\xadengine_step/1",
    b"\xb1restore_started/1",
    b"\xaerestore_done/1",
    b"\xb0restore_failed/1",
    b"\xaflink_measured/1",
    b"\xb2streams_reported/1",
    b"\xb7prefix_blocks_changed/1",
)
_UCRED = struct.Struct("3i")


def is_step(record: bytes) -> bool:
    """Whether `record` is an array headed by the tag of an event engines write (a step, the
    progress of a restore, the speed of a link, statistics of buffered streams, a change of its prefix
    cache). Checks no more."""
    return record[:1] >= b"\x90" and record[:1] <= b"\x9f" and record.startswith(_STEP_TAGS, 1)


class Readable(NamedTuple):
    """A record as readers of the log can read it; empty if they cannot, and then `why`, and whether
    the engine `is_at_fault`."""

    record: bytes
    why: str = ""
    is_at_fault: bool = False


def readable(record: bytes, level: int) -> Readable:
    """`record` for a log of that feature level."""
    if len(record) > MAX_RECORD_BYTES:
        return Readable(b"", f"step record of {len(record)} bytes", True)
    try:
        event = decode(record)
    except LogError as error:
        return Readable(b"", str(error), True)
    if is_newer(type(event)) and level_of(event) > level:
        event = lowered(event, level)
        if event is None:
            return Readable(b"", f"its tag is above feature level {level} of the fleet")
        return Readable(encode(event))
    return Readable(record)


class ReportServer:
    """Listens on `path` while an engine lives, between `begin` and `end`.

    `on_hello(pid, hello)`, `on_weights(weights)`, `on_layout(layout)` and `on_ready(ready)` are called
    from the event loop. An async context manager; leaving closes every connection.
    """

    def __init__(self, path: Path, journal: Journal, logger: Logger) -> None:
        self._path = path
        self._journal = journal
        self._logger = logger
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        self._connections: set[_Connection] = set()
        self._incarnation = 0
        self.on_hello: Callable[[int, Hello], None] = lambda _pid, _hello: None
        self.on_ready: Callable[[Ready], None] = lambda _ready: None
        self.on_layout: Callable[[Layout], None] = lambda _layout: None
        self.on_weights: Callable[[Weights], None] = lambda _weights: None
        self.frames_dropped = 0
        self._unread = UnreadReports(journal)

    async def __aenter__(self) -> ReportServer:
        for stale in (self._path, *self._path.parent.glob(f"{self._path.name}.*.alive")):
            with contextlib.suppress(FileNotFoundError):
                stale.unlink()
        self._listener.bind(str(self._path))
        os.chmod(self._path, 0o600)
        self._listener.listen(64)
        return self

    async def __aexit__(self, *_: object) -> None:
        self.end()
        self._listener.close()
        with contextlib.suppress(FileNotFoundError):
            self._path.unlink()

    def begin(self, incarnation: int) -> None:
        """Accept the processes of this incarnation; those that connected early waited."""
        self._incarnation = incarnation
        self._unread.begin(incarnation)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def state_again(self) -> None:
        """The log is new and knows nothing of the engine: what is known against its reports is written
        again."""
        self._unread.state_again()

    def end(self) -> None:
        """Take what the engine sent before it died, then close all of its connections."""
        asyncio.get_running_loop().remove_reader(self._listener)
        for connection in list(self._connections):
            connection.drain()
            connection.close()
        self._unread.end()
        self._incarnation = 0

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        client.setblocking(False)
        if len(self._connections) >= MAX_CONNECTIONS:
            self._logger.warning("report connection refused: too many", limit=MAX_CONNECTIONS)
            client.close()
            return
        self._connections.add(_Connection(self, client))

    def describe(self) -> dict[str, int]:
        """For the status endpoint."""
        return {"connections": len(self._connections), "frames_dropped": self.frames_dropped}


class _Connection:
    """One process of the engine, or a stranger until it says hello."""

    def __init__(self, server: ReportServer, client: socket.socket) -> None:
        self._server = server
        self._socket = client
        self._logger = server._logger
        self._frames = ReportReader()
        self._refused: list[bytes] = []
        self._hello: Hello | None = None
        self._muted = False
        self._open = True
        credentials = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size)
        self._pid = _UCRED.unpack(credentials)[0]
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(HELLO_TIMEOUT_S, self._no_hello)
        self._loop.add_reader(client, self._readable)

    def _no_hello(self) -> None:
        self._garbage(f"no hello within {HELLO_TIMEOUT_S:g} s")

    def _receive(self) -> bytes | None:
        """What is there; empty at EOF; None for nothing now."""
        try:
            return self._socket.recv(RECEIVE_BYTES)
        except (BlockingIOError, InterruptedError):
            return None
        except OSError:
            return b""

    def _readable(self) -> None:
        data = self._receive()
        if data:
            if failpoint_client.active:
                failpoint_client.reach(Failpoint.AGENT_REPORT, bytes=len(data))
            self._feed(data)
        elif data is not None:
            self.close()

    def _feed(self, data: bytes) -> None:
        if self._muted:
            return
        try:
            payloads = self._frames.feed(data)
        except ReportError as error:
            self._garbage(str(error))
            return
        self._take(payloads)
        if payloads and self._open and not self._refused:
            self._feed(b"")  # an absurd length may follow them

    def _take(self, payloads: list[bytes]) -> None:
        journal = self._server._journal
        for index, payload in enumerate(payloads):
            is_unchecked = failpoint_client.active and self._is_unchecked(payload)
            if self._hello is not None and (is_unchecked or is_step(payload)):
                found = (
                    Readable(payload) if is_unchecked else readable(payload, journal.feature_level)
                )
                if not found.record:
                    self._drop(found.why)
                    if found.is_at_fault:
                        self._server._unread.note(found.why)
                elif not journal.step(found.record):
                    # The log is full: stop reading, so the engine fills its own buffer,
                    # drops, and counts in its next record what was lost.
                    self._refused = payloads[index:]
                    self._loop.remove_reader(self._socket)
                    self._timer = self._loop.call_later(RETRY_S, self._again)
                    return
            else:
                self._control(payload)
                if not self._open or self._muted:
                    return

    def _is_unchecked(self, payload: bytes) -> bool:
        """Whether a failpoint lets a record of the engine pass without a check."""
        if self._hello is None:
            return False
        try:
            failpoint_client.reach(Failpoint.AGENT_CHECK, pid=self._pid, bytes=len(payload))
        except failpoint_client.FailpointReached:
            return True
        return False

    def _again(self) -> None:
        self._timer.cancel()
        payloads, self._refused = self._refused, []
        self._loop.add_reader(self._socket, self._readable)
        self._take(payloads)

    def _control(self, payload: bytes) -> None:
        if len(payload) > MAX_RECORD_BYTES:
            self._bad_frame(f"control frame of {len(payload)} bytes")
            return
        try:
            message = parse(payload)
        except ReportError as error:
            self._bad_frame(str(error))
            return
        if isinstance(message, Hello):
            self._greet(message)
        elif self._hello is None:
            self._garbage("a frame before hello")
        elif isinstance(message, Ready):
            self._server.on_ready(message)
        elif isinstance(message, Layout):
            self._server.on_layout(message)
        elif isinstance(message, Weights):
            self._server.on_weights(message)
        else:
            self._bad_frame(f"neither a step nor a control frame: {payload[:24]!r}")

    def _greet(self, hello: Hello) -> None:
        if self._hello is not None:
            self._bad_frame("a second hello")
            return
        if hello.incarnation != self._server._incarnation:
            self._logger.warning(
                "engine process of another incarnation sent away",
                pid=self._pid,
                role=hello.role,
                its_incarnation=hello.incarnation,
                incarnation=self._server._incarnation,
            )
            self.close()
            return
        self._timer.cancel()
        self._hello = hello
        # The peer's pid, as the kernel reports it; 0 when it lives in another pid namespace.
        self._server.on_hello(self._pid or hello.pid, hello)

    def _bad_frame(self, detail: str) -> None:
        if self._hello is None:
            self._garbage(detail)
        else:
            self._drop(detail)
            self._server._unread.note(detail)

    def _drop(self, detail: str) -> None:
        self._server.frames_dropped += 1
        dropped = self._server.frames_dropped
        if dropped & (dropped - 1) == 0:  # the 1st, 2nd, 4th, 8th...: never a flood
            self._logger.error("report frame dropped", pid=self._pid, why=detail, dropped=dropped)

    def _garbage(self, detail: str) -> None:
        if self._hello is None:
            self._logger.warning("report connection closed: garbage", pid=self._pid, why=detail)
            self.close()
        else:
            self._muted = True
            self._server._unread.note(detail, muted=True)
            self._logger.error("report connection muted: framing lost", pid=self._pid, why=detail)

    def drain(self) -> None:
        """Take what the socket still holds, without waiting and within a bound."""
        if self._refused:
            self._again()
        for _ in range(MAX_DRAIN_READS):
            if not self._open or self._refused or not (data := self._receive()):
                return
            self._feed(data)

    def _note_incomplete(self) -> None:
        """The connection ends within a report: its process died, or a length was wrong, so that the
        reports after it were taken for a part of it."""
        count = self._frames.incomplete_bytes
        if count and self._hello is not None and not self._muted:
            self._bad_frame(f"its connection ended {count} bytes into a report")

    def close(self) -> None:
        """Close; the process at the other end sees EOF and ends itself."""
        if self._open:
            self._note_incomplete()
            self._open = False
            self._timer.cancel()
            self._loop.remove_reader(self._socket)
            self._socket.close()
            self._server._connections.discard(self)
