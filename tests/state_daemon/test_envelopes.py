"""Envelopes in the daemon: bounded like blocks, dropped with the request, expired by age."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from relume.engine_shim.checkpoints.daemon.service import Service, Session
from relume.engine_shim.checkpoints.daemon.store.arena import Arena
from relume.engine_shim.checkpoints.daemon.store.block_store import BlockStore
from relume.engine_shim.checkpoints.link.image import digest_of
from relume.events.wire.kv import kv_messages as m
from relume.events.wire.kv.kv_errors import Refusal


@pytest.fixture
def store() -> Iterator[BlockStore]:
    store = BlockStore(Arena(16 << 10, allow_unlocked=True), ttl_s=10.0)
    yield store
    store.close()


def test_an_envelope_counts_into_the_budget_and_goes_with_its_request(store: BlockStore) -> None:
    store.keep("q", 1, b"e" * 5000, 0.0)
    assert store.stats()["memory_used"] >= 5000
    assert store.envelopes.recall("q") == (1, b"e" * 5000)
    with pytest.raises(Refusal, match="budget"):
        store.keep("r", 1, b"e" * 12000, 0.0)
    store.keep("q", 2, b"later", 0.0)
    with pytest.raises(Refusal, match="fenced"):
        store.keep("q", 1, b"earlier", 0.0)
    store.drop("q", 1)
    assert store.envelopes.recall("q") == (2, b"later")
    store.drop("q", 2)
    with pytest.raises(Refusal, match="unknown"):
        store.envelopes.recall("q")
    with pytest.raises(Refusal, match="fenced"):
        store.keep("q", 2, b"after the end", 0.0)
    assert store.stats()["memory_used"] == 0


def test_an_unused_envelope_expires(store: BlockStore) -> None:
    store.keep("q", 1, b"one", 0.0)
    store.keep("r", 1, b"two", 0.0)
    store.envelopes.touch("r", 5.0)
    store.expire(11.0)
    assert store.stats()["envelopes"] == 1
    assert store.envelopes.recall("r") == (1, b"two")


def test_only_keepers_keep_and_ask(store: BlockStore) -> None:
    service = Service(store, "h", 1, b"", lambda: 0.0)

    def ask(role: str, message: m.Message) -> m.Message:
        session = Session(service, trusted=True, shared=True)
        hello = m.Hello(
            version=m.VERSION, worker="w0", epoch=1, incarnation=1, role=role, nonce=b""
        )
        assert isinstance(
            m.decode(session.answer(m.encode(hello), memoryview(b"")).header), m.Welcome
        )
        return m.decode(session.answer(m.encode(message), memoryview(b"")).header)

    kept = ask("keeper", m.Keep(7, "q", 1, b"body"))
    assert kept == m.Done(7, 0, 4)
    assert ask("keeper", m.Recall(8, "q")) == m.Envelope(8, 1, b"body")
    assert ask("keeper", m.Recall(9, "r")).code == "unknown"
    assert ask("control", m.Recall(9, "q")).code == "authentication"
    huge = m.Keep(1, "q", 1, bytes(m.MAX_INLINE_ENVELOPE + 1))
    assert ask("keeper", huge).code == "malformed"


LARGE = random.Random(7).randbytes(m.MAX_INLINE_ENVELOPE + 5000)


@pytest.fixture
def large() -> Iterator[BlockStore]:
    store = BlockStore(Arena(512 << 10, allow_unlocked=True), ttl_s=10.0)
    yield store
    store.close()


def keeper(store: BlockStore) -> Callable[..., tuple[Any, bytes]]:
    session = Session(Service(store, "h", 1, b"", lambda: 0.0), trusted=True, shared=True)

    def ask(message: m.Message, chunk: bytes = b"") -> tuple[Any, bytes]:
        reply = session.answer(m.encode(message), memoryview(chunk))
        return m.decode(reply.header), b"".join(map(bytes, reply.parts))

    assert isinstance(
        ask(
            m.Hello(
                version=m.VERSION, worker="w0", epoch=1, incarnation=1, role="keeper", nonce=b""
            )
        )[0],
        m.Welcome,
    )
    return ask


def test_a_large_envelope_is_a_chunk_and_counts_like_any(large: BlockStore) -> None:
    ask = keeper(large)
    told = m.KeepChunk(1, "q", 1, digest_of(LARGE))
    assert ask(told, LARGE)[0] == m.Done(1, 0, len(LARGE))
    assert ask(m.Recall(2, "q")) == (m.Envelope(2, 1, b""), LARGE)
    figures = large.stats()
    assert figures["memory_used"] >= figures["envelope_bytes"] == len(LARGE)
    room = large.arena.budget - figures["memory_used"]
    other = bytes(room + 1)
    refused = ask(m.KeepChunk(3, "r", 1, digest_of(other)), other)[0]
    assert refused.code == "budget"
    figures = large.stats()
    assert (figures["envelopes_taken"], figures["envelopes_refused"]) == (1, 1)
    large.drop("q", 1)
    assert large.stats()["memory_used"] == large.stats()["envelope_bytes"] == 0


def test_a_damaged_envelope_is_neither_taken_nor_given(large: BlockStore) -> None:
    ask = keeper(large)
    refused = ask(m.KeepChunk(1, "q", 1, digest_of(b"another")), LARGE)[0]
    assert refused.code == "digest" and large.stats()["memory_used"] == 0
    for envelope in (LARGE, b"a small one"):
        assert isinstance(ask(m.KeepChunk(2, "q", 1, digest_of(envelope)), envelope)[0], m.Done)
        kept = large.envelopes._stored["q"]
        large.arena.view(kept.offset, kept.length)[3] ^= 4
        assert ask(m.Recall(3, "q"))[0].code == "digest"
        assert ask(m.Recall(4, "q"))[0].code == "unknown", "it is forgotten"


def test_no_envelope_beyond_a_chunk_or_of_nothing(large: BlockStore) -> None:
    ask = keeper(large)
    for envelope in (b"", bytes(m.MAX_ENVELOPE_BYTES + 1)):
        asked = m.KeepChunk(1, "q", 1, digest_of(envelope))
        assert ask(asked, envelope)[0].code == "malformed"
