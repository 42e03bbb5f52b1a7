"""The daemon's Unix socket: engines and the agent of this host, with shared memory."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import socket
import struct

from relume.engine_shim.checkpoints.daemon.service import Reply, Service, Session
from relume.engine_shim.checkpoints.link.staging_memory import open_staging
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv import local_frames
from relume.events.wire.kv.kv_errors import MalformedMessage

CONNECTIONS = 64
OPENING_TIMEOUT_S = 5.0


class LocalServer:
    """Serves `path` until cancelled; a user other than ours is turned away."""

    def __init__(self, service: Service, path: str) -> None:
        self._service = service
        self._path = path
        self._open = 0
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener: socket.socket | None = None

    def bind(self) -> None:
        """Listens from here on. Raises OSError."""
        self._listener = private_listener(self._path, socket.SOCK_STREAM)

    async def serve(self) -> None:
        """Answers until cancelled; call `bind` first."""
        assert self._listener is not None
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.TaskGroup() as group:
                while True:
                    connection, _ = await loop.sock_accept(self._listener)
                    group.create_task(self._connection(connection))
        finally:
            self._listener.close()

    def turn_away(self, why: m.RefusalAnswer) -> None:
        """Sends to all connections."""
        for writer in self._writers:
            writer.write(local_frames.pack(m.encode(why), 0))

    async def _connection(self, connection: socket.socket) -> None:
        self._open += 1
        session = Session(self._service, trusted=True, shared=True)
        staging: mmap.mmap | None = None
        try:
            if self._open > CONNECTIONS or not same_user(connection):
                return
            connection.setblocking(False)
            async with asyncio.timeout(OPENING_TIMEOUT_S):
                staging = await self._exchange(connection)
            reader, writer = await asyncio.open_connection(sock=connection, limit=1 << 20)
            self._writers.add(writer)
            try:
                await _serve(session, reader, writer, staging)
            finally:
                self._writers.discard(writer)
                writer.close()
        except (OSError, TimeoutError, MalformedMessage, asyncio.IncompleteReadError):
            pass  # the other end is gone or talks nonsense; nothing of it remains
        finally:
            self._open -= 1
            session.closed()
            connection.close()
            if staging is not None:
                staging.close()

    async def _exchange(self, connection: socket.socket) -> mmap.mmap:
        """Our arena against the engine's staging memory."""
        fd = self._service.store.arena.readable_fd()
        try:
            socket.send_fds(connection, [b"a"], [fd])
        finally:
            os.close(fd)
        loop = asyncio.get_running_loop()
        readable = loop.create_future()
        loop.add_reader(connection.fileno(), _settle, readable)
        try:
            await readable
        finally:
            loop.remove_reader(connection.fileno())
        _, fds, _, _ = socket.recv_fds(connection, 1, 1)
        try:
            if not fds:
                raise MalformedMessage("no staging memory was given")
            return open_staging(fds[0])
        finally:
            for other in fds:
                os.close(other)


def _settle(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def private_listener(path: str, kind: socket.SocketKind) -> socket.socket:
    """Listens at `path`, for this user alone. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, kind)
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    old = os.umask(0o177)
    try:
        listener.bind(path)
    finally:
        os.umask(old)
    listener.listen(CONNECTIONS)
    listener.setblocking(False)
    return listener


def same_user(connection: socket.socket) -> bool:
    """Whether the other end is a process of our user."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", data)[1] == os.getuid()


async def _serve(
    session: Session,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    staging: mmap.mmap,
) -> None:
    while True:
        head = await reader.readexactly(local_frames.FRAME.size)
        header_bytes, chunk_bytes, place, offset = local_frames.unpack(head)
        header = await reader.readexactly(header_bytes)
        reply = _answer(session, header, await _chunk(reader, chunk_bytes, place), staging, offset,
                        chunk_bytes, place)  # fmt: skip
        chunk = b"".join(reply.parts)
        writer.write(local_frames.pack(reply.header, len(chunk)))
        if chunk:
            writer.write(chunk)
        await writer.drain()
        if reply.close:
            return


async def _chunk(reader: asyncio.StreamReader, size: int, place: int) -> bytes:
    return await reader.readexactly(size) if place == local_frames.INLINE and size else b""


def _answer(
    session: Session, header: bytes, inline: bytes, staging: mmap.mmap, offset: int, size: int,
    place: int,
) -> Reply:  # fmt: skip
    if place == local_frames.INLINE:
        return session.answer(header, memoryview(inline))
    if offset + size > len(staging):
        raise MalformedMessage("a chunk outside the staging memory")
    with memoryview(staging) as whole, whole[offset : offset + size] as chunk:
        return session.answer(header, chunk)
