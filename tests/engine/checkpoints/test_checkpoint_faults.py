"""Real engines and a real daemon between which everything goes wrong that may: whatever
happens to the stream or to the holder, the answer is the same. Over TCP, in plaintext."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relume.events.vocabulary import RestoreDone, RestoreFailed
from relume.events.wire import frames
from relume.events.wire.kv import kv_messages as m
from tests.engine import client
from tests.engine.checkpoints.restored_requests import (
    BLOCK,
    LONG,
    PATH,
    PROMPT,
    body_for,
    connector,
    forget_prefixes,
    full_blocks,
    held_blocks,
    outcome,
    whole,
)
from tests.engine.fleet import Engine, Zygote, engine_of, free_port, wait_until
from tests.signals import HANG_S, let_run, slowed, stop
from tests.state_daemon.daemon import Daemon, daemon_in, hello, local, peer_of, stats
from tests.state_daemon.faulty import TcpProxy

pytestmark = pytest.mark.full
TOKENS = 60


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text("a secret of the fleet")
    path.chmod(0o600)
    return str(path)


@pytest.fixture(scope="module")
def pair(zygote: Zygote, secret: str) -> Iterator[tuple[Engine, Engine]]:
    """One that writes and one that restores."""
    arguments = connector(secret_file=secret)
    with (
        engine_of(zygote.fork(*arguments, VLLM_SERVER_DEV_MODE="1")) as first,
        engine_of(zygote.fork(*arguments, VLLM_SERVER_DEV_MODE="1")) as second,
    ):
        yield first, second


@pytest.fixture(scope="module")
def expected(pair: tuple[Engine, Engine]) -> client.Framed:
    """The undisturbed answer, the same for each request here."""
    return whole(pair[1], "undisturbed")


class Holder:
    """A daemon and the proxy by which engines reach it."""

    def __init__(self, daemon: Daemon, proxy: TcpProxy) -> None:
        self.daemon = daemon
        self.proxy = proxy
        self.endpoint = f"tcp://127.0.0.1:{proxy.port}"

    def held(self, request: str) -> int:
        return held_blocks(self.daemon, request)

    def again(self, **options: Any) -> None:
        """Killed, and another one in its place."""
        self.daemon.kill()
        self.daemon.options.update(options)
        self.daemon.start()

    def positions(self) -> dict[str, int]:
        """Blocks without a gap by request, of those that have not ended."""
        with peer_of(local(self.daemon.socket), hello=hello("control")) as control:
            told, _ = control.ask(m.Changes(0, 0), 5.0)
        return {c.request: c.blocks for c in told.changes if not c.reason}


@pytest.fixture
def holder(tmp_path: Path, secret: str) -> Iterator[Holder]:
    options = {
        "remote": {"host": "127.0.0.1", "port": free_port()},
        "secret_file": secret, "budget_bytes": 64 << 20, "epoch": 5,
    }  # fmt: skip
    with daemon_in(tmp_path / "holder", **options) as daemon, TcpProxy() as proxy:
        proxy.target = options["remote"]["port"]
        yield Holder(daemon, proxy)


class Writing:
    """A request that runs on `engine` and is checkpointed at `holder`."""

    def __init__(
        self, engine: Engine, holder: Holder, name: str, tokens: int = TOKENS, **options: Any
    ) -> None:
        self.name = name
        self.ids: list[int] = []
        headers = client.headers_for(request=name, checkpoint=holder.endpoint)
        self._connection, self._response = client.open_stream(
            engine.port, PATH, body_for(**options), headers
        )
        self._reader = frames.FrameReader()
        while len(self.ids) < tokens:
            data = self._response.read1(65536)
            assert data, "the stream ended early"
            self.ids += [i for part in self._reader.feed(data) for i in getattr(part, "ids", ())]

    def leave(self) -> list[int]:
        """What its client has. Aborted, it may be taken up elsewhere: its blocks stay."""
        self._connection.close()
        return self.ids[:TOKENS]

    def read_on(self, expected: client.Framed) -> None:
        """To its end, and compare."""
        parts = [*self._reader.feed(self._response.read())]
        self._connection.close()
        assert isinstance(parts[-1], frames.End)
        self.ids += [i for part in parts for i in getattr(part, "ids", ())]
        assert self.ids == expected.ids


def written(first: Engine, holder: Holder, name: str, **options: Any) -> list[int]:
    """A request whose blocks are held; the ids its client has.

    The request is long and runs a moment at a time: a link that was cut may take seconds to
    come back, and blocks of a request that has ended are not sent.
    """
    wanted = full_blocks(first, TOKENS)
    with slowed(first.pid):
        writing = Writing(first, holder, name, **LONG, **options)
    stop(first.pid)
    try:
        deadline, pause_s = time.monotonic() + HANG_S, 0.01
        while holder.held(name) < wanted:
            assert time.monotonic() < deadline, holder.positions()
            let_run(first.pid)
            time.sleep(pause_s)  # in which the link gets somewhere, and the request does not
            pause_s = min(1.0, pause_s * 1.1)
        ids = writing.leave()
    finally:
        os.kill(first.pid, signal.SIGCONT)
    first.wait_idle()
    return ids


def restored(
    second: Engine, holder: Holder, name: str, expected: client.Framed, **options: Any
) -> list[Any]:
    """Takes the request up and compares; how its restore went: its beginning and its end."""
    forget_prefixes(second)
    rest = client.ask(
        second.port, PATH, body_for(**options), attempt=2, request=name, response_id=name,
        resume=("continue", expected.ids[:TOKENS]), created=client.created_of(expected.payload),
        restore=holder.endpoint,
    )  # fmt: skip
    assert rest.ids == expected.ids[TOKENS:] and isinstance(rest.last, frames.End)
    return outcome(second, name)


def test_a_stream_that_is_slow_damaged_and_cut_is_held_whole(
    pair: tuple[Engine, Engine], holder: Holder, expected: client.Framed
) -> None:
    first, second = pair
    holder.proxy.delay_s = 0.002
    holder.proxy.flip["in"] = 2
    writing = Writing(first, holder, "slow", 20)
    wait_until(lambda: holder.held("slow") > 0, "something is held")
    holder.proxy.cut()
    wait_until(lambda: holder.held("slow") >= full_blocks(first, TOKENS), "held")
    assert holder.proxy.flip["in"] == 0 and stats(holder.daemon)["refused"] > 0
    writing.read_on(expected)
    first.wait_idle()
    wait_until(lambda: "slow" not in holder.positions(), "dropped with its end")
    # On its way back a bit is flipped: what is behind it is computed.
    holder.proxy.delay_s = 0.0
    assert written(first, holder, "flipped") == expected.ids[:TOKENS]
    holder.proxy.flip["out"] = 1
    started, failed = restored(second, holder, "flipped", expected)
    assert holder.proxy.flip["out"] == 0
    assert isinstance(failed, RestoreFailed) and "corrupt" in failed.reason
    assert failed.tokens < started.tokens
    assert stats(holder.daemon)["corrupt"] == 0, "it is sound where it lies"
    started, done = restored_again(second, holder, "flipped", expected)
    assert isinstance(done, RestoreDone) and done.tokens == started.tokens


def restored_again(second: Engine, holder: Holder, name: str, expected: client.Framed) -> list[Any]:
    second.agent.events.clear()
    return restored(second, holder, name, expected)


def test_a_holder_killed_in_the_restore_and_after_it(
    pair: tuple[Engine, Engine], holder: Holder, expected: client.Framed
) -> None:
    first, second = pair
    written(first, holder, "during")
    written(first, holder, "after")
    forget_prefixes(second)
    holder.proxy.hold_after = 100_000  # of some blocks; what is behind them never comes
    killer = threading.Thread(target=_kill_when_held, args=(holder,))
    killer.start()
    started, failed = restored(second, holder, "during", expected)
    killer.join()
    assert isinstance(failed, RestoreFailed) and failed.reason == "unreachable"
    assert failed.tokens < started.tokens
    # The one that comes up in its place has nothing, and says so.
    boot = holder.daemon.boot
    holder.daemon.start()
    assert holder.daemon.boot != boot and holder.positions() == {}
    written(first, holder, "after")
    killer = threading.Thread(target=_kill_when_done, args=(second, holder, "after"))
    killer.start()
    _, done = restored(second, holder, "after", expected)
    killer.join()
    assert isinstance(done, RestoreDone)


def test_a_holder_that_does_not_answer_is_reported_and_the_request_computed(
    pair: tuple[Engine, Engine], holder: Holder, expected: client.Framed
) -> None:
    first, second = pair
    written(first, holder, "unanswered")
    assert holder.daemon.process is not None
    stop(holder.daemon.process.pid)
    try:
        (failed,) = restored(second, holder, "unanswered", expected)
    finally:
        os.kill(holder.daemon.process.pid, signal.SIGCONT)
    assert isinstance(failed, RestoreFailed), "without a beginning"
    assert (failed.attempt, failed.tokens, failed.reason) == (2, 0, "unreachable")
    assert failed.holder == holder.endpoint


def _kill_when_held(holder: Holder) -> None:
    assert holder.proxy.held.wait(60)
    holder.daemon.kill()
    holder.proxy.cut()


def _kill_when_done(engine: Engine, holder: Holder, name: str) -> None:
    def done() -> bool:
        return any(isinstance(e, RestoreDone) and e.request == name for e in engine.agent.events)

    wait_until(done, "restored")
    holder.daemon.kill()


def test_a_daemon_that_is_another_is_given_all_and_one_of_an_older_epoch_nothing(
    pair: tuple[Engine, Engine], holder: Holder, expected: client.Framed
) -> None:
    first, second = pair
    writing = Writing(first, holder, "again", 20)
    stop(first.pid)  # what runs stays as it is while the daemon is away
    holder.again(epoch=6)
    os.kill(first.pid, signal.SIGCONT)
    prompt = full_blocks(first, 1)
    wait_until(lambda: stats(holder.daemon)["taken"] > prompt, "all of it again")
    writing.read_on(expected)
    first.wait_idle()
    holder.again(epoch=4)
    run = client.ask(first.port, PATH, body_for(), request="stale", checkpoint=holder.endpoint)
    assert run.ids == expected.ids
    first.wait_idle()
    figures = stats(holder.daemon)
    assert (figures["taken"], figures["bytes_in"]) == (0, 0)
    assert second.alive() and first.alive()


def test_no_room_in_memory_nor_on_disk_costs_blocks_and_no_tokens(
    pair: tuple[Engine, Engine], holder: Holder, expected: client.Framed, tmp_path: Path
) -> None:
    """What went to the file comes back from there; when nothing has room, what is held stays
    a prefix, and so much is restored."""
    first, second = pair
    size = stats_of_one_block(first, holder)
    possible = full_blocks(first, TOKENS)
    cold = tmp_path / "cold"
    cold.mkdir()
    holder.again(
        epoch=7,
        budget_bytes=(possible + 2) * size,
        file_directory=str(cold),
        file_budget_bytes=4 * possible * size,
        cold_after_s=0.0,
    )
    other = {"prompt": f"Of another kind. {PROMPT}"}  # blocks of its own
    others = client.ask(second.port, PATH, body_for(**other), request="others")
    written(first, holder, "cold")
    written(first, holder, "hot", **other)
    deadline = time.monotonic() + HANG_S
    while not (figures := stats(holder.daemon))["file_used"]:  # counted as demoted before that
        assert time.monotonic() < deadline, figures
        time.sleep(0.01)
    assert figures["demoted"] > 0
    # From here on the disk takes nothing more.
    assert holder.daemon.process is not None
    full = figures["file_used"]
    resource.prlimit(holder.daemon.process.pid, resource.RLIMIT_FSIZE, (full, full))
    for name, answer, options in (("cold", expected, {}), ("hot", others, other)):
        started, done = restored(second, holder, name, answer, **options)
        assert isinstance(done, RestoreDone), (name, done)
        assert done.tokens == started.tokens >= BLOCK
    before = stats(holder.daemon)
    third = body_for(prompt=f"More of them. {PROMPT}")
    plain = client.ask(second.port, PATH, third, request="plain")
    run = client.ask(first.port, PATH, third, request="more", checkpoint=holder.endpoint)
    assert run.ids == plain.ids
    first.wait_idle()
    after = stats(holder.daemon)
    assert after["refused"] + after["evicted"] > before["refused"] + before["evicted"]
    assert after["memory_used"] <= after["memory_budget"]
    assert after["file_used"] <= full
    assert sum(blocks for blocks in holder.positions().values()) == after["blocks"]


def stats_of_one_block(first: Engine, holder: Holder) -> int:
    """Bytes of memory that one block takes, in whole pages."""
    written(first, holder, "measured")
    figures = stats(holder.daemon)
    return figures["memory_used"] // figures["contents"]
