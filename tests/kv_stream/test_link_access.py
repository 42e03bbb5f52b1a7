"""Which peers a state daemon accepts, and which messages it refuses."""

from __future__ import annotations

import socket
from pathlib import Path

import msgspec
import pytest
import zmq

from relume.engine_shim.checkpoints.link.block_stream import gather, scatter
from relume.engine_shim.checkpoints.link.channel import Wake
from relume.engine_shim.checkpoints.link.zmq_channel import CurveKeys
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.kv_errors import Refusal, Unreachable
from tests.engine.fleet import free_port
from tests.kv_stream.transports import SECRET, gone, ins, outs, served
from tests.state_daemon.daemon import (
    Cache,
    Daemon,
    fingerprint,
    hello,
    local,
    peer_of,
    remote,
    stats,
)


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
            assert isinstance(answer, m.RefusalAnswer), answer
        channel.send(m.encode(hello(nonce=b"n" * 32)), ())
        received = channel.receive(5.0)
        assert received is not None and isinstance(m.decode(received[0]), m.Challenge)
        channel.send(m.encode(m.Proof(b"\0" * 32)), ())
        received = channel.receive(5.0)
        assert received is not None
        assert m.decode(received[0]) == m.RefusalAnswer(0, "authentication", "the proof is wrong")
        channel.close()


def test_a_key_that_is_not_listed_cannot_connect(tmp_path: Path) -> None:
    with served(tmp_path, "curve") as (_, fleet):
        stranger = CurveKeys(*zmq.curve_keypair(), fleet.server[0])
        with peer_of(remote(fleet.curve_port, stranger)) as peer, pytest.raises(Unreachable):
            peer.ask(m.Ask(0, ("a",)), 0.3)


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
            assert isinstance(answer, m.RefusalAnswer) and answer.code == "malformed"
        assert stats(daemon)["memory_used"] == 0
