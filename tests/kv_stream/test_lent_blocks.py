"""Another request's identical prefix, looked up and loaded over each transport."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from relume.engine_shim.checkpoints.checkpoint_spec import Key, LoadJob
from relume.engine_shim.checkpoints.daemon_links import LinkConfig, Links
from relume.engine_shim.checkpoints.link.block_stream import BlockOut, scatter
from relume.engine_shim.checkpoints.lookup import Lookup, LookupResult
from relume.engine_shim.checkpoints.rank_blocks import CheckpointRank
from relume.events.vocabulary import RestoreDone, RestoreFailed, RestoreStarted
from relume.events.wire.kv import token_chain
from tests.engine.fleet import wait_until
from tests.kv_stream.layouts import staged_over
from tests.kv_stream.transports import LINKS, SECRET, Fleet, outs, served
from tests.state_daemon.daemon import (
    Cache,
    Daemon,
    daemon_in,
    fingerprint,
    local,
    peer_of,
    stats,
    tokens_of,
)

PLAIN = token_chain.scope("")
PLACE_BYTES = 16384
"""Of a block in a daemon's memory, in whole pages."""


def lent(count: int, request: str = "a", scope: bytes = PLAIN) -> list[BlockOut]:
    return [
        BlockOut(
            request=request,
            child=0,
            rank=0,
            index=i,
            attempt=1,
            block_id=i,
            tokens=tokens_of(i),
            scope=scope,
        )
        for i in range(count)
    ]


def config_for(link: str, daemon: Daemon, fleet: Fleet) -> tuple[LinkConfig, str]:
    """How an engine reaches the daemon, and by which endpoint."""
    if link == "local":
        return LinkConfig(), f"unix:{daemon.socket}"
    if link == "plain":
        return LinkConfig(secret_file=fleet.secret_file), f"tcp://127.0.0.1:{fleet.plain_port}"
    endpoint = f"tcp://127.0.0.1:{fleet.curve_port}"
    public, secret = fleet.client
    file = Path(fleet.secret_file).with_name("curve")
    file.write_bytes(secret)
    servers = {endpoint: fleet.server[0].decode()}
    return LinkConfig(
        curve_public=public.decode(), curve_secret_file=str(file), curve_servers=servers
    ), endpoint


def look_up(
    config: LinkConfig, endpoint: str, tokens: Any, scope: bytes = PLAIN, request: str = "b"
) -> LookupResult:
    links = Links(config, "w1", 1, "reader", fingerprint())
    with ThreadPoolExecutor(1) as pool:
        asked = Lookup(
            pool=pool,
            links=links,
            key=Key(request, 2, 0),
            sources=(endpoint,),
            ranks=1,
            timeout_s=20.0,
            scope=scope,
            tokens=tokens,
        )
        assert asked.done.wait(60)
    links.close()
    return asked.found


def load(
    config: LinkConfig,
    target: Cache,
    found: LookupResult,
    tokens: Any,
    first: int = 0,
    told: Callable[[], bool] = lambda: True,
) -> tuple[list[Any], set[int]]:
    """Events of the restore into the same places, and the places that failed. The link is
    there until the daemon was `told`."""
    events: list[Any] = []
    cache = staged_over(target)
    rank = CheckpointRank(cache, 0, config, "w1", 1, fingerprint(), events.append)
    places = tuple(range(first, found.blocks))
    job = LoadJob(
        engine_id="b-engine",
        endpoint=found.endpoint,
        key=Key("b", 2, 0),
        first=first,
        block_ids=places,
        tokens=tokens[first : found.blocks],
        lender=found.lender,
    )
    rank.load(job)
    wait_until(rank.take_loaded, "the load ended", 30.0)
    wait_until(told, "the daemon was told", 30.0)
    rank.close()
    return events, rank.take_failed()


@pytest.mark.parametrize("link", LINKS)
def test_a_request_is_restored_from_anothers_identical_prefix(tmp_path: Path, link: str) -> None:
    source, target = Cache(8, seed=1), Cache(8, seed=2)
    tokens = tuple(tokens_of(i) for i in range(8))
    with served(tmp_path, link) as (daemon, fleet):
        config, endpoint = config_for(link, daemon, fleet)
        with peer_of(fleet.connect(link, daemon), secret=SECRET) as writer:
            assert scatter(source, lent(6), writer) == 6 and writer.drained(10)
            assert scatter(source, outs(2, "b"), writer) == 2 and writer.drained(10)
        found = look_up(config, endpoint, tokens)
        assert found.blocks == 6 and found.lender is not None
        assert (found.lender.request, found.lender.child) == ("a", 0)
        events, failed = load(config, target, found, tokens, first=1)
        assert [type(e) for e in events] == [RestoreStarted, RestoreDone] and not failed
        assert events[0].lender == "a"
        assert [target.block(i) for i in range(1, 6)] == [source.block(i) for i in range(1, 6)]
        assert target.block(0) == Cache(8, seed=2).block(0), "it was there already"
        figures = stats(daemon)
        assert figures["lent"] == figures["served"] == 5


def test_nothing_is_lent_to_another_prefix_salt_or_to_who_has_as_much(tmp_path: Path) -> None:
    source, config = Cache(6), LinkConfig()
    tokens = tuple(tokens_of(i) for i in range(6))
    with daemon_in(tmp_path) as daemon:
        endpoint = f"unix:{daemon.socket}"
        with peer_of(local(daemon.socket)) as writer:
            assert scatter(source, lent(6), writer) == 6
            assert scatter(source, outs(6, "own"), writer) == 6
            assert scatter(source, outs(3, "closed"), writer) == 3 and writer.drained(10)
        other = (tokens_of(9), *tokens[1:])
        assert look_up(config, endpoint, other) == LookupResult()
        assert look_up(config, endpoint, tokens, token_chain.scope("salt")) == LookupResult()
        assert look_up(config, endpoint, tokens, b"") == LookupResult()
        assert look_up(config, endpoint, tokens, request="own") == LookupResult(endpoint, 6)
        assert look_up(config, endpoint, tokens, b"", request="closed") == LookupResult(endpoint, 3)
        assert stats(daemon)["lent"] == 0


def test_a_damaged_block_of_the_other_request_is_noticed(tmp_path: Path) -> None:
    """What came before it is used; the lender keeps no more than that either."""
    source, target, config = Cache(6, seed=1), Cache(6, seed=2), LinkConfig()
    tokens = tuple(tokens_of(i) for i in range(6))
    with daemon_in(tmp_path) as daemon:
        endpoint = f"unix:{daemon.socket}"
        with peer_of(local(daemon.socket)) as writer:
            assert scatter(source, lent(6), writer) == 6 and writer.drained(10)
        found = look_up(config, endpoint, tokens)
        flip(daemon, 3)
        events, failed = load(
            config, target, found, tokens, told=lambda: stats(daemon)["corrupt"] == 1
        )
        assert isinstance(events[-1], RestoreFailed) and events[-1].reason == "corrupt"
        assert failed == {3, 4, 5}
        assert [target.block(i) for i in range(3)] == [source.block(i) for i in range(3)]
        assert look_up(config, endpoint, tokens).blocks == 3


@pytest.mark.full
def test_a_lender_that_went_before_it_was_read_is_gone(tmp_path: Path) -> None:
    """Dropped after the question; another request under its name is not taken for it."""
    target, config = Cache(4, seed=2), LinkConfig()
    tokens = tuple(tokens_of(i) for i in range(4))
    with daemon_in(tmp_path) as daemon:
        endpoint = f"unix:{daemon.socket}"
        with peer_of(local(daemon.socket)) as writer:
            assert scatter(Cache(4), lent(4), writer) == 4 and writer.drained(10)
            found = look_up(config, endpoint, tokens)
            writer.drop("a", 1)
            wait_until(lambda: stats(daemon)["blocks"] == 0, "dropped", 10.0)
            again = [
                BlockOut(
                    request="a",
                    child=0,
                    rank=0,
                    index=i,
                    attempt=2,
                    block_id=i,
                    tokens=tokens_of(i or 9),
                    scope=PLAIN,
                )
                for i in range(4)
            ]
            events, failed = load(config, target, found, tokens, first=1)
            assert events[-1].reason == "gone" and failed == {1, 2, 3}
            assert scatter(Cache(4), again, writer) == 4 and writer.drained(10)
            events, failed = load(config, target, found, tokens, first=1)
            assert events[-1].reason == "gone" and failed == {1, 2, 3}
        assert target.layers == Cache(4, seed=2).layers


def flip(daemon: Daemon, number: int) -> None:
    """A bit of the `number`-th image of the daemon's memory."""
    assert daemon.process is not None
    for fd in os.listdir(f"/proc/{daemon.process.pid}/fd"):
        link = f"/proc/{daemon.process.pid}/fd/{fd}"
        if "relume-checkpoints" in os.readlink(link):
            file = os.open(link, os.O_RDWR)
            at = number * PLACE_BYTES + 300
            old = os.pread(file, 1, at)
            os.pwrite(file, bytes([old[0] ^ 64]), at)
            os.close(file)
            return
    raise AssertionError("no arena")
