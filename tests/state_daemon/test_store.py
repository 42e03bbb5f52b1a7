"""What is taken, refused, shared, evicted and forgotten; and what it costs, to the byte."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.engine_shim.checkpoints.daemon.errors import CannotHold
from relume.engine_shim.checkpoints.daemon.store.arena import Arena
from relume.engine_shim.checkpoints.daemon.store.block_store import BlockStore
from relume.engine_shim.checkpoints.daemon.store.extents import PAGE
from relume.engine_shim.checkpoints.daemon.store.file_tier import FileTier
from relume.engine_shim.checkpoints.link.image import digest_of
from relume.events.wire.kv.kv_errors import Refusal
from relume.events.wire.kv.kv_messages import Piece, Position
from tests.state_daemon.daemon import fingerprint

IMAGE = 2 * PAGE


@pytest.fixture
def store() -> Iterator[BlockStore]:
    store = make(8)
    yield store
    store.close()


def make(blocks: int, cold: FileTier | None = None, **options: float) -> BlockStore:
    return BlockStore(Arena(blocks * IMAGE, allow_unlocked=True), cold, **options)


def image(content: int, size: int = IMAGE) -> bytes:
    return random.Random(content).randbytes(size)


def put(
    store: BlockStore,
    request: str,
    index: int,
    content: int | None = None,
    attempt: int = 1,
    now_s: float = 0.0,
    priority: int = 1,
    child: int = 0,
    fits: str = "m",
) -> Position:
    data = image(hash((request, index)) if content is None else content)
    piece = Piece(
        request=request,
        child=child,
        rank=0,
        index=index,
        attempt=attempt,
        offset=0,
        length=len(data),
        total=len(data),
        digest=digest_of(data),
        priority=priority,
    )
    return store.put("w0", fingerprint(model=fits), piece, memoryview(data), now_s)


def code_of(*args: object, **options: object) -> str:
    with pytest.raises(Refusal) as refused:
        put(*args, **options)  # type: ignore[arg-type]
    return refused.value.code


def held(store: BlockStore, request: str) -> int:
    positions, _ = store.position(request)
    return positions[0].blocks if positions else 0


def test_the_prefix_ends_at_the_first_gap_whatever_the_order(store: BlockStore) -> None:
    assert put(store, "a", 2).blocks == 0
    assert put(store, "a", 0).blocks == 1
    assert put(store, "a", 1).blocks == 3
    assert put(store, "a", 1).blocks == 3, "a duplicate changes nothing"
    assert store.stats()["memory_used"] == 3 * IMAGE


def test_equal_blocks_are_stored_once_and_live_as_long_as_the_last(store: BlockStore) -> None:
    put(store, "a", 0, content=7)
    put(store, "b", 0, content=7)
    put(store, "b", 1, content=7)
    assert store.stats()["memory_used"] == IMAGE
    assert store.drop("a", 1) == (1, IMAGE)
    assert bytes(store.contents.verified(store.run("b", 0, 0, 0, 1)[0]) or b"") == image(7)
    assert store.drop("b", 1) == (2, 2 * IMAGE)
    assert store.stats()["memory_used"] == store.stats()["contents"] == 0


def test_equal_digests_of_other_bytes_are_not_shared(store: BlockStore) -> None:
    put(store, "a", 0, content=7)
    content = store.run("a", 0, 0, 0, 1)[0]
    store.contents.writable(content)[0] ^= 1  # as a collision would be
    put(store, "b", 0, content=7)
    assert store.stats()["memory_used"] == 2 * IMAGE


def test_another_models_equal_bytes_are_not_shared(store: BlockStore) -> None:
    put(store, "a", 0, content=7)
    put(store, "b", 0, content=7, fits="other")
    assert store.stats()["memory_used"] == 2 * IMAGE


def test_damaged_bytes_are_refused_and_leave_nothing(store: BlockStore) -> None:
    data = image(1)
    piece = Piece(
        request="a",
        child=0,
        rank=0,
        index=0,
        attempt=1,
        offset=0,
        length=IMAGE,
        total=IMAGE,
        digest=digest_of(data),
    )
    with pytest.raises(Refusal) as refused:
        store.put("w0", fingerprint(), piece, memoryview(b"\0" + data[1:]), 0.0)
    assert refused.value.code == "digest"
    assert store.stats()["memory_used"] == store.stats()["requests"] == 0


def test_a_bit_flipped_in_memory_is_found_and_not_shared_further(store: BlockStore) -> None:
    for index in range(3):
        put(store, "a", index)
    content = store.run("a", 0, 0, 1, 1)[0]
    store.contents.writable(content)[100] ^= 4
    assert store.contents.verified(content) is None
    store.discard("a", 0, 0, 1)
    assert held(store, "a") == 1, "what is behind a damaged block is of no use"
    assert store.stats()["memory_used"] == IMAGE


def test_a_damaged_image_that_another_request_shares_stays_accounted(store: BlockStore) -> None:
    put(store, "a", 0, content=1)
    put(store, "b", 0, content=1)
    store.discard("a", 0, 0, 0)
    assert store.stats()["contents"] == 1 and store.stats()["memory_used"] == IMAGE
    put(store, "c", 0, content=1)
    assert store.stats()["contents"] == 2, "nobody becomes the damaged one"


def test_an_older_attempt_is_fenced_and_an_ended_request_stays_ended(store: BlockStore) -> None:
    put(store, "a", 0, attempt=2)
    assert code_of(store, "a", 1, attempt=1) == "fenced"
    store.drop("a", 2)
    assert code_of(store, "a", 0, attempt=2) == "fenced"
    assert put(store, "a", 0, attempt=3).blocks == 1


def test_what_an_older_attempt_computed_behind_a_changed_block_is_void(store: BlockStore) -> None:
    for index in range(4):
        put(store, "a", index, content=index)
    assert put(store, "a", 0, content=0, attempt=2).blocks == 4, "the same block is the same"
    assert put(store, "a", 1, content=99, attempt=2).blocks == 2
    assert store.stats()["memory_used"] == 2 * IMAGE


def test_what_a_corrupt_worker_wrote_goes_and_may_not_come_again(store: BlockStore) -> None:
    for index in range(3):
        put(store, "a", index, attempt=2)
    assert store.void("a", 2) == (3, 3 * IMAGE) and store.stats()["voided"] == 3
    assert held(store, "a") == 0 and store.stats()["memory_used"] == 0
    assert code_of(store, "a", 3, attempt=2) == "fenced", "it was on its way"
    assert put(store, "a", 0, attempt=3).blocks == 1


def test_of_a_void_attempt_only_what_a_later_one_confirmed_stays(store: BlockStore) -> None:
    """The later one was faster than the leader's decision."""
    for index in range(4):
        put(store, "a", index, content=index)
    assert put(store, "a", 0, content=0, attempt=2).blocks == 4, "the rest is the older one's"
    assert store.void("a", 1) == (3, 3 * IMAGE)
    assert held(store, "a") == 1 and store.stats()["memory_used"] == IMAGE
    assert store.void("a", 1) == (0, 0)
    assert put(store, "a", 1, content=99, attempt=2).blocks == 2


def test_another_fingerprint_under_the_same_attempt_is_refused(store: BlockStore) -> None:
    put(store, "a", 0)
    assert code_of(store, "a", 1, fits="other") == "fingerprint"
    assert put(store, "a", 0, attempt=2, fits="other").blocks == 1, "a new attempt begins anew"
    assert store.stats()["blocks"] == 1


def test_a_full_store_refuses_what_is_worth_less_than_what_it_holds(store: BlockStore) -> None:
    for index in range(8):
        put(store, "long", index)
    assert code_of(store, "short", 0) == "budget"
    assert held(store, "long") == 8
    assert store.stats()["requests"] == 1


def test_a_full_store_takes_what_it_holds_for_another_already(store: BlockStore) -> None:
    """Blocks of one request serve another's identical prefix: no room, and the same checks."""
    for index in range(8):
        put(store, "long", index, content=index)
    for index in range(3):
        assert put(store, "short", index, content=index).blocks == index + 1
    assert store.stats()["memory_used"] == 8 * IMAGE and store.stats()["evicted"] == 0
    assert code_of(store, "short", 3, content=99) == "budget"
    store.drop("long", 1)
    assert held(store, "short") == 3 and store.stats()["memory_used"] == 3 * IMAGE
    for found, index in zip(store.run("short", 0, 0, 0, 3), range(3), strict=True):
        assert bytes(store.contents.verified(found) or b"") == image(index)


def test_the_least_worth_goes_first_from_its_tail(store: BlockStore) -> None:
    for index in range(3):
        put(store, "small", index)
    for index in range(5):
        put(store, "large", index)
    assert put(store, "large", 5).blocks == 6
    assert held(store, "small") == 2, "its prefix is still of use"
    put(store, "large", 6)
    put(store, "large", 7)
    assert held(store, "small") == 0 and held(store, "large") == 8
    ends = [c for c in store.ledger.since(0, 99)[1] if c.request == "small"]
    assert [c.reason for c in ends] == ["evicted"]


def test_priority_protects(store: BlockStore) -> None:
    for index in range(3):
        put(store, "dear", index, priority=10)
    for index in range(5):
        put(store, "cheap", index)
    assert code_of(store, "cheap", 5) == "budget"
    assert held(store, "dear") == 3


def test_a_pinned_block_stays_until_its_reader_is_done(store: BlockStore) -> None:
    put(store, "a", 0, content=3)
    content = store.run("a", 0, 0, 0, 1)[0]
    store.contents.pin(content)
    store.drop("a", 1)
    assert store.stats()["memory_used"] == IMAGE
    assert bytes(store.contents.verified(content) or b"") == image(3)
    store.contents.unpin(content)
    assert store.stats()["memory_used"] == 0


def test_orphans_expire_and_touched_ones_do_not() -> None:
    store = make(4, ttl_s=10.0)
    put(store, "orphan", 0, now_s=0.0)
    put(store, "asked", 0, now_s=0.0)
    store.touch("asked", 9.0)
    assert store.expire(15.0) == ["orphan"]
    assert held(store, "asked") == 1
    store.close()


def test_cold_blocks_go_to_the_file_and_come_back_verified(tmp_path: Path) -> None:
    store = make(4, FileTier(str(tmp_path), 4 * IMAGE), cold_after_s=5.0)
    for index in range(4):
        put(store, "old", index, now_s=0.0)
    for index in range(4):
        put(store, "new", index, now_s=10.0)
    figures = store.stats()
    assert (figures["demoted"], figures["memory_used"], figures["file_used"]) == (
        4, 4 * IMAGE, 4 * IMAGE,
    )  # fmt: skip
    assert held(store, "old") == held(store, "new") == 4
    for index, content in enumerate(store.run("old", 0, 0, 0, 9)):
        assert content.tier == "file"
        assert bytes(store.contents.verified(content) or b"") == image(hash(("old", index)))
    assert list(tmp_path.iterdir()) == [], "the file has no name"
    assert code_of(store, "third", 0, now_s=12.0) == "budget", "both tiers are full"
    store.close()


def test_a_full_disk_keeps_blocks_in_memory(tmp_path: Path) -> None:
    cold = FileTier(str(tmp_path), 64 * IMAGE)
    store = make(2, cold, cold_after_s=0.0)
    put(store, "old", 0)
    put(store, "old", 1)
    import os

    readonly = os.open(tmp_path, os.O_RDONLY)  # every write to it fails
    real, cold._fd = cold._fd, readonly
    assert code_of(store, "new", 0, now_s=9.0) == "budget"
    assert held(store, "old") == 2 and cold.used == 0
    cold._fd = real
    os.close(readonly)
    store.close()


def test_layers_arrive_in_any_order_twice_and_interleaved(store: BlockStore) -> None:
    data = image(5)
    cuts = [(0, 100), (100, 5000), (5100, IMAGE - 5100)]
    for offset, length in (cuts[2], cuts[0], cuts[2], cuts[1], cuts[0]):
        digest = digest_of(data) if offset + length == IMAGE else b""
        piece = Piece(
            request="a",
            child=0,
            rank=0,
            index=0,
            attempt=1,
            offset=offset,
            length=length,
            total=IMAGE,
            digest=digest,
        )
        store.put("w0", fingerprint(), piece, memoryview(data)[offset : offset + length], 0.0)
    assert held(store, "a") == 1
    assert bytes(store.contents.verified(store.run("a", 0, 0, 0, 1)[0]) or b"") == data
    assert store.stats()["assemblies"] == 0


def test_a_half_arrived_block_is_in_the_budget_and_expires() -> None:
    store = make(1, ttl_s=1.0)
    store.put(
        "w0",
        fingerprint(),
        Piece(request="a", child=0, rank=0, index=0, attempt=1, offset=0, length=10, total=IMAGE),
        memoryview(b"x" * 10),
        0.0,
    )
    assert store.stats()["memory_used"] == IMAGE
    store.expire(5.0)
    assert store.stats()["memory_used"] == 0
    store.close()


def test_what_others_hold_now_is_dropped_and_may_come_again(store: BlockStore) -> None:
    put(store, "a", 0)
    assert store.drop("a", 1, moved=True) == (1, IMAGE)
    put(store, "a", 0)
    assert store.drop("a", 1) == (1, IMAGE)
    with pytest.raises(Refusal):
        put(store, "a", 0)


def test_memory_freed_goes_back_to_the_host(store: BlockStore) -> None:
    for index in range(8):
        put(store, "a", index)
    assert store.stats()["memory_resident"] == 8 * IMAGE
    store.drop("a", 1)
    store.arena.trim()
    assert store.stats()["memory_resident"] == 0


def test_a_budget_the_host_cannot_give_is_refused() -> None:
    with pytest.raises(CannotHold):
        Arena(1 << 50, allow_unlocked=True)
    with pytest.raises(CannotHold):
        Arena(1 << 20, reserve=1 << 50, allow_unlocked=True)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("pppppdxc"), st.sampled_from("abcd"), st.integers(0, 7),
            st.integers(0, 5), st.integers(1, 3),
        ),
        max_size=120,
    )
)  # fmt: skip
def test_the_account_is_true_after_any_story(steps: list[tuple[str, str, int, int, int]]) -> None:
    """The budget is never exceeded, every byte has an owner, positions are true (I8)."""
    store = make(6, ttl_s=20.0)
    now_s = 0.0
    for kind, request, index, content, attempt in steps:
        now_s += 1.0
        try:
            if kind == "p":
                put(store, request, index, content, attempt, now_s, priority=attempt)
            elif kind == "d":
                store.drop(request, attempt)
            elif kind == "c":
                store.discard(request, 0, 0, index)
            else:
                store.expire(now_s)
        except Refusal:
            pass
        figures = store.stats()
        assert figures["memory_used"] <= figures["memory_budget"]
        assert figures["memory_used"] == figures["contents"] * IMAGE
        blocks = sum(len(s.blocks) for h in store._holdings.values() for s in h.sequences.values())
        assert figures["blocks"] == blocks
        for name in "abcd":
            assert held(store, name) == len(store.run(name, 0, 0, 0, 99))
    for name in "abcd":
        store.drop(name, 9)
    assert store.stats()["memory_used"] == store.stats()["blocks"] == 0
    store.close()
