"""The daemon as a process: its life, its memory, and what it tells its agent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from relume.engine_shim.checkpoints.link.block_stream import BlockIn, BlockOut, gather, scatter
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.kv_errors import Refusal
from tests.state_daemon.daemon import (
    Cache,
    Daemon,
    daemon_in,
    hello,
    local,
    peer_of,
    stats,
    tokens_of,
)

IMAGE = 16 + 3 * 4096
PAGES = 16384


def outs(count: int, request: str) -> list[BlockOut]:
    return [
        BlockOut(
            request=request, child=0, rank=0, index=i, attempt=1, block_id=i, tokens=tokens_of(i)
        )
        for i in range(count)
    ]


def test_it_outlives_its_starter(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path)
    daemon.start()
    assert daemon.process is not None
    daemon.stop()
    starter = (
        "import subprocess,sys;"
        "p=subprocess.Popen([sys.executable,'-m','relume.engine_shim.checkpoints.daemon','--config',"
        f"{str(daemon.config)!r}],stdout=subprocess.PIPE,stderr=subprocess.DEVNULL,start_new_session=True);"
        "print(p.pid, p.stdout.readline().decode())"
    )
    done = subprocess.run([sys.executable, "-c", starter], capture_output=True, timeout=30)
    pid = int(done.stdout.split()[0])
    try:
        with peer_of(local(daemon.socket)) as peer:
            scatter(Cache(1), outs(1, "a"), peer)
            assert peer.drained(5)
    finally:
        os.kill(pid, signal.SIGKILL)


@pytest.mark.full
def test_bytes_are_what_is_accounted_and_go_back(tmp_path: Path) -> None:
    count = 300
    with daemon_in(tmp_path, budget_bytes=count * PAGES) as daemon:
        with peer_of(local(daemon.socket)) as peer:
            before = daemon.resident_bytes()
            cache = Cache(count + 20)
            sent = 0
            while sent < count:
                sent += scatter(cache, outs(count, "a")[sent:], peer)
            assert peer.drained(10)
            grown = daemon.resident_bytes() - before
            figures = stats(daemon)
            assert figures["memory_used"] == figures["memory_budget"] == count * PAGES
            assert figures["memory_resident"] == count * PAGES
            # The rest is the index, a chunk in transit and the mapped staging memory.
            assert count * PAGES <= grown < count * PAGES + (16 << 20)
            refused: list[m.Ack] = []
            peer._on_ack = refused.append
            other = BlockOut(
                request="b",
                child=0,
                rank=0,
                index=0,
                attempt=1,
                block_id=count + 1,
                tokens=tokens_of(count + 1),
            )
            scatter(cache, [other], peer)
            assert peer.drained(5) and refused[0].refused == ((0, "budget"),)
            peer.drop("a", 1)
            control = hello("control")
            with peer_of(local(daemon.socket), hello=control) as agent:
                deadline = time.monotonic() + 30
                while (answer := agent.ask(m.StatsAsk(0), 5.0)[0]).figures["memory_resident"]:
                    assert time.monotonic() < deadline, answer.figures
                    time.sleep(0.02)
                assert answer.figures["memory_used"] == answer.figures["memory_resident"] == 0


def test_a_budget_beyond_the_host_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="can be spared"):
        Daemon(tmp_path, budget_bytes=1 << 50).start()


def test_the_agent_learns_positions_and_ends(tmp_path: Path) -> None:
    with (
        daemon_in(tmp_path) as daemon,
        peer_of(local(daemon.socket)) as peer,
        peer_of(local(daemon.socket), hello=hello("control")) as agent,
    ):
        for request in ("a", "b"):
            scatter(Cache(5), outs(5, request), peer)
        assert peer.drained(5)
        told, _ = agent.ask(m.Changes(0, 0), 5.0)
        assert told.boot == daemon.boot
        assert [(c.request, c.blocks, c.tokens, c.worker) for c in told.changes] == [
            ("a", 5, 20, "w0"), ("b", 5, 20, "w0"),
        ]  # fmt: skip
        again, _ = agent.ask(m.Changes(0, told.cursor), 5.0)
        assert again.changes == ()
        agent.ask(m.Drop(0, ("a",), 1), 5.0)
        ended, _ = agent.ask(m.Changes(0, told.cursor), 5.0)
        assert [(c.request, c.blocks, c.reason) for c in ended.changes] == [("a", 0, "dropped")]
        first, _ = agent.ask(m.Changes(0, 0, limit=1), 5.0)
        assert first.more and len(first.changes) == 1


@pytest.mark.full
def test_a_daemon_without_a_client_ends_when_it_holds_nothing(tmp_path: Path) -> None:
    with daemon_in(tmp_path, abandoned_s=1.0) as daemon:
        with peer_of(local(daemon.socket)) as writer:
            scatter(Cache(1), outs(1, "a"), writer)
            assert writer.drained(5) and daemon.process is not None
            with pytest.raises(subprocess.TimeoutExpired):
                daemon.process.wait(4.0)
            writer.ask(m.Drop(0, ("a",), 1), 5.0)
        assert daemon.process.wait(20) == 0


def test_control_is_for_this_host(tmp_path: Path) -> None:
    with daemon_in(tmp_path) as daemon, peer_of(local(daemon.socket), "reader") as reader:
        for message in (
            m.StatsAsk(0), m.Changes(0, 0), m.Drop(0, ("a",), 1), m.Void(0, (("a", 1),)),
        ):  # fmt: skip
            with pytest.raises(Refusal, match="authentication"):
                reader.ask(message, 5.0)


def test_a_reader_that_dies_lets_go_of_what_it_read(tmp_path: Path) -> None:
    with daemon_in(tmp_path) as daemon, peer_of(local(daemon.socket)) as writer:
        scatter(Cache(4), outs(4, "a"), writer)
        assert writer.drained(5)
        reader_peer = peer_of(local(daemon.socket), "reader")
        reader = reader_peer.__enter__()
        fetching = reader.fetch(m.Get(seq=0, request="a", child=0, rank=0, first=0, count=4), 5.0)
        blocks = fetching.__enter__()
        assert len(blocks) == 4
        writer.ask(m.Drop(0, ("a",), 1), 5.0)
        assert stats(daemon)["memory_used"] == 4 * PAGES, "still being read"
        reader.close()
        for _ in range(200):
            if not stats(daemon)["memory_used"]:
                return
        raise AssertionError("pinned for ever")


def test_a_flipped_bit_in_shared_memory_is_found_by_the_reader(tmp_path: Path) -> None:
    """The arena is reached as a fault would: by writing into the daemon's memory."""
    with daemon_in(tmp_path) as daemon, peer_of(local(daemon.socket)) as peer:
        source, target = Cache(4, seed=1), Cache(4, seed=2)
        scatter(source, outs(4, "a"), peer)
        assert peer.drained(5) and daemon.process is not None
        flipped = False
        for fd in os.listdir(f"/proc/{daemon.process.pid}/fd"):
            link = f"/proc/{daemon.process.pid}/fd/{fd}"
            if "relume-checkpoints" in os.readlink(link):
                file = os.open(link, os.O_RDWR)
                at = 2 * PAGES + 777
                old = os.pread(file, 1, at)
                os.pwrite(file, bytes([old[0] ^ 16]), at)
                os.close(file)
                flipped = True
                break  # the mapping has a descriptor of its own
        assert flipped
        wanted = [BlockIn(i, i, tokens_of(i)) for i in range(4)]
        loaded = gather(target, wanted, peer, "a", 0, 0, 5.0)
        assert loaded.blocks == 2 and loaded.failure == "corrupt"
        assert target.block(3) == Cache(4, seed=2).block(3), "nothing behind it is taken"
        held, _ = peer.ask(m.Ask(0, ("a",)), 5.0)
        assert held.positions[0].blocks == 2
        assert stats(daemon)["corrupt"] == 1
