"""A real state daemon in its own process, and links to it."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from relume.engine_shim.checkpoints.link.channel import Channel, LocalChannel, Wake
from relume.engine_shim.checkpoints.link.peer import Peer
from relume.engine_shim.checkpoints.link.zmq_channel import CurveKeys, ZmqChannel
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.fingerprint import HEADS, Fingerprint

REPOSITORY = Path(__file__).parents[2]
START_S = 20.0
BLOCK = 4
LAYERS = 3
PIECE = 4096


def fingerprint(**changes: Any) -> Fingerprint:
    usual: dict[str, Any] = {
        "model": "m", "build": "b", "dtype": "float32", "block_size": BLOCK, "layers": LAYERS,
        "kv_heads": 4, "head_size": 32, "piece_bytes": PIECE, "layout": HEADS,
    }  # fmt: skip
    return Fingerprint(**{**usual, **changes})


class Daemon:
    """`start` again after `kill`: the same addresses, a new life."""

    def __init__(self, directory: Path, **options: Any) -> None:
        self.socket = str(directory / "state.sock")
        self.config = directory / "state.json"
        self.boot = ""
        self.process: subprocess.Popen[bytes] | None = None
        self._log = directory / "state.log"
        self.options = {
            "host": "h1", "socket": self.socket, "budget_bytes": 8 << 20, "reserve_bytes": 0,
            "allow_unlocked": True, **options,
        }  # fmt: skip

    def start(self) -> Daemon:
        self.config.write_text(json.dumps(self.options))
        with open(self._log, "ab") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "relume.engine_shim.checkpoints.daemon",
                    "--config",
                    str(self.config),
                ],
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=log,
            )
        assert self.process.stdout is not None
        poll = select.poll()  # select() knows no descriptor above 1023
        poll.register(self.process.stdout, select.POLLIN)
        assert poll.poll(START_S * 1000), "the daemon is slow"
        line = self.process.stdout.readline()
        assert line, self._log.read_text()
        self.boot = json.loads(line)["boot"]
        return self

    def kill(self) -> None:
        assert self.process is not None
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(30)

    def stop(self) -> int:
        assert self.process is not None
        with contextlib.suppress(ProcessLookupError):
            self.process.terminate()
        return self.process.wait(30)

    def resident_bytes(self) -> int:
        assert self.process is not None
        text = Path(f"/proc/{self.process.pid}/smaps_rollup").read_text()
        return int(text.split("Rss:")[1].split()[0]) * 1024


@contextlib.contextmanager
def daemon_in(directory: Path, **options: Any) -> Iterator[Daemon]:
    directory.mkdir(exist_ok=True)
    daemon = Daemon(directory, **options)
    try:
        yield daemon.start()
    finally:
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.stop()
            assert daemon.process.poll() is not None


def hello(role: str = "writer", **changes: Any) -> m.Hello:
    usual: dict[str, Any] = {
        "version": m.VERSION, "worker": "w0", "epoch": 1, "incarnation": 1, "role": role,
        "nonce": b"", "fingerprint": fingerprint(),
    }  # fmt: skip
    return m.Hello(**{**usual, **changes})


def local(path: str) -> Callable[[Wake], Channel]:
    return lambda wake: LocalChannel(path, wake)


def remote(port: int, keys: CurveKeys | None = None) -> Callable[[Wake], Channel]:
    return lambda wake: ZmqChannel(f"tcp://127.0.0.1:{port}", wake, keys)


@contextlib.contextmanager
def peer_of(
    connect: Callable[[Wake], Channel], role: str = "writer", **options: Any
) -> Iterator[Peer]:
    greeting = options.pop("hello", None) or hello(role)
    peer = Peer("test", connect, greeting, **options)
    try:
        yield peer
    finally:
        peer.close()


def stats(daemon: Daemon) -> dict[str, int]:
    with peer_of(local(daemon.socket), hello=hello("control")) as control:
        answer, _ = control.ask(m.StatsAsk(0), 5.0)
        assert answer.boot == daemon.boot
        return answer.figures


class Cache:
    """A paged KV cache of plain memory: `[layer][block]`."""

    def __init__(
        self, blocks: int, seed: int = 0, layers: int = LAYERS, piece: int = PIECE
    ) -> None:
        import random

        chance = random.Random(seed)
        self.layers = [bytearray(chance.randbytes(blocks * piece)) for _ in range(layers)]
        self.piece = piece

    def pieces(self, block_id: int) -> list[memoryview]:
        at = block_id * self.piece
        return [memoryview(layer)[at : at + self.piece] for layer in self.layers]

    def block(self, block_id: int) -> bytes:
        return b"".join(self.pieces(block_id))


def tokens_of(index: int) -> tuple[int, ...]:
    return tuple(range(index * BLOCK, (index + 1) * BLOCK))


def pid_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True
