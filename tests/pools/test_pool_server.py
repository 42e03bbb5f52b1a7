"""Pools of a real state daemon, over its socket."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from relume.engine_shim.pools.pool_client import PoolClient, PoolsAway
from relume.engine_shim.pools.pool_messages import Busy, Filling, Opened
from tests.engine.fleet import wait_until
from tests.state_daemon.daemon import Daemon, daemon_in

SIZE = 1 << 20
DIGEST = bytes(range(32))


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "pools.sock")


@pytest.fixture
def daemon(tmp_path: Path, path: str) -> Iterator[Daemon]:
    with daemon_in(tmp_path, pools_socket=path, pools_bytes=2 * SIZE) as made:
        yield made


def fill(client: PoolClient, name: str = "a") -> None:
    answer, fd = client.open(name, SIZE)
    assert isinstance(answer, Filling)
    os.pwrite(fd, b"weights", 0)
    os.close(fd)
    client.seal(name, DIGEST)


def test_memory_outlives_the_engine_that_filled_it(daemon: Daemon, path: str) -> None:
    first = PoolClient(path)
    fill(first)
    first.close()
    answer, fd = PoolClient(path).open("a", SIZE)
    assert answer == Opened(DIGEST) and os.pread(fd, 7, 0) == b"weights"
    os.close(fd)


def test_an_engine_that_dies_while_it_fills_leaves_the_pool_to_another(
    daemon: Daemon, path: str
) -> None:
    dying, other = PoolClient(path), PoolClient(path)
    _, fd = dying.open("a", SIZE)
    os.close(fd)
    assert other.open("a", SIZE) == (Busy(), -1)
    dying.close()
    answers = iter(lambda: other.open("a", SIZE), None)
    answer, fd = wait_until(lambda: (a := next(answers))[1] >= 0 and a, "it is free again")
    assert isinstance(answer, Filling)
    os.close(fd)


def test_one_that_is_damaged_is_filled_anew(daemon: Daemon, path: str) -> None:
    first, other = PoolClient(path), PoolClient(path)
    fill(first)
    other.drop("a")
    fill(other)


def test_what_is_refused_is_said_with_its_remedy(daemon: Daemon, path: str) -> None:
    with pytest.raises(PoolsAway, match="raise --keep-weights-mb"):
        PoolClient(path).open("a", 3 * SIZE)


@pytest.mark.parametrize("packet", [b"x", b"\x80", b"\xc1" * 4096, b"\x81\xa4type\xa4seal"])
def test_nonsense_ends_its_own_connection_alone(daemon: Daemon, path: str, packet: bytes) -> None:
    client = PoolClient(path)
    fill(client)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as raw:
        raw.settimeout(20)
        raw.connect(path)
        raw.send(packet)
        assert raw.recv(100) == b""
    _, fd = client.open("a", SIZE)
    assert fd >= 0
    os.close(fd)


def test_without_a_daemon_it_is_away(path: str) -> None:
    with pytest.raises(PoolsAway, match=r"pools\.sock"):
        PoolClient(path)


def test_a_daemon_that_stops_answering_is_away_in_time(daemon: Daemon, path: str) -> None:
    client = PoolClient(path, timeout_s=0.2)
    assert daemon.process is not None
    daemon.process.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(PoolsAway, match="timed out"):
            client.open("a", SIZE)
    finally:
        daemon.process.send_signal(signal.SIGCONT)
