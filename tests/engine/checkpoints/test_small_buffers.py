"""An engine whose buffers between its cache and the links hold a few blocks (`staging_bytes`), so
that a prompt takes several: what it saves another engine goes on from, and it goes on from what
another saved, token for token. Real engines, a real state daemon."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine import client, matrix
from tests.engine.checkpoints.restored_requests import BLOCK, connector
from tests.engine.checkpoints.test_restored_matrix import (
    ROWS,
    body_of,
    killed,
    restored,
    taken_up,
)
from tests.engine.fleet import Engine, Zygote, engine_of, wait_until
from tests.state_daemon.daemon import Daemon, daemon_in

pytestmark = pytest.mark.full
OF_ROWS = ("greedy", "seeded", "choices")


def goes_on(engine: Engine, daemon: Daemon, names: dict[str, str]) -> list[str]:
    """Takes each row up at two cuts; what differs from the whole answer."""
    wrong = []
    for name, row in names.items():
        client.post(engine.port, "/reset_prefix_cache", {})
        whole = matrix.run(engine, ROWS[row][0], body_of(row), f"{name}-whole")
        expected = matrix.seen(whole)
        assert all(len(set(c.ids)) > 30 for c in expected.choices.values()), "proves little"
        created = client.created_of(whole.payload)
        edge = -expected.usage["prompt_tokens"] % BLOCK or BLOCK
        for cut in (1, (edge + 5) * len(expected.choices)):
            before = restored(engine, name)
            joined = taken_up(engine, daemon, name, row, whole.tokens[:cut], created)
            wait_until(lambda n=name, b=before: restored(engine, n) > b, "restored")
            found = matrix.differences(expected, matrix.seen(joined))
            wrong += [f"{row}, cut at {cut}: {text[:300]}" for text in found]
    return wrong


def test_killed_requests_continue_from_blocks_that_took_several_buffers(
    zygote: Zygote, tmp_path: Path
) -> None:
    few = connector(staging_bytes=1 << 18)
    with (
        daemon_in(tmp_path, budget_bytes=256 << 20) as daemon,
        engine_of(zygote.fork(*few, VLLM_SERVER_DEV_MODE="1")) as small,
        engine_of(zygote.fork(*connector(), VLLM_SERVER_DEV_MODE="1")) as plain,
    ):
        for engine in (small, plain):
            assert engine.state()["exact"]["restore"] is True
        assert small.agent.layout == plain.agent.layout, "they may use each other's blocks"
        with engine_of(zygote.fork(*connector())) as first:
            written = {f"in-{row}": row for row in OF_ROWS}
            killed(first, daemon, written)
        assert not goes_on(small, daemon, written)
        copied = {f"out-{row}": row for row in OF_ROWS}
        killed(small, daemon, copied)
        assert not goes_on(plain, daemon, copied)
