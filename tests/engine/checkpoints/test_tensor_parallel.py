"""Stock `vllm serve` on two ranks: one is killed in decode, and another engine of two ranks goes on
from both ranks' blocks, token for token. Real engines, a real state daemon."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from relume.events.vocabulary import RestoreDone, RestoreStarted
from relume.events.wire import frames
from relume.events.wire.kv import kv_messages as m
from tests.engine import client
from tests.engine.checkpoints.restored_requests import (
    BLOCK,
    LONG,
    PATH,
    body_for,
    connector,
    endpoint,
    forget_prefixes,
    full_blocks,
    outcome,
    stream_until,
)
from tests.engine.fleet import Engine, StockServe, engine_of, wait_until
from tests.processes import ranks
from tests.state_daemon.daemon import Daemon, daemon_in, hello, local, peer_of, stats
from tests.suite.outcomes import inconclusive

pytestmark = [pytest.mark.full, pytest.mark.timeout(600)]
TWO = ("--tensor-parallel-size", "2")
TOKENS, CUT = 72, 40


def held_by_rank(daemon: Daemon, request: str) -> dict[int, int]:
    """Blocks held of each rank."""
    with peer_of(local(daemon.socket), hello=hello("control")) as control:
        answer, _ = control.ask(m.Ask(0, (request,)), 5.0)
        return {p.rank: p.blocks for p in answer.positions}


def rank_killed(engine: Engine, daemon: Daemon, name: str) -> list[int]:
    """The ids that a client had when a rank was killed; both ranks' blocks of them are held."""
    blocks = full_blocks(engine, CUT)
    headers = client.headers_for(request=name, checkpoint=endpoint(daemon))
    connection, ids = stream_until(engine.port, headers, CUT, body_for(**LONG))

    def held() -> bool:
        found = held_by_rank(daemon, name)
        return set(found) == {0, 1} and min(found.values()) >= blocks

    wait_until(held, "both ranks' blocks are held")
    os.kill(ranks(engine.pid)[1], signal.SIGKILL)
    wait_until(lambda: not engine.alive(), "the engine ended with its rank")
    connection.close()
    return ids[:CUT]


def test_a_killed_ranks_request_continues_from_the_blocks_of_all_ranks(
    tmp_path: Path, tiny_model: Path
) -> None:
    from relume.engine_shim.engine.selftest import LATE

    stock = StockServe(tmp_path, tiny_model)
    with (
        daemon_in(tmp_path, budget_bytes=64 << 20) as daemon,
        engine_of(stock.start(*connector(), *TWO)) as first,
        engine_of(stock.start(*connector(), *TWO, VLLM_SERVER_DEV_MODE="1")) as second,
    ):
        for engine in (first, second):
            engine.wait_ready()
            tried = engine.state()["exact"]["restore"]
            if tried == LATE:
                inconclusive("two ranks took longer for their self-test than it has")
            assert tried is True
            assert sorted(ranks(engine.pid)) == [0, 1]
        assert first.agent.layout == second.agent.layout
        body = body_for(max_tokens=TOKENS)
        expected = client.ask(second.port, PATH, body, request="plain")
        assert len(set(expected.ids)) > 30, "a degenerate output would prove nothing"
        ids = rank_killed(first, daemon, "killed")
        assert ids == expected.ids[:CUT]
        possible = full_blocks(second, CUT)
        forget_prefixes(second)
        before = stats(daemon)["served"]
        rest = client.ask(
            second.port, PATH, body, attempt=2, request="killed", resume=("continue", ids),
            created=client.created_of(expected.payload), response_id="killed",
            restore=endpoint(daemon),
        )  # fmt: skip
        assert rest.ids == expected.ids[CUT:]
        assert isinstance(rest.last, frames.End)
        wait_until(lambda: len(outcome(second, "killed")) == 4, "both ranks report")
        events = outcome(second, "killed")
        done = [e for e in events if isinstance(e, RestoreDone)]
        assert len(done) == sum(isinstance(e, RestoreStarted) for e in events) == 2, events
        assert {e.tokens for e in done} == {possible * BLOCK}
        layout = second.agent.layout
        assert layout is not None
        assert [2 * e.bytes for e in done] == [possible * layout.block_bytes] * 2
        assert stats(daemon)["served"] == before + 2 * possible
        admitted = [
            c for c in second.agent.changes("killed") if type(c).__name__ == "RequestAdmitted"
        ]
        assert admitted[0].cached_tokens == possible * BLOCK
