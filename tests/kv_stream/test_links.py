"""Blocks out and in again, over each transport, against a real daemon."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import msgspec
import pytest
import zmq

from relume.engine_shim.checkpoints.daemon_links import BLOCKS, BOUND_BYTES, LinkConfig, Links
from relume.engine_shim.checkpoints.link import reshape
from relume.engine_shim.checkpoints.link.block_stream import (
    BlockIn,
    BlockOut,
    CacheView,
    Target,
    gather,
    scatter,
    stream_in,
    stream_out,
)
from relume.engine_shim.checkpoints.link.channel import Channel, Wake
from relume.engine_shim.checkpoints.link.peer import Peer
from relume.engine_shim.checkpoints.link.zmq_channel import CurveKeys
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.fingerprint import Fingerprint
from relume.events.wire.kv.kv_errors import Refusal, Unreachable
from tests.engine.fleet import free_port
from tests.signals import stop
from tests.state_daemon.daemon import (
    Cache,
    Daemon,
    daemon_in,
    fingerprint,
    hello,
    local,
    peer_of,
    remote,
    stats,
    tokens_of,
)
from tests.state_daemon.pieces import PiecedBlock, scatter_in_pieces

SECRET = b"a secret of the fleet"
LINKS = ("local", "plain", "curve")
Send = Callable[[CacheView, Sequence[BlockOut], Peer], int]


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


@pytest.mark.parametrize("link", LINKS)
@pytest.mark.parametrize("send", (scatter, scatter_in_pieces))
def test_blocks_come_back_as_they_went(tmp_path: Path, link: str, send: Send) -> None:
    acks: list[m.Ack] = []
    source, target = Cache(20, seed=1), Cache(40, seed=2)
    with (
        served(tmp_path, link) as (daemon, fleet),
        peer_of(fleet.connect(link, daemon), secret=SECRET, on_ack=acks.append) as writer,
    ):
        assert send(source, outs(20), writer) == 20
        assert writer.drained(10)
        assert acks[-1].positions == (
            m.Position(request="a", child=0, rank=0, attempt=1, blocks=20),
        )
        with peer_of(fleet.connect(link, daemon), "reader", secret=SECRET) as reader:
            held, _ = reader.ask(m.Ask(0, ("a", "nobody")), 5.0)
            assert held == m.Held(
                held.seq,
                (m.Position(request="a", child=0, rank=0, attempt=1, blocks=20),),
                ("same",),
            )
            loaded = gather(target, ins(20, 10), reader, "a", 0, 0, 5.0)
        assert (loaded.blocks, loaded.failure) == (20, "")
        assert [target.block(i + 10) for i in range(20)] == [source.block(i) for i in range(20)]
        assert target.block(5) == Cache(40, seed=2).block(5), "others are untouched"
        writer.drop("a", 1)
        wait(lambda: stats(daemon)["memory_used"] == 0)


def wait(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize("link", LINKS)
def test_blocks_that_lie_apart_come_back_too(tmp_path: Path, link: str) -> None:
    """Of two requests written in turns no two blocks lie together; of a third all do."""
    source, target = Cache(20, seed=1), Cache(20, seed=2)
    runs = {"a": (0, 6), "b": (6, 12), "c": (12, 20)}
    with (
        served(tmp_path, link) as (daemon, fleet),
        peer_of(fleet.connect(link, daemon), secret=SECRET) as peer,
    ):
        for index in range(6):
            for name in ("a", "b"):
                at = runs[name][0] + index
                scatter(
                    source,
                    [
                        BlockOut(
                            request=name,
                            child=0,
                            rank=0,
                            index=index,
                            attempt=1,
                            block_id=at,
                            tokens=tokens_of(at),
                        )
                    ],
                    peer,
                )
                assert peer.drained(10)
        together = [
            BlockOut(
                request="c",
                child=0,
                rank=0,
                index=n,
                attempt=1,
                block_id=12 + n,
                tokens=tokens_of(12 + n),
            )
            for n in range(8)
        ]
        assert scatter(source, together, peer) == 8 and peer.drained(10)
        for name, (low, high) in runs.items():
            wanted = [BlockIn(at - low, at, tokens_of(at)) for at in range(low, high)]
            assert gather(target, wanted, peer, name, 0, 0, 5.0).blocks == high - low
        assert target.layers == source.layers
        for name in runs:
            peer.drop(name, 1)
        wait(lambda: stats(daemon)["memory_used"] == 0)


@pytest.mark.parametrize("link", LINKS)
def test_a_layer_at_a_time(tmp_path: Path, link: str) -> None:
    source, target = Cache(4, seed=1), Cache(4, seed=2)
    with (
        served(tmp_path, link) as (daemon, fleet),
        peer_of(fleet.connect(link, daemon), secret=SECRET) as peer,
    ):
        for block in outs(4):
            pieced = PiecedBlock(block, source)
            assert all(pieced.send(peer, part) for part in pieced.parts)
        assert peer.drained(10)
        assert gather(target, ins(4), peer, "a", 0, 0, 5.0).blocks == 4
        assert target.layers == source.layers


@pytest.mark.parametrize("link", ("local", "plain"))
def test_a_block_of_other_tokens_is_not_taken(tmp_path: Path, link: str) -> None:
    source, target = Cache(4, seed=1), Cache(4, seed=2)
    with (
        served(tmp_path, link) as (daemon, fleet),
        peer_of(fleet.connect(link, daemon), secret=SECRET) as peer,
    ):
        scatter(source, outs(4), peer)
        assert peer.drained(10)
        wanted = ins(4)
        wanted[2] = BlockIn(2, 2, (9, 9, 9, 9))
        loaded = gather(target, wanted, peer, "a", 0, 0, 5.0)
        assert loaded.blocks == 2 and "corrupt" in loaded.failure
        assert target.block(2) == Cache(4, seed=2).block(2)


def test_a_converted_copy_serves_another_tensor_size(tmp_path: Path) -> None:
    """TP 2 writes, the holder keeps it as TP 4 will want it; and TP 1 merges on reading."""
    one, two, four = (reshape.Setup(layers=3, kv_heads=4, head_bytes=1024, tp=n) for n in (1, 2, 4))
    model = Cache(3, seed=5, piece=4096)

    def ranks(setup: reshape.Setup) -> dict[int, Cache]:
        parts = [reshape.convert(one, setup, {0: memoryview(model.block(i))}) for i in range(3)]
        caches = {r: Cache(3, seed=9, piece=4096 // setup.tp) for r in range(setup.ranks)}
        for rank, cache in caches.items():
            for i, part in enumerate(parts):
                for at, piece in enumerate(cache.pieces(i)):
                    piece[:] = part[rank][at * len(piece) : (at + 1) * len(piece)]
        return caches

    with (
        served(tmp_path, "local") as (daemon, _),
        peer_of(local(daemon.socket)) as peer,
    ):
        sent = stream_out(dict(ranks(two)), outs(3), two, [Target(peer, four)])
        assert sent == [3] and peer.drained(10)
        wide = {r: Cache(3, seed=7, piece=1024) for r in range(4)}
        assert stream_in(dict(wide), ins(3), peer, "a", 0).blocks == 3
        assert {r: c.layers for r, c in wide.items()} == {
            r: c.layers for r, c in ranks(four).items()
        }
        single = Cache(3, seed=8)
        loaded = stream_in({0: single}, ins(3), peer, "a", 0, source=four, destination=one)
        assert loaded.blocks == 3
        assert single.layers == model.layers


# --- who may speak -----------------------------------------------------------------------


def gone(peer: Peer) -> str:
    wait(lambda: bool(peer.gone))
    return peer.gone


def test_a_wrong_secret_is_turned_away_by_both_sides(tmp_path: Path) -> None:
    with served(tmp_path, "plain") as (daemon, fleet):
        connect = fleet.connect("plain", daemon)
        with peer_of(connect, secret=b"another secret, long") as peer:
            assert "does not know the secret" in gone(peer)
        with peer_of(connect) as peer:
            assert "no secret" in gone(peer)


def test_messages_before_the_proof_do_nothing(tmp_path: Path) -> None:
    with served(tmp_path, "plain") as (daemon, fleet):
        channel = fleet.connect("plain", daemon)(Wake())
        for message in (
            m.Ask(7, ("a",)),
            m.Proof(b"x" * 32),
            m.Get(seq=8, request="a", child=0, rank=0, first=0, count=1),
        ):
            channel.send(m.encode(message), ())
            received = channel.receive(5.0)
            assert received is not None
            answer = m.decode(received[0])
            assert isinstance(answer, m.Refused), answer
        channel.send(m.encode(hello(nonce=b"n" * 32)), ())
        received = channel.receive(5.0)
        assert received is not None and isinstance(m.decode(received[0]), m.Challenge)
        channel.send(m.encode(m.Proof(b"\0" * 32)), ())
        received = channel.receive(5.0)
        assert received is not None
        assert m.decode(received[0]) == m.Refused(0, "authentication", "the proof is wrong")
        channel.close()


def test_a_key_that_is_not_listed_cannot_connect(tmp_path: Path) -> None:
    with served(tmp_path, "curve") as (_, fleet):
        stranger = CurveKeys(*zmq.curve_keypair(), fleet.server[0])
        with peer_of(remote(fleet.curve_port, stranger)) as peer, pytest.raises(Unreachable):
            peer.ask(m.Ask(0, ("a",)), 1.5)


def test_plaintext_outside_declared_networks_does_not_start(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET)
    secret.chmod(0o600)
    options = {"remote": {"host": "0.0.0.0", "port": free_port()}, "secret_file": str(secret)}
    with pytest.raises(AssertionError, match="no declared private network"):
        Daemon(tmp_path, **options).start()
    secret.chmod(0o644)
    with pytest.raises(AssertionError, match="can be read by others"):
        Daemon(tmp_path, **options).start()


def test_an_older_life_of_a_worker_is_fenced(tmp_path: Path) -> None:
    with served(tmp_path, "local") as (daemon, _):
        cache = Cache(2)
        with peer_of(local(daemon.socket)) as old:
            scatter(cache, outs(1), old)
            assert old.drained(5)
            with peer_of(local(daemon.socket), hello=hello(incarnation=2)) as new:
                scatter(cache, outs(1, attempt=2), new)
                assert new.drained(5)
                scatter(cache, outs(1, first=1), old)
                assert "fenced" in gone(old)
        with peer_of(local(daemon.socket)) as zombie:
            assert "fenced" in gone(zombie)
        assert stats(daemon)["blocks"] == 1


def test_another_fingerprint_reads_nothing(tmp_path: Path) -> None:
    with served(tmp_path, "local") as (daemon, _), peer_of(local(daemon.socket)) as writer:
        scatter(Cache(2), outs(2), writer)
        assert writer.drained(5)
        for other, fit in (
            (fingerprint(build="other"), ""),
            (fingerprint(tp=2, piece_bytes=2048), "convert"),
        ):
            with peer_of(local(daemon.socket), hello=hello("reader", fingerprint=other)) as peer:
                held, _ = peer.ask(m.Ask(0, ("a",)), 5.0)
                assert held.usable == (fit,)
                if not fit:
                    with pytest.raises(Refusal, match="fingerprint"):
                        gather(Cache(2), ins(2), peer, "a", 0, 0, 5.0)


# --- broken, slow and hostile ends -----------------------------------------------------


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


def test_a_block_larger_than_the_bound_goes_alone(tmp_path: Path) -> None:
    with served(tmp_path, "local") as (daemon, _):
        with peer_of(local(daemon.socket), bound_bytes=1) as peer:
            for i in range(3):
                assert scatter(Cache(3), outs(1, first=i), peer) == 1
                assert peer.drained(5)
        assert stats(daemon)["blocks"] == 3


def test_the_bound_of_a_link_grows_with_its_blocks() -> None:
    large = Fingerprint(
        model="m",
        build="b",
        dtype="bf16",
        block_size=16,
        layers=64,
        kv_heads=8,
        head_size=128,
        piece_bytes=65536,
    )
    links = Links(LinkConfig(), "w0", 1, "writer", large)
    assert large.image_bytes == 64 + (4 << 20)
    assert links.bound_bytes == BLOCKS * large.image_bytes
    assert Links(LinkConfig(bound_bytes=9), "w0", 1, "writer", large).bound_bytes == 9
    assert Links(LinkConfig(), "w0", 1, "reader", None).bound_bytes == BOUND_BYTES


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


def test_a_daemon_of_an_older_epoch_is_refused(tmp_path: Path) -> None:
    with served(tmp_path, "local", epoch=5) as (daemon, _):
        with peer_of(local(daemon.socket)) as peer:
            scatter(Cache(1), outs(1), peer)
            assert peer.drained(5) and peer.daemon_epoch == 5
            daemon.kill()
            daemon.options["epoch"] = 4
            daemon.start()
            assert "older" in gone(peer)


def test_nonsense_is_refused_and_harms_no_other_peer(tmp_path: Path) -> None:
    with served(tmp_path, "plain") as (daemon, fleet), peer_of(local(daemon.socket)) as peer:
        scatter(Cache(1), outs(1), peer)
        assert peer.drained(5)
        context = zmq.Context.instance()
        for frames in (
            [b""], [b"\xc1" * 100], [b"x" * (m.MAX_HEADER_BYTES + 1)], [b"a", b"b", b"c", b"d"],
            [msgspec.msgpack.encode(["put", 1, [["a", 0, 0, 0, 1, 0, 1 << 40, 1 << 41]]]), b"z"],
        ):  # fmt: skip
            socket_ = context.socket(zmq.DEALER)
            socket_.linger = 0
            socket_.connect(f"tcp://127.0.0.1:{fleet.plain_port}")
            socket_.send_multipart(frames)
            socket_.poll(100)
            socket_.close()
        raw = socket.socket(socket.AF_UNIX)
        raw.connect(daemon.socket)
        raw.sendall(b"not what was expected at all, and no descriptor")
        raw.close()
        assert scatter(Cache(2), outs(1, first=1), peer) == 1
        assert peer.drained(5)
        assert stats(daemon)["blocks"] == 2


def test_a_put_of_more_than_its_chunk_is_refused(tmp_path: Path) -> None:
    with served(tmp_path, "local") as (daemon, _):
        channel = local(daemon.socket)(Wake())
        channel.send(m.encode(hello()), ())
        assert channel.receive(5.0)
        for pieces in (
            [
                m.Piece(
                    request="a",
                    child=0,
                    rank=0,
                    index=0,
                    attempt=1,
                    offset=0,
                    length=8,
                    total=8,
                    digest=b"d" * 16,
                ),
                m.Piece(
                    request="a", child=0, rank=0, index=1, attempt=1, offset=0, length=8, total=8
                ),
            ],
            [m.Piece(request="", child=0, rank=0, index=0, attempt=1, offset=0, length=8, total=8)],
            [
                m.Piece(
                    request="a", child=-1, rank=0, index=0, attempt=1, offset=0, length=8, total=8
                )
            ],
            [
                m.Piece(
                    request="a", child=0, rank=0, index=0, attempt=1, offset=4, length=8, total=8
                )
            ],
        ):
            channel = local(daemon.socket)(Wake())
            channel.send(m.encode(hello()), ())
            assert channel.receive(5.0)
            channel.send(m.encode(m.Put(1, tuple(pieces))), [b"8 bytes."])
            received = channel.receive(5.0)
            assert received is not None
            answer = m.decode(received[0])
            assert isinstance(answer, m.Refused) and answer.code == "malformed"
        assert stats(daemon)["memory_used"] == 0


def test_small_staging_holds_batches_back_and_overwrites_nothing(tmp_path: Path) -> None:
    from relume.engine_shim.checkpoints.link.channel import LocalChannel

    count = 120
    source, target = Cache(count, seed=6), Cache(count, seed=7)
    refused: list[str] = []
    with served(tmp_path, "local") as (daemon, _):

        def connect(wake: Wake) -> Channel:
            return LocalChannel(daemon.socket, wake, staging_bytes=64 << 10)

        with peer_of(connect, on_refused=lambda piece, code: refused.append(code)) as peer:
            for block in outs(count):
                assert scatter(source, [block], peer) == 1
            assert peer.drained(20) and not refused
            assert gather(target, ins(count), peer, "a", 0, 0, 5.0).blocks == count
    assert target.layers == source.layers
