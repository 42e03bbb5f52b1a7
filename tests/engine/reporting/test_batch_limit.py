"""A live engine whose agent limits how many requests run at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relume.engine_shim.engine.progress import Progress
from tests.engine import client
from tests.engine.fleet import Engine, Zygote, engine_of, wait_until

pytestmark = pytest.mark.full

REQUESTS, TOKENS = 8, 600
PERCENT, LIMIT = 25, 4
"""Of the 16 requests that an engine of these tests runs at once."""


def ask(engine: Engine, number: int) -> list[int]:
    body = {
        "model": "tiny", "prompt": f"Story {number}: once", "max_tokens": TOKENS, "temperature": 0,
        "ignore_eos": True,
    }  # fmt: skip
    ids: list[int] = client.ask(engine.port, "/v1/completions", body).ids
    return ids


def test_further_requests_wait_while_the_limit_holds_and_run_when_it_is_lifted(
    zygote: Zygote, tmp_path: Path
) -> None:
    page = Progress(str(tmp_path / "progress"))
    with engine_of(zygote.fork(RELUME_PROGRESS=str(tmp_path / "progress"))) as engine:
        ask(engine, 0)
        engine.wait_idle()
        page.limit_batch(PERCENT)
        before = len(engine.agent.steps)
        with ThreadPoolExecutor(REQUESTS) as clients:
            answers = [clients.submit(ask, engine, number) for number in range(REQUESTS)]
            wait_until(lambda: page.read()["waiting"] == REQUESTS - LIMIT, "they wait")
            later = len(engine.agent.steps) + 20
            wait_until(lambda: len(engine.agent.steps) >= later, "some steps later")
            assert page.read()["waiting"] == REQUESTS - LIMIT, "they still do"
            limited = engine.agent.steps[before:]
            page.limit_batch(100)
            wait_until(lambda: page.read()["waiting"] == 0, "all run")
            assert [len(answer.result()) for answer in answers] == [TOKENS] * REQUESTS
        engine.wait_idle()
    assert max(step.batch for step in limited) == LIMIT
    assert max(step.batch for step in engine.agent.steps[before:]) == REQUESTS
