"""Transport between hosts: ZeroMQ, encrypted and authenticated by CURVE, or plaintext
with the HMAC handshake of `auth` on a declared private network."""

from __future__ import annotations

from collections.abc import Sequence

import zmq
import zmq.utils.monitor
from msgspec import Struct

from relume.engine_shim.checkpoints.link.channel import Wake
from relume.engine_shim.checkpoints.link.image import Buffer
from relume.events.wire.kv.kv_errors import MalformedMessage, Unreachable
from relume.events.wire.kv.kv_messages import MAX_CHUNK_BYTES, MAX_HEADER_BYTES

HIGH_WATER = 64
SEND_TIMEOUT_MS = 2000
WINDOW_BYTES = 64 << 20
READ_BYTES = 4 << 20
BROKEN = (
    zmq.EVENT_DISCONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
)


class CurveKeys(Struct, frozen=True):
    """This end's pair and the daemon's public key, Z85 as ZeroMQ prints them."""

    public: bytes
    secret: bytes
    server: bytes

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r})"


class ZmqChannel:
    """A DEALER to the daemon's ROUTER at `tcp://host:port`."""

    read_bytes = READ_BYTES

    def __init__(self, address: str, wake: Wake, keys: CurveKeys | None = None) -> None:
        """Connects in the background; the first answer shows whether it worked."""
        self.trusted = keys is not None
        self.window_bytes = WINDOW_BYTES
        self._address = address
        self._wake = wake
        socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket = socket
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, HIGH_WATER)
        socket.setsockopt(zmq.RCVHWM, HIGH_WATER)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_CHUNK_BYTES)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.RECONNECT_IVL, -1)  # the peer reconnects, with a new handshake
        socket.setsockopt(zmq.HEARTBEAT_IVL, 1000)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 3000)
        self._monitor = socket.get_monitor_socket(BROKEN)
        if keys is not None:
            socket.curve_publickey = keys.public
            socket.curve_secretkey = keys.secret
            socket.curve_serverkey = keys.server
        try:
            socket.connect(address)
        except zmq.ZMQError as error:
            self.close()
            raise Unreachable(address, str(error)) from None
        self._poller = zmq.Poller()
        self._poller.register(socket, zmq.POLLIN)
        self._poller.register(wake.fd, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def send(self, header: bytes, parts: Sequence[Buffer]) -> None:
        """ZeroMQ keeps what it queues, so the chunk is copied once."""
        frames: list[Buffer] = [header]
        if parts:
            frames.append(parts[0] if len(parts) == 1 else b"".join(parts))
        try:
            try:
                self._socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
            except zmq.Again:
                self._wait_for_space()
                self._socket.send_multipart(frames, zmq.NOBLOCK, copy=True)
        except zmq.ZMQError as error:
            raise Unreachable(self._address, str(error)) from None

    def _wait_for_space(self) -> None:
        """Until there is a connection that takes a message. Raises Unreachable, at once when
        it is refused."""
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLOUT)
        poller.register(self._monitor, zmq.POLLIN)
        ready = dict(poller.poll(SEND_TIMEOUT_MS))
        if self._monitor in ready:
            raise Unreachable(self._address, "the connection was refused, or broke")
        if self._socket not in ready:
            raise Unreachable(self._address, f"takes nothing for {SEND_TIMEOUT_MS} ms")

    def receive(self, timeout_s: float) -> tuple[bytes, memoryview] | None:
        ready = dict(self._poller.poll(int(max(0, timeout_s) * 1000)))
        if self._wake.fd in ready:
            self._wake.clear()
        if self._monitor in ready:
            raise Unreachable(self._address, "the connection broke, or was not let in")
        if self._socket not in ready:
            return None
        try:
            frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            return None
        except zmq.ZMQError as error:
            raise Unreachable(self._address, str(error)) from None
        if len(frames) > 2 or len(frames[0].buffer) > MAX_HEADER_BYTES:
            raise Unreachable(self._address, "no message of ours")
        chunk = frames[1].buffer if len(frames) == 2 else memoryview(b"")
        return frames[0].bytes, chunk

    def arena(self, offset: int, length: int) -> memoryview:
        raise MalformedMessage("there is no shared memory between hosts")

    def close(self) -> None:
        self._socket.disable_monitor()
        self._monitor.close(0)
        self._socket.close(0)
