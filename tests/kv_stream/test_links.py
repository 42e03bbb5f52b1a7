"""Blocks out and in again, over each transport, against a real daemon."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from relume.engine_shim.checkpoints.daemon_links import BLOCKS, BOUND_BYTES, LinkConfig, Links
from relume.engine_shim.checkpoints.link.block_stream import (
    BlockIn,
    BlockOut,
    CacheView,
    gather,
    scatter,
)
from relume.engine_shim.checkpoints.link.channel import Channel, Wake
from relume.engine_shim.checkpoints.link.peer import Peer
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.fingerprint import Fingerprint
from tests.kv_stream.transports import LINKS, SECRET, ins, outs, served, wait
from tests.state_daemon.daemon import Cache, local, peer_of, stats, tokens_of
from tests.state_daemon.pieces import PiecedBlock, scatter_in_pieces

Send = Callable[[CacheView, Sequence[BlockOut], Peer], int]


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
