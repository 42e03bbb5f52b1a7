"""An engine tries its own checkpoints before it serves, and keeps none when they fail it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relume.engine_shim.generation import SELF_TEST
from tests.engine import client
from tests.engine.checkpoints.restored_requests import (
    PATH,
    body_for,
    connector,
    endpoint,
    full_blocks,
    held_blocks,
)
from tests.engine.checkpoints.test_lent_prefixes import begun
from tests.engine.fleet import Engine, Zygote, engine_of, wait_until
from tests.state_daemon.daemon import daemon_in, stats

pytestmark = pytest.mark.full
TAIL = 20
RESTORE = "restore"
"""`selftest.RESTORE`; that module imports vLLM, and every process of a run collects this one."""


def links(engine: Engine) -> list[str]:
    """Memory shared with holders; a link has its own for as long as it is tried."""
    maps = Path(f"/proc/{engine.pid}/maps").read_text().splitlines()
    return [line for line in maps if "memfd:relume" in line]


def exact(engine: Engine) -> dict[str, Any]:
    return engine.state()["exact"]


def taken_up(engine: Engine, holder: Any, name: str, whole: Any) -> Any:
    return client.ask(
        engine.port, PATH, body_for(), attempt=2, request=name, response_id=name,
        resume=("continue", whole.ids[:TAIL]), restore=endpoint(holder),
        checkpoint=endpoint(holder), created=client.created_of(whole.payload),
    )  # fmt: skip


def test_an_engine_that_restores_wrong_blocks_keeps_and_restores_none(
    zygote: Zygote, tmp_path: Path
) -> None:
    """What another engine wrote soundly is computed there, and nothing it writes is kept."""
    from relume.engine_shim.checkpoints.selftest_restore import RESTORE_DIFFERS

    wrong = connector(module="tests.engine.broken_connector")
    with (
        daemon_in(tmp_path, budget_bytes=64 << 20) as holder,
        engine_of(zygote.fork(*connector())) as sound,
        engine_of(zygote.fork(*wrong)) as broken,
    ):
        found = exact(sound)
        assert found[RESTORE] is True and set(found.values()) == {True}
        assert exact(broken) == {**found, RESTORE: RESTORE_DIFFERS}
        for engine in (sound, broken):
            assert not [e for e in engine.agent.events if e.request.startswith(SELF_TEST)]
            assert not [q for q in engine.agent.steps if q.batch or q.prefill_tokens]
            wait_until(lambda e=engine: not links(e), "no link is left")

        expected = client.ask(sound.port, PATH, body_for(), request="plain")
        assert len(set(expected.ids)) > 30
        least = full_blocks(sound, TAIL)
        connection = begun(sound, holder, "sound", least)
        before = stats(holder)
        rest = taken_up(broken, holder, "sound", expected)
        assert rest.ids == expected.ids[TAIL:]
        assert not [e for e in broken.agent.events if e.request == "sound"]
        after = stats(holder)
        assert (after["served"], after["taken"]) == (before["served"], before["taken"])
        assert held_blocks(holder, "sound") >= least, "nor does it end what it has no part in"
        asked = {"request": "x", "attempt": 1, "incarnation": 1, "holders": [endpoint(holder)]}
        assert client.post(broken.port, "/relume/checkpoint", asked).status == 404
        connection.close()


def test_a_wrong_generator_behind_a_restore_is_found(zygote: Zygote) -> None:
    from relume.engine_shim.checkpoints.selftest_restore import RESTORE_DIFFERS

    scheduler = "tests.engine.broken_scheduler.misrestoring_scheduler"
    with engine_of(zygote.fork(*connector(), "--scheduler-cls", scheduler)) as engine:
        found = exact(engine)
        assert found.pop(RESTORE) == RESTORE_DIFFERS
        assert set(found.values()) == {True}, "recomputed, it goes on as it did"


def test_an_engine_without_checkpoints_says_nothing_of_restores(primary: Engine) -> None:
    assert exact(primary) and RESTORE not in exact(primary)
