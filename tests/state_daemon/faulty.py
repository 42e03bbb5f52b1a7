"""Links that misbehave: a TCP proxy that cuts, holds and flips, and a proxy of whole
messages that repeats them and changes their order."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from typing import Self

import zmq

CHUNK = 16384
BIG = 8192
"""A chunk of more bytes than this is of blocks, not of messages' heads."""


class TcpProxy:
    """Between a port of its own and `target` (set before use). `delay_s`: before each chunk;
    `flip`: damage so many big chunks to the daemon ("in") or from it ("out"); `hold_after`:
    after so many bytes from the daemon forward nothing more of it."""

    def __init__(self, target: int = 0) -> None:
        self.target = target
        self.delay_s = 0.0
        self.flip = {"in": 0, "out": 0}
        self.hold_after = -1
        self.held = threading.Event()
        self.closed = False
        """Whether new connections are turned away."""
        self._pairs: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                try:
                    if self.closed:
                        raise ConnectionRefusedError
                    server = socket.create_connection(("127.0.0.1", self.target))
                except OSError:
                    client.close()
                    continue
                self._pairs += [client, server]
                for way, a, b in (("in", client, server), ("out", server, client)):
                    threading.Thread(target=self._pump, args=(way, a, b), daemon=True).start()

    def _pump(self, way: str, a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(CHUNK):
                time.sleep(self.delay_s)
                if self.flip[way] and len(data) > BIG:
                    self.flip[way] -= 1
                    damaged = bytearray(data)
                    for quarter in (1, 2, 3):  # the rest of a page between two blocks is nobody's
                        damaged[len(data) * quarter // 4] ^= 1
                    data = bytes(damaged)
                if way == "out" and self.hold_after >= 0:
                    if self.hold_after < len(data):
                        self.held.set()
                        while self.hold_after >= 0:  # until let go, or cut
                            time.sleep(0.005)
                        return
                    self.hold_after -= len(data)
                b.sendall(data)
        for end in (a, b):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def cut(self) -> None:
        """Break all connections."""
        self.hold_after = -1
        pairs, self._pairs = self._pairs, []
        for end in pairs:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        self.cut()


class Shuffler:
    """Between a ZeroMQ port of its own and a daemon's plaintext one: each message with a
    chunk goes twice, and behind the message that follows it within `WAIT_MS`; each answer
    comes twice."""

    WAIT_MS = 30

    def __init__(self, target: int) -> None:
        self.swapped = self.repeated = 0
        self._target = target
        self._stop = threading.Event()
        context = zmq.Context.instance()
        self._router = context.socket(zmq.ROUTER)
        self._router.linger = 0
        self.port: int = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._ways: dict[bytes, zmq.Socket] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _way(self, name: bytes) -> zmq.Socket:
        if name not in self._ways:
            way = self._ways[name] = zmq.Context.instance().socket(zmq.DEALER)
            way.linger = 0
            way.connect(f"tcp://127.0.0.1:{self._target}")
        return self._ways[name]

    def _run(self) -> None:
        while not self._stop.is_set():
            if self._router.poll(5):
                self._forward(self._router.recv_multipart())
            for name, way in self._ways.items():
                while way.poll(0):
                    answer = way.recv_multipart()
                    repeat = len(self._ways) and b"ack" in answer[0][:8]
                    for _ in range(2 if repeat else 1):
                        self._router.send_multipart([name, *answer])
        for socket_ in (*self._ways.values(), self._router):
            socket_.close()

    def _forward(self, frames: list[bytes]) -> None:
        name, *message = frames
        if len(message) == 1:  # no chunk: greetings and questions keep their order
            self._way(name).send_multipart(message)
            return
        if self._router.poll(self.WAIT_MS):
            later = self._router.recv_multipart()
            self.swapped += len(later) == 3
            self._way(later[0]).send_multipart(later[1:])
        for _ in range(2):
            self._way(name).send_multipart(message)
        self.repeated += 1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5)
