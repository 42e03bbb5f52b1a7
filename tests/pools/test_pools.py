"""Pools: who fills one, who has it open, that it cannot be changed, and which one is evicted."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator

import pytest

from relume.engine_shim.checkpoints.daemon.store import host_memory
from relume.engine_shim.pools.pool_messages import Busy, Filling, Opened
from relume.engine_shim.pools.pools import NoPool, Pools

PAGE = mmap.PAGESIZE
DIGEST = bytes(32)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def pools() -> Iterator[Pools]:
    made = Pools(4 * PAGE, 0, Clock())
    yield made
    made.close()


def filled(pools: Pools, name: str, connection: int, size: int = PAGE) -> int:
    answer, fd = pools.open(connection, name, size)
    assert isinstance(answer, Filling)
    os.pwrite(fd, name.encode(), 0)
    pools.seal(connection, name, DIGEST)
    return fd


def test_one_engine_fills_it_and_others_open_it_afterwards(pools: Pools) -> None:
    answer, fd = pools.open(1, "a", PAGE)
    assert isinstance(answer, Filling)
    assert pools.open(2, "a", PAGE) == (Busy(), -1)
    os.pwrite(fd, b"weights", 0)
    pools.seal(1, "a", DIGEST)
    answer, other = pools.open(2, "a", PAGE)
    assert answer == Opened(DIGEST) and os.pread(other, 7, 0) == b"weights"


def test_once_sealed_it_cannot_be_changed(pools: Pools) -> None:
    fd = filled(pools, "a", 1)
    for change in (
        lambda: os.pwrite(fd, b"x", 0),
        lambda: os.ftruncate(fd, 2 * PAGE),
        lambda: os.ftruncate(fd, 0),
        lambda: mmap.mmap(fd, PAGE),
    ):
        with pytest.raises(PermissionError):
            change()
    with mmap.mmap(fd, PAGE, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE) as own:
        own[0] = 0x78
    assert os.pread(fd, 1, 0) == b"a"


def test_one_that_is_mapped_for_writing_is_not_sealed(pools: Pools) -> None:
    _, fd = pools.open(1, "a", PAGE)
    with mmap.mmap(fd, PAGE), pytest.raises(NoPool, match="mapped for writing"):
        pools.seal(1, "a", DIGEST)
    assert isinstance(pools.open(2, "a", PAGE)[0], Filling), "it is dropped"


def test_only_its_filler_seals_it(pools: Pools) -> None:
    pools.open(1, "a", PAGE)
    for connection, name in ((2, "a"), (1, "b")):
        with pytest.raises(NoPool, match="not filled by this engine"):
            pools.seal(connection, name, DIGEST)


def test_what_a_dead_engine_did_not_finish_is_dropped(pools: Pools) -> None:
    pools.open(1, "a", PAGE)
    pools.left(1)
    assert isinstance(pools.open(2, "a", PAGE)[0], Filling)


def test_a_finished_one_outlives_its_engines(pools: Pools) -> None:
    filled(pools, "a", 1)
    pools.left(1)
    assert isinstance(pools.open(2, "a", PAGE)[0], Opened)


def test_another_size_is_refused(pools: Pools) -> None:
    filled(pools, "a", 1)
    with pytest.raises(NoPool, match=f"has {PAGE} bytes"):
        pools.open(2, "a", 2 * PAGE)


def test_the_longest_unused_makes_room_and_one_that_is_open_does_not(pools: Pools) -> None:
    for connection, name in enumerate("abcd", 1):
        filled(pools, name, connection)
    for connection in (3, 2, 4):  # a stays open
        pools.left(connection)
    filled(pools, "e", 5, 2 * PAGE)
    for name in "ad":
        assert pools.open(9, name, PAGE)[0] == Opened(DIGEST)
    for name in "bc":
        with pytest.raises(NoPool):
            pools.open(9, name, PAGE)


def test_without_room_it_is_refused_and_nothing_is_dropped(pools: Pools) -> None:
    filled(pools, "a", 1)
    filled(pools, "b", 2)
    pools.left(2)
    with pytest.raises(NoPool, match="--keep-weights-mb"):
        pools.open(3, "c", 4 * PAGE)
    for name in "ab":
        assert pools.open(9, name, PAGE)[0] == Opened(DIGEST)


def test_the_hosts_memory_is_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available", lambda: 3 * PAGE)
    pools = Pools(8 * PAGE, 2 * PAGE, Clock())
    with pytest.raises(NoPool, match="the host can spare"):
        pools.open(1, "a", 2 * PAGE)
    assert isinstance(pools.open(1, "a", PAGE)[0], Filling)
    pools.close()
