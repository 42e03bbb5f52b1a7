"""A rank with a staged cache: what it reports, and that whatever fails costs checkpoints only."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from relume.engine_shim.checkpoints.checkpoint_spec import DropJob, Key, LoadJob, SaveJob
from relume.engine_shim.checkpoints.daemon_links import LinkConfig
from relume.engine_shim.checkpoints.link.block_stream import BlockIn, BlockOut, gather, scatter
from relume.engine_shim.checkpoints.rank_blocks import CheckpointRank
from relume.engine_shim.checkpoints.staging.copies import HostCopies, Way
from relume.engine_shim.checkpoints.staging.staged_cache import SAVES, StagedCache
from relume.events.vocabulary import RestoreDone, RestoreFailed
from relume.events.wire.kv.fingerprint import Fingerprint
from tests.engine.fleet import wait_until
from tests.kv_stream import layouts
from tests.kv_stream.layouts import BLOCKS, image
from tests.kv_stream.staging.delayed_copies import LAYOUT, ROW, WAIT_S, Held, free, show, staged
from tests.state_daemon.daemon import (
    Cache,
    Daemon,
    daemon_in,
    fingerprint,
    hello,
    local,
    peer_of,
    stats,
)

PRINT: Fingerprint = fingerprint(
    dtype="float16", block_size=layouts.TOKENS, layers=layouts.LAYERS,
    piece_bytes=ROW // layouts.LAYERS,
)  # fmt: skip


class Rank:
    """A rank and what it reports."""

    def __init__(self, view: Any, **options: Any) -> None:
        self.events: list[Any] = []
        config = LinkConfig(**{"load_timeout_s": WAIT_S, **options})
        self.rank = CheckpointRank(view, 0, config, "w0", 1, PRINT, self.events.append)

    def loaded(self, name: str) -> None:
        wait_until(lambda: name in self.rank.take_loaded(), "loaded", WAIT_S)


@pytest.fixture
def ranks() -> Iterator[list[CheckpointRank]]:
    made: list[CheckpointRank] = []
    yield made
    for rank in made:
        rank.close()


def tokens(count: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(range(n * layouts.TOKENS, (n + 1) * layouts.TOKENS)) for n in range(count))


def save(daemon: Daemon, request: str, block_ids: tuple[int, ...]) -> SaveJob:
    key, endpoint = Key(request, 1, 0), f"unix:{daemon.socket}"
    return SaveJob(
        endpoint=endpoint,
        key=key,
        first=0,
        block_ids=block_ids,
        tokens=tokens(len(block_ids)),
        priority=1,
    )


def load(daemon: Daemon, request: str, block_ids: tuple[int, ...]) -> LoadJob:
    key, endpoint = Key(request, 1, 0), f"unix:{daemon.socket}"
    return LoadJob(
        engine_id=f"{request}-1",
        endpoint=endpoint,
        key=key,
        first=0,
        block_ids=block_ids,
        tokens=tokens(len(block_ids)),
    )


def put(daemon: Daemon, request: str, block_ids: tuple[int, ...]) -> None:
    """Blocks of plain memory, as they are sent when no copy comes between."""
    blocks = [
        BlockOut(
            request=request,
            child=0,
            rank=0,
            index=index,
            attempt=1,
            block_id=block_id,
            tokens=covered,
        )
        for index, (block_id, covered) in enumerate(
            zip(block_ids, tokens(len(block_ids)), strict=True)
        )
    ]
    with peer_of(local(daemon.socket), hello=hello("writer", epoch=0, fingerprint=PRINT)) as peer:
        assert scatter(host_cache(), blocks, peer) == len(blocks) and peer.drained(WAIT_S)


def read(daemon: Daemon, request: str, block_ids: tuple[int, ...]) -> list[bytes]:
    """Blocks of a request, read into plain memory."""
    memory = Cache(BLOCKS, layers=layouts.LAYERS, piece=ROW // layouts.LAYERS)
    wanted = [
        BlockIn(index, block_id, covered)
        for index, (block_id, covered) in enumerate(
            zip(block_ids, tokens(len(block_ids)), strict=True)
        )
    ]
    with peer_of(local(daemon.socket), hello=hello("reader", fingerprint=PRINT)) as peer:
        assert gather(memory, wanted, peer, request, 0, 0, WAIT_S).blocks == len(wanted)
    return [memory.block(block_id) for block_id in block_ids]


def host_cache() -> Cache:
    """Of the same blocks in plain memory."""
    cache = Cache(BLOCKS, layers=layouts.LAYERS, piece=ROW // layouts.LAYERS)
    for block in range(BLOCKS):
        row = image(LAYOUT, block)
        for number, piece in enumerate(cache.pieces(block)):
            piece[:] = row[number * cache.piece : (number + 1) * cache.piece]
    return cache


def test_images_are_the_same_as_those_of_plain_memory(
    device: str, tmp_path: Path, ranks: list[CheckpointRank]
) -> None:
    """Saved by copies and read without, and the reverse; two holders cost one copy."""
    with daemon_in(tmp_path) as daemon, daemon_in(tmp_path / "other") as other:
        held = Held()
        cache, tensors = staged(device, held, rows=2)
        one = Rank(cache)
        ranks.append(one.rank)
        ids = (5, 2, 7, 0, 3)
        one.rank.save_all([save(daemon, "from-staged", ids), save(other, "from-staged", ids)])
        put(daemon, "from-host", ids)
        wait_until(lambda: stats(daemon)["blocks"] == 10, "held", WAIT_S)
        wait_until(lambda: stats(other)["blocks"] == 5, "held there, too", WAIT_S)
        assert held.started.count(Way.READ) == 3, "buffers of two for five blocks"
        assert stats(daemon)["contents"] == 5, "equal blocks are stored once"
        for tensor in tensors.values():
            tensor.zero_()
        one.rank.load(load(daemon, "from-host", ids))
        one.loaded("from-host-1")
        assert [show(tensors)[n] for n in ids] == [image(LAYOUT, n) for n in ids]
        assert isinstance(one.events[-1], RestoreDone) and not one.rank.take_failed()
        assert read(daemon, "from-staged", ids) == [image(LAYOUT, n) for n in ids]
        wait_until(lambda: free(cache) == SAVES, "no buffer is lost", WAIT_S)


def test_a_load_is_reported_when_its_last_copy_is_over(
    tmp_path: Path, ranks: list[CheckpointRank]
) -> None:
    """Also one that fails behind its first blocks, and one nobody waits for any more: until
    then vLLM gives its blocks to no other request."""
    with daemon_in(tmp_path) as daemon:
        put(daemon, "short", (1, 2, 3))
        held = Held(Way.BACK)
        cache, tensors = staged("cpu", held, rows=2)
        rank = Rank(cache)
        ranks.append(rank.rank)
        before = show(tensors)
        rank.rank.load(load(daemon, "short", (4, 5, 6, 7)))
        wait_until(lambda: held.started.count(Way.BACK) == 2, "all that came is copied", WAIT_S)
        assert rank.rank.take_loaded() == set() and show(tensors) == before
        held.open()
        rank.loaded("short-1")
        assert rank.rank.take_failed() == {7}
        after = show(tensors)
        assert after[4:7] == [image(LAYOUT, n) for n in (1, 2, 3)] and after[7] == before[7]
        failed = rank.events[-1]
        assert isinstance(failed, RestoreFailed) and failed.reason == "gone"
        assert failed.tokens == 3 * layouts.TOKENS


def test_what_finds_no_room_is_shed_and_told_and_the_rest_arrives(
    tmp_path: Path, ranks: list[CheckpointRank]
) -> None:
    with daemon_in(tmp_path) as daemon:
        held = Held(Way.OUT)
        cache, _ = staged("cpu", held, rows=1)
        rank = Rank(cache)
        ranks.append(rank.rank)
        rank.rank.save_all([save(daemon, "long", tuple(range(SAVES + 2)))])
        rank.rank.save_all([save(daemon, "late", (1,))])  # does not wait either
        held.open()
        told: dict[Any, int] = {}

        def both() -> bool:
            told.update(rank.rank.take_progress()[0])
            return len(told) == 2

        wait_until(both, "told", WAIT_S)
        by_request = {place[0]: index for place, index in told.items()}
        assert by_request == {"long": SAVES, "late": 0}
        wait_until(lambda: stats(daemon)["blocks"] == SAVES, "held", WAIT_S)
        wait_until(lambda: free(cache) == SAVES, "free again", WAIT_S)
        rank.rank.save_all([save(daemon, "late", (1,))])
        wait_until(lambda: stats(daemon)["blocks"] == SAVES + 1, "offered again", WAIT_S)


def test_no_more_is_copied_than_a_link_would_take(
    tmp_path: Path, ranks: list[CheckpointRank]
) -> None:
    with daemon_in(tmp_path) as daemon:
        held = Held(Way.OUT)
        cache, _ = staged("cpu", held, rows=8)
        rank = Rank(cache, bound_bytes=2 * (ROW + 4 * layouts.TOKENS))
        ranks.append(rank.rank)
        rank.rank.save_all([save(daemon, "first", (0, 1, 2))])
        rank.rank.save_all([save(daemon, "second", (3,))])  # what is staged counts
        assert held.started == [Way.READ, Way.OUT]
        held.open()
        wait_until(lambda: stats(daemon)["blocks"] == 2, "held", WAIT_S)
        reached: dict[Any, int] = {}

        def told() -> bool:
            reached.update(rank.rank.take_progress()[0])
            return {place[0]: at for place, at in reached.items()} == {"first": 2, "second": 0}

        wait_until(told, "told", WAIT_S)
        daemon.kill()
        wait_until(lambda: free(cache) == SAVES, "free", WAIT_S)


def test_an_end_does_not_overtake_what_was_saved(
    tmp_path: Path, ranks: list[CheckpointRank]
) -> None:
    with daemon_in(tmp_path) as daemon:
        held = Held(Way.OUT)
        cache, _ = staged("cpu", held)
        rank = Rank(cache)
        ranks.append(rank.rank)
        job = save(daemon, "ends", (0, 1))
        peer, order = rank.rank._writers.peer(job.endpoint), []
        for name in ("flush", "drop"):
            real = getattr(peer, name)

            def noted(*given: Any, name: str = name, real: Any = real) -> Any:
                order.append(name)
                return real(*given)

            setattr(peer, name, noted)
        rank.rank.save_all([job])
        rank.rank.drop(DropJob(job.endpoint, "ends", 1))
        held.open()
        wait_until(lambda: "drop" in order, "dropped", WAIT_S)
        assert order == ["flush", "drop"]


# --- what fails --------------------------------------------------------------------


def test_a_device_that_fails_costs_checkpoints_only(
    tmp_path: Path, ranks: list[CheckpointRank]
) -> None:
    with daemon_in(tmp_path) as daemon:
        held = Held()
        cache, _ = staged("cpu", held)
        rank = Rank(cache)
        ranks.append(rank.rank)
        rank.rank.save_all([save(daemon, "before", (0, 1))])
        wait_until(lambda: stats(daemon)["blocks"] == 2, "held", WAIT_S)
        held.fails = RuntimeError("CUDA error: an illegal memory access\nand advice")
        reached: dict[Any, int] = {}

        def given_up(request: str) -> bool:
            reached.update(rank.rank.take_progress()[0])
            return {place[0]: at for place, at in reached.items()}.get(request) == -1

        for request in ("at", "after"):
            rank.rank.save_all([save(daemon, request, (2, 3))])
            wait_until(lambda r=request: given_up(r), "not tried again", WAIT_S)
        assert cache.failed == "CUDA error: an illegal memory access"
        rank.rank.load(load(daemon, "before", (4, 5)))
        rank.loaded("before-1")
        assert rank.rank.take_failed() == {4, 5}
        assert rank.events[-1].reason == "device" and rank.events[-1].tokens == 0
        wait_until(lambda: free(cache) == SAVES, "no buffer is lost", WAIT_S)


@pytest.mark.parametrize("when", ("first", "last"))
def test_a_copy_into_the_cache_that_fails_makes_all_of_the_request_computed(
    tmp_path: Path, ranks: list[CheckpointRank], when: str
) -> None:
    with daemon_in(tmp_path) as daemon:
        put(daemon, "whole", (1, 2, 3))
        held = Held()
        cache, _ = staged("cpu", held, rows=2)
        rank = Rank(cache)
        ranks.append(rank.rank)
        count = {"first": 0, "last": 1}[when]
        real, ways = held.delay, []

        def fails(way: Way, device: str) -> None:
            ways.append(way)
            if len(ways) > count:
                raise RuntimeError("CUDA error: unspecified launch failure")
            real(way, device)

        held.delay = fails  # type: ignore[method-assign]
        rank.rank.load(load(daemon, "whole", (4, 5, 6)))
        rank.loaded("whole-1")
        assert rank.rank.take_failed() == {4, 5, 6}
        assert rank.events[-1].reason == "device" and cache.failed


def test_without_staging_memory_there_are_no_checkpoints_and_the_remedy_is_said(
    tmp_path: Path, ranks: list[CheckpointRank], caplog: pytest.LogCaptureFixture
) -> None:
    def without(device: torch.device) -> Any:
        copies = HostCopies()

        def none(*shape: Any) -> torch.Tensor:
            raise torch.OutOfMemoryError("CUDA error: out of memory")

        copies.staging = none  # type: ignore[method-assign]
        return copies

    with daemon_in(tmp_path) as daemon:
        cache = StagedCache(layouts.cache(LAYOUT), BLOCKS, without)
        assert "staging_bytes" in caplog.text and "out of memory" in caplog.text
        rank = Rank(cache)
        ranks.append(rank.rank)
        rank.rank.save_all([save(daemon, "none", (0,))])
        wait_until(lambda: -1 in rank.rank.take_progress()[0].values(), "told", WAIT_S)
        rank.rank.load(load(daemon, "none", (4,)))
        rank.loaded("none-1")
        assert rank.rank.take_failed() == {4}


def test_closing_ends_all_threads_whatever_is_under_way(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with daemon_in(tmp_path) as daemon:
        held = Held(Way.OUT)
        cache, _ = staged("cpu", held, rows=1)
        rank = Rank(cache)
        rank.rank.save_all([save(daemon, "left", (0, 1))])
        rank.rank.load(load(daemon, "nobody", (2,)))
        held.open()
        rank.rank.close()
        mine = {t for t in threading.enumerate() if t.name.startswith("relume-kv")} - before
        wait_until(lambda: not any(t.is_alive() for t in mine), "gone", WAIT_S)
        assert cache.failed and free(cache) == 0
