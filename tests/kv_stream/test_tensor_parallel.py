"""Two ranks of one worker: each saves and restores its own part of every block."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from relume.engine_shim.checkpoints.checkpoint_spec import Key, LoadJob, SaveJob
from relume.engine_shim.checkpoints.daemon_links import LinkConfig, Links
from relume.engine_shim.checkpoints.lookup import Lookup, LookupResult
from relume.engine_shim.checkpoints.rank_blocks import CheckpointRank
from relume.events.vocabulary import RestoreDone, RestoreStarted
from relume.events.wire.kv import token_chain
from relume.events.wire.kv.fingerprint import HEADS, OPAQUE, Fingerprint, usable
from tests.engine.fleet import wait_until
from tests.kv_stream.layouts import staged_over
from tests.state_daemon.daemon import (
    PIECE,
    Cache,
    Daemon,
    daemon_in,
    fingerprint,
    stats,
    tokens_of,
)

RANKS, BLOCKS = 2, 5
PLAIN = token_chain.scope("")


def print_of(tp: int, layout: str = OPAQUE) -> Fingerprint:
    """Of an engine with `tp` ranks."""
    return fingerprint(tp=tp, piece_bytes=PIECE // tp, layout=layout)


def endpoint(daemon: Daemon) -> str:
    return f"unix:{daemon.socket}"


def tokens(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tokens_of(index) for index in range(count))


def save(daemon: Daemon, count: int) -> SaveJob:
    return SaveJob(
        endpoint=endpoint(daemon),
        key=Key("a", 1, 0),
        first=0,
        block_ids=tuple(range(count)),
        tokens=tokens(count),
        priority=1,
        scope=PLAIN,
    )


class Engine:
    """The ranks of one worker, their caches, and the events that they report."""

    def __init__(self, worker: str, seed: int, mine: Fingerprint) -> None:
        self.events: list[Any] = []
        piece = mine.piece_bytes
        self.caches = [Cache(BLOCKS, seed + rank, piece=piece) for rank in range(mine.tp)]
        self.ranks = [
            CheckpointRank(
                staged_over(cache), rank, LinkConfig(), worker, 1, mine, self.events.append
            )
            for rank, cache in enumerate(self.caches)
        ]


@contextmanager
def engine(worker: str, seed: int, mine: Fingerprint) -> Iterator[Engine]:
    made = Engine(worker, seed, mine)
    try:
        yield made
    finally:
        for rank in made.ranks:
            rank.close()


def look_up(daemon: Daemon, mine: Fingerprint, request: str = "a") -> LookupResult:
    links = Links(LinkConfig(), "w1", 1, "reader", mine)
    try:
        with ThreadPoolExecutor(1) as pool:
            asked = Lookup(
                pool=pool,
                links=links,
                key=Key(request, 2, 0),
                sources=(endpoint(daemon),),
                ranks=mine.tp,
                timeout_s=20.0,
                scope=PLAIN,
                tokens=tokens(BLOCKS),
            )
            assert asked.done.wait(60)
        return asked.found
    finally:
        links.close()


@pytest.mark.parametrize("second", (BLOCKS, 3), ids=("equal", "one rank behind"))
def test_each_rank_restores_its_own_blocks_as_far_as_all_ranks_have_theirs(
    tmp_path: Path, second: int
) -> None:
    """Killed in decode, one rank may have sent less than the other one."""
    mine = print_of(RANKS)
    with daemon_in(tmp_path) as daemon:
        with engine("w0", 1, mine) as first:
            for rank, count in zip(first.ranks, (BLOCKS, second), strict=True):
                rank.save_all([save(daemon, count)])
            wait_until(lambda: stats(daemon)["blocks"] == BLOCKS + second, "held", 30.0)
        assert stats(daemon)["contents"] == BLOCKS + second, "no rank has another one's bytes"
        assert look_up(daemon, mine) == LookupResult(endpoint(daemon), second)
        with engine("w1", 7, mine) as other:
            job = LoadJob(
                engine_id="a-engine",
                endpoint=endpoint(daemon),
                key=Key("a", 2, 0),
                first=0,
                block_ids=tuple(range(second)),
                tokens=tokens(second),
            )
            for rank, mine_there, theirs in zip(
                other.ranks, other.caches, first.caches, strict=True
            ):
                rank.load(job)
                wait_until(rank.take_loaded, "loaded", 30.0)
                assert not rank.take_failed()
                for block in range(second):
                    assert mine_there.block(block) == theirs.block(block)
            done = [e for e in other.events if isinstance(e, RestoreDone)]
            assert len(done) == RANKS
            assert {e.bytes for e in done} == {second * mine.image_bytes}, "of each rank's part"
            assert stats(daemon)["served"] == RANKS * second


@pytest.mark.parametrize("layout", (OPAQUE, HEADS))
@pytest.mark.parametrize(("wrote", "reads"), ((1, 2), (2, 1)))
def test_blocks_of_another_tensor_parallel_size_are_not_offered(
    tmp_path: Path, wrote: int, reads: int, layout: str
) -> None:
    """Neither the request's own nor another one's; nor may a plan count on them, which compares
    families. Blocks of heads could be converted; no restore does."""
    theirs, mine = print_of(wrote, layout), print_of(reads, layout)
    with daemon_in(tmp_path) as daemon, engine("w0", 1, theirs) as first:
        for rank in first.ranks:
            rank.save_all([save(daemon, BLOCKS)])
        wait_until(lambda: stats(daemon)["blocks"] == wrote * BLOCKS, "held", 30.0)
        for request in ("a", "b"):
            assert look_up(daemon, theirs, request).blocks == BLOCKS
            assert look_up(daemon, mine, request) == LookupResult()
        assert not [e for e in first.events if isinstance(e, RestoreStarted)]
    assert usable(mine, theirs) == ("convert" if layout == HEADS else "")
    assert mine.family != theirs.family
