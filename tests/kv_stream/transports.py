"""A state daemon with three transports, and blocks to send to it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import zmq

from relume.engine_shim.checkpoints.link.block_stream import BlockIn, BlockOut
from relume.engine_shim.checkpoints.link.channel import Channel, Wake
from relume.engine_shim.checkpoints.link.peer import Peer
from relume.engine_shim.checkpoints.link.zmq_channel import CurveKeys
from tests.engine.fleet import free_port
from tests.state_daemon.daemon import Daemon, daemon_in, local, remote, tokens_of

SECRET = b"a secret of the fleet"
LINKS = ("local", "plain", "curve")


class Fleet:
    """A daemon with all three transports, and ways to reach it."""

    def __init__(self, directory: Path) -> None:
        self.plain_port = free_port()
        self.curve_port = free_port()
        self.server = zmq.curve_keypair()
        self.client = zmq.curve_keypair()
        secret = directory / "secret"
        secret.write_bytes(SECRET)
        secret.chmod(0o600)
        self.secret_file = str(secret)

    def remote_options(self, link: str) -> dict[str, object]:
        if link == "curve":
            return {
                "host": "127.0.0.1", "port": self.curve_port,
                "curve_public": self.server[0].decode(), "curve_secret": self.server[1].decode(),
                "curve_clients": [self.client[0].decode()],
            }  # fmt: skip
        return {"host": "127.0.0.1", "port": self.plain_port}

    def connect(self, link: str, daemon: Daemon) -> Callable[[Wake], Channel]:
        if link == "local":
            return local(daemon.socket)
        if link == "plain":
            return remote(self.plain_port)
        return remote(self.curve_port, CurveKeys(*self.client, self.server[0]))


@contextlib.contextmanager
def served(directory: Path, link: str, **options: object) -> Iterator[tuple[Daemon, Fleet]]:
    fleet = Fleet(directory)
    more = {"remote": fleet.remote_options(link), "secret_file": fleet.secret_file, **options}
    with daemon_in(directory, **more) as daemon:
        yield daemon, fleet


def outs(count: int, request: str = "a", attempt: int = 1, first: int = 0) -> list[BlockOut]:
    return [
        BlockOut(
            request=request,
            child=0,
            rank=0,
            index=i,
            attempt=attempt,
            block_id=i,
            tokens=tokens_of(i),
        )
        for i in range(first, first + count)
    ]


def ins(count: int, shift: int = 0) -> list[BlockIn]:
    """Wanted back into other places: block i goes to i + shift."""
    return [BlockIn(i, i + shift, tokens_of(i)) for i in range(count)]


def wait(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def gone(peer: Peer) -> str:
    wait(lambda: bool(peer.gone))
    return peer.gone
