"""Envelopes in the daemon: bounded like blocks, dropped with the request, expired by age."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from engine_shim.kv_stream import messages as m
from engine_shim.kv_stream.errors import Refusal
from engine_shim.state_daemon.arena import Arena
from engine_shim.state_daemon.service import Service, Session
from engine_shim.state_daemon.store import BlockStore


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


def test_an_envelope_nobody_touches_expires(store: BlockStore) -> None:
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
        hello = m.Hello(m.VERSION, "w0", 1, 1, role, b"")
        assert isinstance(
            m.decode(session.answer(m.encode(hello), memoryview(b"")).header), m.Welcome
        )
        return m.decode(session.answer(m.encode(message), memoryview(b"")).header)

    kept = ask("keeper", m.Keep(7, "q", 1, b"body"))
    assert kept == m.Done(7, 0, 4)
    assert ask("keeper", m.Recall(8, "q")) == m.Envelope(8, 1, b"body")
    assert ask("keeper", m.Recall(9, "r")).code == "unknown"
    assert ask("control", m.Recall(9, "q")).code == "authentication"
    huge = m.Keep(1, "q", 1, bytes(m.MAX_ENVELOPE_BYTES + 1))
    assert ask("keeper", huge).code == "malformed"
