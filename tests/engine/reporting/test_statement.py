"""What an engine reports of all its requests when another log begins, which knows none of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from relume.engine_shim.engine.progress import Progress
from relume.events.vocabulary import EngineStep, RequestQueued
from relume.policies.state.fleet import Worker
from tests.engine import client
from tests.engine.fleet import Engine, Zygote, engine_of, wait_until
from tests.policies.story import Story

pytestmark = pytest.mark.full  # vLLM takes seconds to import

BODY = {
    "model": "tiny", "max_tokens": 400, "temperature": 0, "ignore_eos": True, "stream": True,
}  # fmt: skip


def folded(engine: Engine, steps: list[EngineStep]) -> Worker:
    """The account that these reports come to, in a log of their own."""
    story = Story()
    worker = story.worker("w0", engine.incarnation)
    story.tell("w.w0", *steps)
    return worker


def figures(worker: Worker) -> tuple[Any, ...]:
    """Its load. The account forgets nothing of the blocks of one that lost them and waits."""
    attempts = {
        key: (a.queued, a.decoding, a.left, a.filled if a.decoding else 0)
        for key, a in worker.attempts.items()
    }
    load = worker.prefill_left, worker.prefilling, worker.decoding, worker.context, worker.waiting
    return attempts, *load


def statement_in(steps: list[EngineStep]) -> int | None:
    """Where it begins: with a request that came, and not with its dispatch."""
    firsts = (
        number
        for number, step in enumerate(steps)
        for change in step.changes[:1]
        if type(change) is RequestQueued and change.attempt and not change.dispatch
    )
    return next(firsts, None)


def stated(engine: Engine, page: Progress) -> int:
    """Request a statement, and wait until the engine has gone on after it: at which report it begins."""
    page.request_statement()
    before = len(engine.agent.steps)
    wait_until(lambda: statement_in(engine.agent.steps[before:]) is not None, "it states")
    wait_until(lambda: len(engine.agent.steps) > before + 20, "it goes on")
    return before + (statement_in(engine.agent.steps[before:]) or 0)


def test_a_new_log_counts_the_requests_that_an_engine_has(zygote: Zygote, tmp_path: Path) -> None:
    """Four of six run, and lose their blocks again and again in a small pool; some wait."""
    path = str(tmp_path / "progress")
    small = ("--num-gpu-blocks-override", "24", "--max-model-len", "512", "--max-num-seqs", "4")
    page = Progress(path)
    with engine_of(zygote.fork(*small, RELUME_PROGRESS=path)) as engine:
        opened = [
            client.open_stream(
                engine.port, "/v1/completions", BODY | {"prompt": f"Request number {i} says"},
                client.headers_for(request=f"s{i}", attempt=i + 1, dispatch="ZA"),
            )
            for i in range(6)
        ]  # fmt: skip
        begins = seen = 0
        for _ in range(5):
            wait_until(lambda: len(engine.agent.steps) > seen + 40, "it makes steps")  # noqa: B023
            begins = stated(engine, page)
            steps = list(engine.agent.steps)
            seen = len(steps)
            whole = folded(engine, steps)
            assert figures(folded(engine, steps[begins:])) == figures(whole) and whole.attempts
        for connection, response in opened:
            response.read()
            connection.close()
        wait_until(lambda: not folded(engine, engine.agent.steps[begins:]).attempts, "all end")
        assert figures(folded(engine, engine.agent.steps[begins:])) == ({}, 0, 0, 0, 0, 0)
