"""What a network, a disk or a daemon of another time may do to a stream of blocks: it arrives
whole, or the part that did is known."""

from __future__ import annotations

import contextlib
import resource
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from relume.engine_shim.checkpoints.block_plan import CheckpointPlan
from relume.engine_shim.checkpoints.checkpoint_spec import Key
from relume.engine_shim.checkpoints.daemon_links import LinkConfig, Links
from relume.engine_shim.checkpoints.link.block_stream import (
    BlockIn,
    BlockOut,
    LoadResult,
    gather,
    scatter,
)
from relume.engine_shim.checkpoints.link.channel import Channel, Wake
from relume.engine_shim.checkpoints.link.zmq_channel import CurveKeys, ZmqChannel
from relume.engine_shim.checkpoints.lookup import Lookup, LookupResult
from relume.engine_shim.generation import IDENTITY_KEY
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.kv_errors import Unreachable
from tests.kv_stream.transports import SECRET, ins, outs, served, wait
from tests.signals import stop
from tests.state_daemon.daemon import (
    Cache,
    daemon_in,
    fingerprint,
    local,
    peer_of,
    remote,
    stats,
    tokens_of,
)
from tests.state_daemon.faulty import Shuffler, TcpProxy
from tests.state_daemon.pieces import scatter_in_pieces

IMAGE = 16384
"""Of a block in a daemon's memory, in whole pages."""


def test_repeated_and_reordered_messages_change_nothing(tmp_path: Path) -> None:
    count, half = 480, 240
    source, target = Cache(count, seed=3), Cache(count, seed=4)
    with served(tmp_path, "plain") as (daemon, fleet), Shuffler(fleet.plain_port) as shuffler:
        with peer_of(remote(shuffler.port), secret=SECRET) as peer:
            wait(lambda: bool(peer.boot))
            assert scatter_in_pieces(source, outs(half), peer) == half
            assert scatter(source, outs(count - half, first=half), peer) == count - half
            assert peer.drained(20)
            assert gather(target, ins(count), peer, "a", 0, 0, 5.0).blocks == count
        assert shuffler.repeated and shuffler.swapped, "the fault was really there"
        assert target.layers == source.layers
        figures = stats(daemon)
        assert (figures["blocks"], figures["assemblies"]) == (count, 0)
        assert figures["memory_used"] == count * IMAGE, "nothing is kept twice"


def test_an_encrypted_stream_that_is_slow_and_cut_arrives_whole(tmp_path: Path) -> None:
    count = 60
    source, target = Cache(count, seed=3), Cache(count, seed=4)
    with served(tmp_path, "curve") as (daemon, fleet), TcpProxy(fleet.curve_port) as proxy:
        keys = CurveKeys(*fleet.client, fleet.server[0])
        with peer_of(remote(proxy.port, keys)) as peer:
            wait(lambda: bool(peer.boot))
            proxy.delay_s = 0.002
            for step in range(count):
                while scatter(source, outs(1, first=step), peer) == 0:
                    time.sleep(0.01)
                if step in (20, 40):
                    wait(lambda: peer.pending_bytes > 0)
                    proxy.cut()
            assert peer.drained(30)
            proxy.delay_s = 0.0
            assert gather(target, ins(count), peer, "a", 0, 0, 5.0).blocks == count
        assert target.layers == source.layers
        assert stats(daemon)["blocks"] == count


class _SmallReads(ZmqChannel):
    read_bytes = 64 << 10


def test_what_came_before_a_holder_died_is_kept(tmp_path: Path) -> None:
    """And a reader is told at once, not at the end of its time."""
    count = 60
    source, target = Cache(count, seed=3), Cache(count, seed=4)
    with served(tmp_path, "plain") as (daemon, fleet), TcpProxy(fleet.plain_port) as proxy:
        with peer_of(local(daemon.socket)) as writer:
            assert scatter(source, outs(count), writer) == count and writer.drained(5)

        def connect(wake: Wake) -> Channel:
            return _SmallReads(f"tcp://127.0.0.1:{proxy.port}", wake)

        with peer_of(connect, "reader", secret=SECRET, patient=False) as peer:
            wait(lambda: bool(peer.boot))
            proxy.hold_after = 400_000
            loaded: list[LoadResult] = []
            reading = Thread(
                target=lambda: loaded.append(
                    gather(target, ins(count), peer, "a", 0, 0, timeout_s=600.0)
                )
            )
            reading.start()
            wait(proxy.held.is_set)
            daemon.kill()
            proxy.cut()
            reading.join(60)
            assert not reading.is_alive(), "a dead holder is not waited for"
            (found,) = loaded
            assert found.failure == "unreachable" and 0 < found.blocks < count
            for index in range(found.blocks):
                assert target.block(index) == source.block(index)


def lookup(sources: tuple[str, ...], timeout_s: float) -> Any:
    links = Links(LinkConfig(), "w1", 1, "reader", fingerprint())
    with ThreadPoolExecutor(1) as pool:
        asked = Lookup(pool, links, Key("a", 1, 0), sources, 1, timeout_s)
        assert asked.done.wait(60)
    links.close()
    return asked


@pytest.mark.full
def test_a_silent_or_dead_holder_does_not_hide_what_another_has(tmp_path: Path) -> None:
    """All are asked at once; the first named of those that hold as much is used."""
    cache = Cache(8)
    with (
        daemon_in(tmp_path / "silent") as silent,
        daemon_in(tmp_path / "dead") as dead,
        daemon_in(tmp_path / "less") as less,
        daemon_in(tmp_path / "most") as most,
    ):
        for daemon, count in ((silent, 8), (dead, 8), (less, 3), (most, 5)):
            with peer_of(local(daemon.socket)) as writer:
                assert scatter(cache, outs(count), writer) == count and writer.drained(5)
        dead.kill()
        assert silent.process is not None
        stop(silent.process.pid)
        try:
            named = tuple(f"unix:{d.socket}" for d in (silent, dead, less, most))
            began = time.monotonic()
            asked = lookup(named, 30.0)
            assert asked.found == LookupResult(named[3], 5)
            assert time.monotonic() - began < 25, "the silent one's time limit is not waited for"
            asked = lookup((named[3].replace("most", "./most"), named[3]), 5.0)
            assert asked.found == LookupResult(named[3].replace("most", "./most"), 5)
        finally:
            silent.kill()


class Prompt:
    """A request as vLLM's scheduler has it, as far as checkpoints read it."""

    lora_request = mm_features = prompt_embeds = cache_salt = None
    num_tokens = 64

    def __init__(self, *holders: str) -> None:
        mark = {"r": "a", "a": 2, "from": holders}
        self.request_id = "engine's"
        self.sampling_params = SimpleNamespace(extra_args={IDENTITY_KEY: mark})


@pytest.mark.parametrize("fault", ["", "stopped", "dead"])
def test_a_holder_that_does_not_answer_a_lookup_is_reported_once(
    tmp_path: Path, fault: str
) -> None:
    with daemon_in(tmp_path / "one") as one, daemon_in(tmp_path / "other") as other:
        assert one.process is not None
        if fault == "stopped":
            stop(one.process.pid)
        elif fault:
            one.kill()
        links = Links(LinkConfig(), "w1", 1, "reader", fingerprint())
        found: list[tuple[Key, str, str]] = []
        plan = CheckpointPlan(
            links, 16, 1, lookup_timeout_s=1.0, unrestored=lambda *one: found.append(one)
        )
        holders = [f"unix:{daemon.socket}" for daemon in (other, one)]
        plan.arrived(Prompt(*holders))
        wait(lambda: plan.match("engine's", 0) is not None)
        assert [plan.match("engine's", 0) for _ in range(2)] == [0, 0]
        assert found == ([(Key("a", 2, 0), holders[1], "unreachable")] if fault else [])
        assert plan.take_loads() == []
        links.close()
        one.kill()


def test_a_reader_learns_at_once_that_a_holder_is_dead_and_when_it_is_back(
    tmp_path: Path,
) -> None:
    """However long it has been dead: no pause between attempts is waited for."""
    with served(tmp_path, "plain") as (daemon, fleet):
        connect = fleet.connect("plain", daemon)
        with peer_of(connect, "reader", secret=SECRET, patient=False) as peer:
            assert peer.ask(m.Ask(0, ("a",)), 5.0)
            daemon.kill()
            began = time.monotonic()
            for _ in range(20):
                with pytest.raises(Unreachable):
                    peer.ask(m.Ask(0, ("a",)), 600.0)
            assert time.monotonic() - began < 15
            daemon.start()
            assert peer.ask(m.Ask(0, ("a",)), 5.0)
            assert peer.boot == daemon.boot


@pytest.mark.full
def test_a_daemon_of_an_older_epoch_stays_refused_and_its_blocks_are_offered_again(
    tmp_path: Path,
) -> None:
    resets: list[str] = []
    with daemon_in(tmp_path, epoch=5) as daemon:
        endpoint = f"unix:{daemon.socket}"
        links = Links(LinkConfig(), "w0", 1, "writer", fingerprint(), on_reset=resets.append)
        peer = links.peer(endpoint)
        assert scatter(Cache(1), outs(1), peer) == 1 and peer.drained(5)
        daemon.kill()
        daemon.options["epoch"] = 4
        assert scatter(Cache(2), outs(1, first=1), peer) == 1
        daemon.start()
        wait(lambda: "older" in peer.gone)
        assert resets == [endpoint], "it was sent to nobody"
        with pytest.raises(Unreachable, match="older"):
            links.peer(endpoint)
        again = _other(links, endpoint, peer)
        wait(lambda: "older" in again.gone)
        assert stats(daemon)["taken"] == 0
        daemon.kill()
        daemon.options["epoch"] = 6
        daemon.start()
        newest = _other(links, endpoint, again)
        wait(lambda: len(resets) == 2, 20)
        assert scatter(Cache(2), outs(2), newest) == 2 and newest.drained(5)
        assert stats(daemon)["blocks"] == 2
        links.close()


def _other(links: Links, endpoint: str, than: Any) -> Any:
    """The next peer; it may be gone again by now."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        with contextlib.suppress(Unreachable):
            if (peer := links.peer(endpoint)) is not than:
                return peer
        time.sleep(0.01)
    raise AssertionError("it is not made anew")


def test_a_full_disk_costs_no_block(tmp_path: Path) -> None:
    """The file tier's file may not grow: what is in memory stays there, and new blocks are
    refused; what lies in the file comes back whole."""
    limit, cold = 4, tmp_path / "cold"
    cold.mkdir()
    options = {
        "budget_bytes": 8 * IMAGE, "file_directory": str(cold), "file_budget_bytes": 64 * IMAGE,
        "cold_after_s": 0.0,
    }  # fmt: skip
    refused: list[str] = []
    source, target = Cache(24, seed=3), Cache(24, seed=4)

    def note(piece: m.Piece, code: str) -> None:
        refused.append(code)

    with daemon_in(tmp_path / "daemon", **options) as daemon:
        assert daemon.process is not None
        full = limit * IMAGE
        resource.prlimit(daemon.process.pid, resource.RLIMIT_FSIZE, (full, full))
        with peer_of(local(daemon.socket), on_refused=note) as peer:
            for request in ("a", "b", "c"):
                blocks = [
                    BlockOut(
                        request=request,
                        child=0,
                        rank=0,
                        index=i,
                        attempt=1,
                        block_id=i,
                        tokens=tokens_of(i),
                    )
                    for i in range(8)
                ]
                for block in blocks:
                    assert scatter(source, [block], peer) == 1
                    assert peer.drained(5)
                source = Cache(24, seed=3 + len(request))
            figures = stats(daemon)
            assert set(refused) == {"budget"}
            assert figures["memory_used"] <= figures["memory_budget"]
            assert figures["file_used"] == full < figures["file_budget"]
            assert figures["blocks"] == 8 + limit
            wanted = [BlockIn(i, i, tokens_of(i)) for i in range(8)]
            held = {}
            for request in ("a", "b", "c"):
                answer, _ = peer.ask(m.Ask(0, (request,)), 5.0)
                held[request] = answer.positions[0].blocks if answer.positions else 0
            assert sum(held.values()) == 8 + limit, "what is held has no gaps"
            assert gather(target, wanted[: held["a"]], peer, "a", 0, 0, 5.0).blocks == held["a"]
