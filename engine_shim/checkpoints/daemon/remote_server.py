"""The daemon's ZeroMQ socket: engines of other hosts.

With CURVE keys a connection is encrypted, and only the keys listed may connect (ZAP).
Without, the address must lie in a declared private network, and every connection opens
with the challenge of `kv_stream.auth`. ZeroMQ names connections itself: a client cannot choose a
name, so it cannot hijack a session.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence

import zmq
import zmq.asyncio
import zmq.auth.asyncio
from msgspec import Struct

from relume.engine_shim.checkpoints.daemon.errors import BadConfig
from relume.engine_shim.checkpoints.daemon.service import Reply, Service, Session
from relume.engine_shim.checkpoints.link import link_auth
from relume.engine_shim.checkpoints.link.image import Buffer, collect
from relume.events.wire.kv import kv_messages as m

SESSIONS = 4096
HIGH_WATER = 64
BACKLOG = 128
MAX_BUFFERS = 8
SEE_OFF_S = 0.1


class RemoteConfig(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Where to listen and which clients to admit. `curve_secret` and `curve_public` are the
    daemon's pair (Z85); `curve_clients` the public keys admitted. Without keys,
    `private_networks` must contain `host`."""

    host: str
    port: int
    curve_public: str = ""
    curve_secret: str = ""
    curve_clients: tuple[str, ...] = ()
    private_networks: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return f"RemoteConfig({self.host}:{self.port}, curve={bool(self.curve_secret)})"


class _Admitted:
    """ZAP's question: may this key connect?"""

    def __init__(self, keys: tuple[str, ...]) -> None:
        self._keys = {key.encode() for key in keys}

    def callback(self, domain: str, key: bytes) -> bool:
        return key in self._keys


class Buffers:
    """Memory for chunks while ZeroMQ sends them, used again: fresh pages for every chunk
    would cost more than copying the blocks into them."""

    def __init__(self) -> None:
        self._free: list[bytearray] = []
        self._lent: deque[tuple[bytearray, zmq.MessageTracker]] = deque()

    def joined(self, parts: Sequence[Buffer]) -> memoryview:
        """The parts, concatenated in memory that has no other user until it is `lent` and sent."""
        while self._lent and self._lent[0][1].done:
            self._free.append(self._lent.popleft()[0])
        del self._free[MAX_BUFFERS:]
        size = sum(map(len, parts))
        fit = (n for n, buffer in enumerate(self._free) if size <= len(buffer) <= 2 * size)
        number = next(fit, None)
        buffer = bytearray(size) if number is None else self._free.pop(number)
        view = memoryview(buffer)[:size]
        collect(view, parts)
        return view

    def lent(self, view: memoryview, tracker: zmq.MessageTracker) -> None:
        """`view` is free again when the tracker says it is."""
        assert isinstance(view.obj, bytearray)
        self._lent.append((view.obj, tracker))


class RemoteServer:
    """Serves until cancelled."""

    def __init__(self, service: Service, config: RemoteConfig) -> None:
        """Raises BadConfig for a plaintext address outside the declared networks."""
        self._service = service
        self._config = config
        self._sessions: OrderedDict[bytes, Session] = OrderedDict()
        self._buffers = Buffers()
        self._leaving: deque[tuple[zmq.MessageTracker, Callable[[], None]]] = deque()
        if not config.curve_secret:
            try:
                private = link_auth.declared_private(config.host, config.private_networks)
            except ValueError as error:
                raise BadConfig(f"plaintext needs a numeric address: {error}") from None
            if not private:
                raise BadConfig(f"{config.host} is in no declared private network; use CURVE")
            if len(service.secret) < link_auth.MIN_SECRET_BYTES:
                raise BadConfig(f"plaintext needs a secret of {link_auth.MIN_SECRET_BYTES} bytes")

    def bind(self) -> None:
        """Listens from here on; call it on the event loop. Raises zmq.ZMQError."""
        self._context = zmq.asyncio.Context()
        self._authentication = self._authenticator(self._context)
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._configure(self._router)
            self._router.bind(f"tcp://{self._config.host}:{self._config.port}")
        except zmq.ZMQError:
            self._close()
            raise

    async def serve(self) -> None:
        """Answers until cancelled; call `bind` first."""
        seeing_off = asyncio.create_task(self._see_off_all())
        try:
            while True:
                frames = await self._router.recv_multipart(copy=False)
                await self._take(self._router, frames)
        finally:
            seeing_off.cancel()
            self._close()

    def _close(self) -> None:
        self._router.close(0)
        if self._authentication is not None:
            self._authentication.stop()
        self._context.term()

    def _authenticator(
        self, context: zmq.asyncio.Context
    ) -> zmq.auth.asyncio.AsyncioAuthenticator | None:
        if not self._config.curve_secret:
            return None
        authenticator = zmq.auth.asyncio.AsyncioAuthenticator(context)
        authenticator.start()
        authenticator.configure_curve_callback(
            domain="*", credentials_provider=_Admitted(self._config.curve_clients)
        )
        return authenticator

    def _configure(self, router: zmq.asyncio.Socket) -> None:
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.RCVHWM, HIGH_WATER)
        router.setsockopt(zmq.SNDHWM, HIGH_WATER)
        router.setsockopt(zmq.MAXMSGSIZE, m.MAX_CHUNK_BYTES)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)
        router.setsockopt(zmq.BACKLOG, BACKLOG)
        router.setsockopt(zmq.HEARTBEAT_IVL, 2000)
        router.setsockopt(zmq.HEARTBEAT_TIMEOUT, 10000)
        if self._config.curve_secret:
            router.curve_server = True
            router.curve_secretkey = self._config.curve_secret.encode()
            router.curve_publickey = self._config.curve_public.encode()

    async def _take(self, router: zmq.asyncio.Socket, frames: list[zmq.Frame]) -> None:
        if len(frames) not in (2, 3):
            return
        name = frames[0].bytes
        if not name.startswith(b"\0"):
            return  # a name the client chose itself
        chunk = frames[2].buffer if len(frames) == 3 else memoryview(b"")
        reply = self._session(name).answer(frames[1].buffer, memoryview(chunk))
        if reply.close:
            self._end(name)
        await self._send(router, name, reply)

    def _session(self, name: bytes) -> Session:
        session = self._sessions.pop(name, None)
        if session is None:
            session = Session(self._service, bool(self._config.curve_secret), shared=False)
        self._sessions[name] = session
        while len(self._sessions) > SESSIONS:
            self._end(next(iter(self._sessions)))
        return session

    def _end(self, name: bytes) -> None:
        if session := self._sessions.pop(name, None):
            session.closed()

    async def _send(self, router: zmq.asyncio.Socket, name: bytes, reply: Reply) -> None:
        """An answer without a receiver is dropped: the other end asks again."""
        self._see_off()
        frames: list[Buffer] = [name, reply.header]
        if reply.parts:
            whole = reply.parts[0] if reply.left else self._buffers.joined(reply.parts)
            frames.append(whole)
        try:
            # Not by wait_for: it ignores a cancellation that comes as the answer leaves, and a
            # daemon that is stopped in that moment would continue.
            async with asyncio.timeout(1.0):
                tracker = await router.send_multipart(frames, copy=False, track=bool(reply.parts))
        except (zmq.ZMQError, TimeoutError):
            if reply.left:
                reply.left()
            return
        if reply.left:
            assert tracker is not None  # what is lent has parts
            self._leaving.append((tracker, reply.left))
        elif reply.parts:
            assert isinstance(whole, memoryview) and tracker is not None
            self._buffers.lent(whole, tracker)

    def _see_off(self) -> None:
        """Unpin what was sent."""
        while self._leaving and self._leaving[0][0].done:
            self._leaving.popleft()[1]()

    async def _see_off_all(self) -> None:
        while True:
            await asyncio.sleep(SEE_OFF_S)
            self._see_off()
