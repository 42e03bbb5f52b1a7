"""One request's blocks for another's identical prefix: found by their tokens from block 0 on,
and never where anything else the bytes depend on differs."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relume.engine_shim.checkpoints.daemon.store.arena import Arena
from relume.engine_shim.checkpoints.daemon.store.block_store import BlockStore
from relume.engine_shim.checkpoints.daemon.store.extents import PAGE
from relume.engine_shim.checkpoints.daemon.store.file_tier import FileTier
from relume.engine_shim.checkpoints.link.image import digest_of, pack_tokens
from relume.events.wire.kv import token_chain
from relume.events.wire.kv.kv_errors import Refusal
from relume.events.wire.kv.kv_messages import Piece
from tests.state_daemon.daemon import BLOCK, fingerprint

IMAGE = PAGE
PLAIN = token_chain.scope("")
NOBODY = ("", 0, 0)


def make(blocks: int = 16, cold: FileTier | None = None, **options: float) -> BlockStore:
    return BlockStore(Arena(blocks * IMAGE, allow_unlocked=True), cold, **options)


@pytest.fixture
def store() -> Iterator[BlockStore]:
    store = make()
    yield store
    store.close()


def tokens_of(word: str) -> bytes:
    return pack_tokens([ord(word)] * BLOCK)


def put(
    store: BlockStore,
    request: str,
    index: int,
    word: str,
    *,
    attempt: int = 1,
    child: int = 0,
    rank: int = 0,
    scope: bytes = PLAIN,
    noise: str = "",
    tp: int = 1,
    model: str = "m",
    now_s: float = 0.0,
) -> None:
    """One block whose tokens are `word`; what it holds beside them is `noise`'s."""
    body = random.Random(f"{word}{noise}").randbytes(IMAGE - 4 * BLOCK)
    data = tokens_of(word) + body
    piece = Piece(
        request=request,
        child=child,
        rank=rank,
        index=index,
        attempt=attempt,
        offset=0,
        length=IMAGE,
        total=IMAGE,
        digest=digest_of(data),
        priority=1,
        scope=scope,
    )
    store.put("w0", fingerprint(tp=tp, model=model), piece, memoryview(data), now_s)


def write(store: BlockStore, request: str, words: str, **options: object) -> None:
    for index, word in enumerate(words):
        put(store, request, index, word, **options)  # type: ignore[arg-type]


def chains(words: str, scope: bytes = PLAIN, tp: int = 1, model: str = "m") -> list[bytes]:
    start = token_chain.root(fingerprint(tp=tp, model=model), scope)
    return token_chain.chains(start, map(tokens_of, words))


def match(store: BlockStore, words: str, **options: object) -> tuple[str, int, int]:
    asked = chains(words, **options)  # type: ignore[arg-type]
    options.pop("scope", None)
    return store.match(asked, fingerprint(**options))


def test_the_longest_identical_prefix_is_found(store: BlockStore) -> None:
    write(store, "a", "xyz")
    write(store, "b", "xyuvw")
    assert match(store, "xyzq") == ("a", 0, 3)
    assert match(store, "xyuv") == ("b", 0, 4)
    assert match(store, "xq")[2] == 1
    assert match(store, "qyz") == NOBODY, "alike behind another first block is not alike"
    assert match(store, "") == NOBODY


def test_other_salts_models_and_requests_without_a_scope_share_nothing(store: BlockStore) -> None:
    write(store, "salted", "xyz", scope=token_chain.scope("s"))
    write(store, "other", "xyz", model="other")
    write(store, "alone", "xyz", scope=b"")
    assert match(store, "xyz") == NOBODY
    assert match(store, "xyz", scope=token_chain.scope("t")) == NOBODY
    assert match(store, "xyz", scope=token_chain.scope("s")) == ("salted", 0, 3)
    assert match(store, "xyz", model="other") == ("other", 0, 3)


def test_pieces_that_contradict_each_other_about_it_share_nothing(store: BlockStore) -> None:
    write(store, "a", "xy")
    put(store, "a", 2, "z", scope=token_chain.scope("s"))
    assert match(store, "xyz") == match(store, "xyz", scope=token_chain.scope("s")) == NOBODY
    assert store.stats()["prefixes"] == 0


def test_blocks_out_of_order_count_once_the_gap_is_closed(store: BlockStore) -> None:
    put(store, "a", 1, "y")
    assert match(store, "xy") == NOBODY
    put(store, "a", 0, "x")
    assert match(store, "xy") == ("a", 0, 2)


def test_what_is_lent_is_lent_by_its_chain_only(store: BlockStore) -> None:
    """Between the question and the answer the lender may have become another text."""
    write(store, "a", "xyz")
    asked = chains("xyz")
    assert len(store.lend("a", 0, 0, 1, 9, asked[1])) == 2
    put(store, "a", 0, "q", attempt=2)
    assert store.lend("a", 0, 0, 1, 9, asked[1]) == []
    write(store, "a", "qyz", attempt=2)
    assert len(store.run("a", 0, 0, 0, 9)) == 3, "the same tokens, behind other ones"
    assert store.lend("a", 0, 0, 1, 9, asked[1]) == []
    assert match(store, "xyz") == NOBODY and match(store, "qyz") == ("a", 0, 3)


def test_blocks_of_two_attempts_are_one_prefix_when_the_newer_has_confirmed_it(
    store: BlockStore,
) -> None:
    write(store, "a", "xyz")
    put(store, "a", 2, "q", attempt=2)
    assert match(store, "xyq") == ("a", 0, 2), "what the newer one stands behind is not known yet"
    put(store, "a", 0, "x", attempt=2)
    put(store, "a", 1, "y", attempt=2)
    assert match(store, "xyq") == ("a", 0, 3)


def test_all_ranks_must_have_it(store: BlockStore) -> None:
    write(store, "a", "xyz", tp=2)
    assert match(store, "xyz", tp=2) == NOBODY
    write(store, "a", "xy", rank=1, tp=2)
    assert match(store, "xyz", tp=2) == ("a", 0, 2)
    write(store, "b", "xyz", rank=1, tp=2)
    assert match(store, "xyz", tp=2) == ("a", 0, 2), "of two requests is not of one"
    assert match(store, "xyz") == NOBODY, "tensor-parallel blocks fit no other size"


def test_choices_of_one_request_share_its_prompt(store: BlockStore) -> None:
    write(store, "a", "xyz")
    write(store, "a", "xy", child=3)
    assert match(store, "xyz") == ("a", 0, 3)
    store.discard("a", 0, 0, 1)
    assert match(store, "xyz") == ("a", 3, 2)


@pytest.mark.parametrize("end", ("drop", "evict", "expire", "discard"))
def test_what_is_gone_is_not_lent_and_another_one_takes_over(end: str) -> None:
    store = make(6, ttl_s=10.0)
    write(store, "a", "xy", noise="a")
    write(store, "b", "xy", noise="b", now_s=9.0)
    match end:
        case "drop":
            store.drop("a", 1)
        case "expire":
            store.expire(15.0)
        case "discard":
            store.discard("a", 0, 0, 0)
        case "evict":
            write(store, "large", "1234", now_s=9.0)
            assert store.stats()["evicted"] == 2
    assert match(store, "xyz") == ("b", 0, 2)
    for name in ("a", "b", "large"):
        store.drop(name, 1)
    assert store.stats()["prefixes"] == store.stats()["memory_used"] == 0
    store.close()


def test_a_block_being_read_for_another_outlives_its_owner(store: BlockStore) -> None:
    write(store, "a", "xy")
    lent = store.lend("a", 0, 0, 0, 2, chains("xy")[0])
    for content in lent:
        store.contents.pin(content)
    store.drop("a", 1)
    write(store, "new", "123456")
    assert match(store, "xy") == NOBODY
    for content, word in zip(lent, "xy", strict=True):
        assert bytes(store.contents.verified(content) or b"")[: 4 * BLOCK] == tokens_of(word)
        store.contents.unpin(content)
    assert store.stats()["memory_used"] == 6 * IMAGE


def test_blocks_in_the_file_are_lent_too(tmp_path: object) -> None:
    store = make(2, FileTier(str(tmp_path), 4 * IMAGE), cold_after_s=1.0)
    write(store, "old", "xy")
    write(store, "new", "12", now_s=9.0)
    assert store.stats()["demoted"] == 2
    lent = store.lend("old", 0, 0, 0, 2, chains("xy")[0])
    assert [content.tier for content in lent] == ["file", "file"]
    store.close()


def expected(store: BlockStore) -> dict[str, set[str]]:
    """By request, the texts it holds a prefix of; from the blocks themselves."""
    found: dict[str, set[str]] = {}
    for name, holding in store._holdings.items():
        blocks = holding.sequences[0, 0].blocks
        words, index = "", 0
        while index in blocks:
            if index and blocks[index - 1].attempt < blocks[index].attempt:
                break
            words += chr(bytes(store.contents.read(blocks[index].content))[0])
            found.setdefault(name, set()).add(words)
            index += 1
    return found


STEPS = st.lists(
    st.tuples(
        st.sampled_from("pppppppdxc"), st.sampled_from("ab"), st.integers(0, 3),
        st.sampled_from("xyz"), st.integers(1, 3),
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=80, deadline=None)
@given(STEPS)
def test_the_index_is_true_after_any_story(steps: Sequence[tuple[str, str, int, str, int]]) -> None:
    store = make(5, ttl_s=20.0)
    now_s = 0.0
    for kind, request, index, word, attempt in steps:
        now_s += 1.0
        try:
            if kind == "p":
                put(store, request, index, word, attempt=attempt, now_s=now_s)
            elif kind == "d":
                store.drop(request, attempt)
            elif kind == "c":
                store.discard(request, 0, 0, index)
            else:
                store.expire(now_s)
        except Refusal:
            pass
        held = expected(store)
        texts = set().union(*held.values()) if held else set()
        assert len(store.prefixes) == len(texts)
        for text in texts:
            name, child, count = match(store, text)
            assert (child, count) == (0, len(text)) and text in held[name]
    store.close()
