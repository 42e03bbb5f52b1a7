"""A rank's saves against a real daemon: whole, layer by layer, and waited for."""

from __future__ import annotations

from pathlib import Path

import pytest

from relume.engine_shim.checkpoint_links import LinkConfig
from relume.engine_shim.checkpoint_rank import CheckpointRank
from relume.engine_shim.checkpointing import Key, SaveJob
from tests.engine.fleet import wait_until
from tests.state_daemon.daemon import (
    LAYERS,
    Cache,
    Daemon,
    daemon_in,
    fingerprint,
    stats,
    tokens_of,
)


def rank_of(cache: Cache, **options: object) -> CheckpointRank:
    config = LinkConfig(**options)  # type: ignore[arg-type]
    return CheckpointRank(cache, 0, config, "w0", 1, fingerprint(), lambda event: None)


def job(daemon: Daemon, request: str, count: int) -> SaveJob:
    tokens = tuple(tokens_of(index) for index in range(count))
    endpoint = f"unix:{daemon.socket}"
    return SaveJob(endpoint, Key(request, 1, 0), 0, tuple(range(count)), tokens, 1)


def test_several_blocks_leave_layer_by_layer_and_one_leaves_whole(tmp_path: Path) -> None:
    with daemon_in(tmp_path) as daemon:
        rank = rank_of(Cache(5), layered=True)
        jobs = [job(daemon, "chunk", 4), job(daemon, "single", 1)]
        for layer in range(LAYERS - 1):
            rank.save_layer(jobs, layer)
        wait_until(lambda: stats(daemon)["assemblies"] == 4, "half of each block is there", 10.0)
        assert stats(daemon)["blocks"] == 0
        rank.save_layer(jobs, LAYERS - 1)
        wait_until(lambda: stats(daemon)["blocks"] == 4, "whole blocks are there", 10.0)
        rank.save_rest(jobs)
        wait_until(lambda: stats(daemon)["blocks"] == 5, "the single one, too", 10.0)
        figures = stats(daemon)
        assert figures["assemblies"] == figures["refused"] == 0 and rank.shed_blocks == 0
        rank.close()


def test_what_a_layer_sheds_is_told(tmp_path: Path) -> None:
    """The bound holds the first layers of all blocks and not the second ones."""
    with daemon_in(tmp_path) as daemon:
        bound = 4 * (4096 + 16) + 4096
        rank = rank_of(Cache(4), layered=True, bound_bytes=bound)
        daemon.kill()  # nothing is acknowledged, so nothing makes room
        jobs = [job(daemon, "chunk", 4)]
        for layer in range(LAYERS):
            rank.save_layer(jobs, layer)
        rank.save_rest(jobs)
        reached, _ = rank.take_progress()
        assert list(reached.values()) == [0] and rank.shed_blocks == 4
        rank.close()


@pytest.mark.parametrize("buffered", (True, False))
def test_without_overlap_the_blocks_are_there_when_the_save_is_over(
    tmp_path: Path, buffered: bool
) -> None:
    with daemon_in(tmp_path) as daemon:
        rank = rank_of(Cache(4), overlap=False, buffered=buffered)
        rank.save_rest([job(daemon, "waited", 4)])
        assert stats(daemon)["blocks"] == 4
        rank.close()
