"""Links that break, damage bytes or stand still, and daemons that stop or restart."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from pathlib import Path

import pytest

from relume.engine_shim.checkpoints.link.block_stream import gather, scatter
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.kv_errors import Unreachable
from tests.engine.fleet import free_port
from tests.kv_stream.transports import SECRET, ins, outs, served, wait
from tests.signals import stop
from tests.state_daemon.daemon import Cache, local, peer_of, remote, stats


class Cut:
    """A TCP proxy that can drop its connections and hold their bytes back."""

    def __init__(self, port: int) -> None:
        self.port = free_port()
        self.cuts = 0
        self._target = port
        self._pairs: list[socket.socket] = []
        self.limit = -1
        self.silent = False
        self.flip = 0
        self.places = (8000,)
        """Which bytes of a chunk are damaged; what lies between two blocks is nobody's."""
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._target))
                self._pairs += [client, server]
                for a, b in ((client, server), (server, client)):
                    threading.Thread(target=self._pump, args=(a, b), daemon=True).start()

    def _pump(self, a: socket.socket, b: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := a.recv(16384):
                if self.limit == 0 and self.silent:
                    continue
                if self.limit == 0:
                    break
                if self.limit > 0:
                    data, self.limit = data[: self.limit], max(0, self.limit - len(data))
                if self.flip and len(data) == 16384:
                    self.flip -= 1
                    damaged = bytearray(data)
                    for place in self.places:
                        damaged[place] ^= 1
                    data = bytes(damaged)
                b.sendall(data)
        self.cut((a, b))

    def cut(self, only: tuple[socket.socket, ...] = ()) -> None:
        self.cuts += not only
        for end in only or self._pairs:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()


def test_a_stream_continues_after_its_connection_broke_in_the_middle(tmp_path: Path) -> None:
    count = 60
    source, target = Cache(count, seed=3), Cache(count, seed=4)
    with served(tmp_path, "plain") as (daemon, fleet):
        proxy = Cut(fleet.plain_port)
        with peer_of(remote(proxy.port), secret=SECRET) as peer:
            for step in range(count):
                if step in (20, 40):
                    proxy.limit = 30_000  # inside a block
                while scatter(source, outs(1, first=step), peer) == 0:
                    time.sleep(0.01)
                if step in (25, 45):
                    proxy.limit = -1
            assert peer.drained(20)
            assert gather(target, ins(count), peer, "a", 0, 0, 5.0).blocks == count
        proxy.close()
        assert target.layers == source.layers
        assert stats(daemon)["blocks"] == count


@pytest.mark.full
def test_what_came_before_a_link_broke_for_good_is_of_use(tmp_path: Path) -> None:
    count = 60
    source, target = Cache(count, seed=3), Cache(count, seed=4)
    with served(tmp_path, "plain") as (_, fleet):
        proxy = Cut(fleet.plain_port)
        with peer_of(remote(proxy.port), secret=SECRET) as peer:
            assert scatter(source, outs(count), peer) == count and peer.drained(10)
            peer.read_bytes = 5 * len(source.block(0))
            proxy.limit, proxy.silent = 30 * len(source.block(0)), True
            loaded = gather(target, ins(count), peer, "a", 0, 0, 1.0)
            assert 5 <= loaded.blocks <= 30 and loaded.failure == "unreachable"
            assert [target.block(i) for i in range(loaded.blocks)] == [
                source.block(i) for i in range(loaded.blocks)
            ]
            with pytest.raises(Unreachable):
                gather(target, ins(count), peer, "a", 0, 0, 0.2)
        proxy.close()


@pytest.mark.full
@pytest.mark.parametrize("inward", (False, True))
def test_a_bit_flipped_on_the_wire_is_found(tmp_path: Path, inward: bool) -> None:
    count = 40
    source, target = Cache(count, seed=3), Cache(count, seed=4)
    refused: list[tuple[int, str]] = []

    def note(piece: m.Piece, code: str) -> None:
        refused.append((piece.index, code))

    with served(tmp_path, "plain") as (daemon, fleet):
        proxy = Cut(fleet.plain_port)
        with peer_of(remote(proxy.port), secret=SECRET, on_refused=note) as peer:
            wait(lambda: bool(peer.boot))
            proxy.flip = int(not inward)
            assert scatter(source, outs(count), peer) == count
            assert peer.drained(10)
            proxy.flip = int(inward)
            proxy.places = (4000, 8100, 12200)  # further apart than the rest of a page
            loaded = gather(target, ins(count), peer, "a", 0, 0, 5.0)
            assert proxy.flip == 0, "the fault was really there"
            assert loaded.blocks < count
            assert [target.block(i) for i in range(loaded.blocks)] == [
                source.block(i) for i in range(loaded.blocks)
            ]
            if not inward:
                assert refused == [(loaded.blocks, "digest")]
                scatter(source, outs(1, first=refused[0][0]), peer)
                assert peer.drained(5)
            assert gather(target, ins(count), peer, "a", 0, 0, 5.0).blocks == count
            assert target.layers == source.layers
        proxy.close()
        assert stats(daemon)["blocks"] == count, "what arrived well is kept"


def test_a_silent_daemon_sheds_and_does_not_hold_up(tmp_path: Path) -> None:
    import os
    import signal

    with served(tmp_path, "local") as (daemon, _):
        with peer_of(local(daemon.socket), bound_bytes=200_000) as peer:
            scatter(Cache(1), outs(1), peer)
            assert peer.drained(5)
            assert daemon.process is not None
            stop(daemon.process.pid)
            began = time.monotonic()
            taken = sum(scatter(Cache(50), outs(1, first=i), peer) for i in range(1, 50))
            assert time.monotonic() - began < 3, "never waits"
            assert taken < 20 and peer.shed > 20 and peer.pending_bytes <= 200_000
            os.kill(daemon.process.pid, signal.SIGCONT)
            assert peer.drained(10)
            assert scatter(Cache(50), outs(1, first=taken + 1), peer) == 1, "and takes again"


@pytest.mark.full
def test_a_restarted_daemon_holds_nothing_and_says_so(tmp_path: Path) -> None:
    resets: list[str] = []
    cache = Cache(6)
    with served(tmp_path, "plain") as (daemon, fleet):
        connect = fleet.connect("plain", daemon)
        with peer_of(connect, secret=SECRET, on_reset=resets.append) as peer:
            scatter(cache, outs(3), peer)
            assert peer.drained(5)
            first = peer.boot
            daemon.kill()
            daemon.start()
            wait(lambda: bool(resets), 15)
            assert peer.boot == daemon.boot != first
            held, _ = peer.ask(m.Ask(0, ("a",)), 5.0)
            assert held.positions == ()
            scatter(cache, outs(6), peer)
            assert peer.drained(10)
            held, _ = peer.ask(m.Ask(0, ("a",)), 5.0)
            assert held.positions[0].blocks == 6
