"""Streams of KV blocks on a network that loses, repeats and reorders whole messages.

It relays between a port of its own and a state daemon's plaintext port at the level of ZeroMQ:
below it, TCP would repair losses. It disturbs only messages that carry blocks: a link that loses
its greeting does not come up, which is fault `cut`.
"""

from __future__ import annotations

import random
import threading
from typing import Self

import zmq
from msgspec import Struct

HELD_MS = 30
"""Maximum time a delayed message waits for a later one."""


class Disturbance(Struct):
    """Shares of the messages with blocks that are lost, repeated, delayed; `cut`: directions ("to"
    the daemon, "fro") that carry nothing."""

    lost: float = 0.0
    twice: float = 0.0
    late: float = 0.0
    cut: tuple[str, ...] = ()


class Disturber:
    """`target`: the daemon's port. Another thread may set `disturb`. `done` has the counts."""

    def __init__(self) -> None:
        self.target = 0
        self.disturb = Disturbance()
        self.done = {"lost": 0, "twice": 0, "late": 0, "cut": 0}
        self._rng = random.Random(0)
        self._stop = threading.Event()
        self._context = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.linger = 0
        self.port: int = self._router.bind_to_random_port("tcp://127.0.0.1")
        self._ways: dict[bytes, zmq.Socket] = {}
        self._thread = threading.Thread(target=self._run, daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(5)
        self._context.destroy(linger=0)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._router, zmq.POLLIN)
        while not self._stop.is_set():
            for ready, _ in poller.poll(50):
                if ready is self._router:
                    name, *message = self._router.recv_multipart()
                    if name not in self._ways:
                        poller.register(self._way(name), zmq.POLLIN)
                    self._there(name, message)
            for name, way in self._ways.items():
                while way.poll(0):
                    self._back(name, way.recv_multipart())

    def _way(self, name: bytes) -> zmq.Socket:
        way = self._ways[name] = self._context.socket(zmq.DEALER)
        way.linger = 0
        way.connect(f"tcp://127.0.0.1:{self.target}")
        return way

    def _there(self, name: bytes, message: list[bytes]) -> None:
        disturb = self.disturb
        if "to" in disturb.cut:
            self.done["cut"] += 1
            return
        if len(message) == 1:
            self._ways[name].send_multipart(message)
            return
        if self._drawn("lost", disturb.lost):
            return
        if self._drawn("late", disturb.late) and self._router.poll(HELD_MS):
            later, *rest = self._router.recv_multipart()
            if later in self._ways:
                self._ways[later].send_multipart(rest)
        for _ in range(2 if self._drawn("twice", disturb.twice) else 1):
            self._ways[name].send_multipart(message)

    def _back(self, name: bytes, answer: list[bytes]) -> None:
        disturb = self.disturb
        if "fro" in disturb.cut:
            self.done["cut"] += 1
            return
        if len(answer) > 1 and self._drawn("lost", disturb.lost):
            return
        for _ in range(2 if b"ack" in answer[0][:8] and self._drawn("twice", disturb.twice) else 1):
            self._router.send_multipart([name, *answer])

    def _drawn(self, what: str, share: float) -> bool:
        if share <= 0 or self._rng.random() >= share:
            return False
        self.done[what] += 1
        return True
