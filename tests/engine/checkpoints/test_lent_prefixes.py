"""A request goes on from another one's blocks of the same prefix; real engines, a real
state daemon. Nothing is lent across salts or prefixes, and damage is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relume.events.vocabulary import RestoreDone, RestoreFailed
from relume.events.wire import frames
from tests.engine import client
from tests.engine.checkpoints.restored_requests import (
    BLOCK,
    PATH,
    PROMPT,
    body_for,
    connector,
    endpoint,
    flip,
    forget_prefixes,
    full_blocks,
    held_blocks,
    outcome,
)
from tests.engine.fleet import Engine, Zygote, engine_of, wait_until
from tests.signals import let_run, stop
from tests.state_daemon.daemon import Daemon, daemon_in, stats

pytestmark = pytest.mark.full
TAIL = 20
"""Tokens delivered before the request is taken up."""


@pytest.fixture(scope="module")
def holder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon_in(tmp_path_factory.mktemp("state"), budget_bytes=64 << 20) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def reader(zygote: Zygote) -> Iterator[Engine]:
    with engine_of(zygote.fork(*connector(), VLLM_SERVER_DEV_MODE="1")) as engine:
        yield engine


def begun(engine: Engine, daemon: Daemon, name: str, blocks: int) -> Any:
    """The connection of a request that stands still (with its engine) once so much of it is
    held."""
    headers = client.headers_for(request=name, checkpoint=endpoint(daemon))
    connection, _ = client.open_stream(engine.port, PATH, body_for(max_tokens=1200), headers)
    stop(engine.pid)

    def held() -> bool:
        if held_blocks(daemon, name) >= blocks:
            return True
        let_run(engine.pid)
        return False

    wait_until(held, "the blocks are held")
    return connection


def resumed(engine: Engine, daemon: Daemon, name: str, whole: Any, **options: Any) -> Any:
    """`name`, of which the holder has nothing, taken up behind the first tokens of `whole`."""
    forget_prefixes(engine)
    return client.ask(
        engine.port, PATH, body_for(**options), attempt=2, request=name, response_id=name,
        resume=("continue", whole.ids[:TAIL]), restore=endpoint(daemon),
        created=client.created_of(whole.payload),
    )  # fmt: skip


def test_another_requests_identical_prefix_is_restored_and_nothing_else(
    zygote: Zygote, reader: Engine, holder: Daemon
) -> None:
    other = PROMPT.replace("Block 0", "Block 1", 1)
    expected = client.ask(reader.port, PATH, body_for(), request="plain")
    elsewhere = client.ask(reader.port, PATH, body_for(prompt=other), request="other-plain")
    assert len(set(expected.ids)) > 30
    possible = full_blocks(reader, TAIL)
    prompt = full_blocks(reader, 1)
    with engine_of(zygote.fork(*connector())) as lender:
        # Greedy, so that it goes on as the reader's request will.
        connection = begun(lender, holder, "lender", possible)
        salted = resumed(reader, holder, "salted", expected, cache_salt="s")
        assert salted.ids == expected.ids[TAIL:], "a salt changes what is shared, not the text"
        strange = resumed(reader, holder, "strange", elsewhere, prompt=other)
        assert strange.ids == elsewhere.ids[TAIL:]
        assert not [e for e in reader.agent.events if e.request in ("salted", "strange")]
        assert stats(holder)["lent"] == 0

        rest = resumed(reader, holder, "borrower", expected)
        assert rest.ids == expected.ids[TAIL:] and isinstance(rest.last, frames.End)
        started, done = outcome(reader, "borrower")
        assert started.lender == "lender" and isinstance(done, RestoreDone), done
        assert done.tokens == possible * BLOCK
        admitted = [
            c for c in reader.agent.changes("borrower") if type(c).__name__ == "RequestAdmitted"
        ]
        assert admitted[0].cached_tokens == done.tokens
        assert stats(holder)["lent"] == possible

        flip(holder, prompt - 1)
        rest = resumed(reader, holder, "bitten", expected)
        assert rest.ids == expected.ids[TAIL:]
        failed = outcome(reader, "bitten")[-1]
        assert isinstance(failed, RestoreFailed) and failed.reason == "corrupt"
        assert failed.tokens == (prompt - 1) * BLOCK
        wait_until(lambda: held_blocks(holder, "lender") == prompt - 1, "the lender's too")
        connection.close()


def test_without_a_prefix_cache_no_request_has_anothers_blocks(
    zygote: Zygote, reader: Engine, tmp_path: Path
) -> None:
    """As vLLM itself: the operator has said that requests share nothing."""
    expected = client.ask(reader.port, PATH, body_for(), request="off-plain")
    with (
        daemon_in(tmp_path, budget_bytes=64 << 20) as holder,
        engine_of(zygote.fork(*connector(), "--no-enable-prefix-caching")) as alone,
    ):
        connection = begun(alone, holder, "off-lender", 1)
        assert stats(holder)["prefixes"] == 0
        rest = resumed(reader, holder, "off", expected)
        assert rest.ids == expected.ids[TAIL:]
        assert not [e for e in reader.agent.events if e.request == "off"]
        connection.close()
