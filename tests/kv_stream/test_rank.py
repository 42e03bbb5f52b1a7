"""A rank's saves against a real daemon."""

from __future__ import annotations

from pathlib import Path

from relume.engine_shim.checkpoints.checkpoint_spec import Key, SaveJob
from relume.engine_shim.checkpoints.daemon_links import LinkConfig
from relume.engine_shim.checkpoints.rank_blocks import CheckpointRank
from tests.engine.fleet import wait_until
from tests.kv_stream.layouts import staged_over
from tests.state_daemon.daemon import (
    LAYERS,
    Cache,
    Daemon,
    daemon_in,
    fingerprint,
    stats,
    tokens_of,
)

IMAGE_BYTES = LAYERS * 4096 + 16


def rank_of(cache: Cache, **options: object) -> CheckpointRank:
    config = LinkConfig(**options)  # type: ignore[arg-type]
    memory = staged_over(cache)
    return CheckpointRank(memory, 0, config, "w0", 1, fingerprint(), lambda event: None)


def job(daemon: Daemon, request: str, count: int) -> SaveJob:
    tokens = tuple(tokens_of(index) for index in range(count))
    endpoint = f"unix:{daemon.socket}"
    return SaveJob(
        endpoint=endpoint,
        key=Key(request, 1, 0),
        first=0,
        block_ids=tuple(range(count)),
        tokens=tokens,
        priority=1,
    )


def test_a_save_sends_whole_blocks_of_every_job(tmp_path: Path) -> None:
    with daemon_in(tmp_path) as daemon:
        rank = rank_of(Cache(5))
        rank.save_all([job(daemon, "chunk", 4), job(daemon, "single", 1)])
        wait_until(lambda: stats(daemon)["blocks"] == 5, "all blocks are there", 10.0)
        figures = stats(daemon)
        assert figures["assemblies"] == figures["refused"] == 0
        assert (rank.saved_blocks, rank.shed_blocks) == (5, 0)
        rank.close()


def test_a_save_beyond_the_bound_sheds_and_reports_the_first_block_shed(tmp_path: Path) -> None:
    with daemon_in(tmp_path) as daemon:
        rank = rank_of(Cache(4), bound_bytes=3 * IMAGE_BYTES)
        daemon.kill()  # nothing is acknowledged, so nothing makes room
        rank.save_all([job(daemon, "first", 3), job(daemon, "second", 1)])
        wait_until(lambda: rank.saved_blocks + rank.shed_blocks == 4, "each has its fate", 10.0)
        reached, _ = rank.take_progress()
        assert {place[0]: index for place, index in reached.items()} == {"second": 0}
        assert (rank.saved_blocks, rank.shed_blocks) == (3, 1)
        rank.close()
