"""A live engine whose agent has its prefix cache emptied, also while requests run."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from relume.engine_shim.engine.progress import Progress
from relume.events.vocabulary import RequestAdmitted
from tests.engine import client
from tests.engine.fleet import Engine, Zygote, engine_of, wait_until

pytestmark = pytest.mark.full

COMPLETIONS = "/v1/completions"
LONG_PROMPT = "The log holds every decision. " * 40


def cached(engine: Engine) -> list[int]:
    """Tokens that each request so far found in a cache."""
    steps = [*engine.agent.steps]
    return [c.cached_tokens for s in steps for c in s.changes if type(c) is RequestAdmitted]


def ask(engine: Engine, tokens: int = 8, prompt: str = LONG_PROMPT) -> list[int]:
    body = {"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0}
    ids: list[int] = client.ask(engine.port, COMPLETIONS, body).ids
    return ids


def test_no_further_request_reads_what_it_held_and_running_ones_continue(
    zygote: Zygote, tmp_path: Path
) -> None:
    page = Progress(str(tmp_path / "progress"))
    with engine_of(zygote.fork(RELUME_PROGRESS=str(tmp_path / "progress"))) as engine:
        usual, whole = ask(engine), ask(engine, 600)
        ask(engine)
        engine.wait_idle()
        assert cached(engine)[-1] > 100
        with ThreadPoolExecutor(1) as clients:
            before = len(cached(engine))
            running = clients.submit(ask, engine, 600)
            wait_until(lambda: len(cached(engine)) > before, "it runs")
            page.reset_prefix_cache()
            assert ask(engine) == usual
            assert not running.done(), "it ran meanwhile"
            assert running.result() == whole
        engine.wait_idle()
        assert cached(engine)[-1] == 0
        assert ask(engine) == usual
        engine.wait_idle()
        assert cached(engine)[-1] > 100, "what was computed afterwards is found"
        held = len(engine.agent.prefixes)
        page.reset_prefix_cache()
        assert ask(engine, prompt="Another prompt. " * 40)
        engine.wait_idle()
        assert any(change.removed for change in engine.agent.prefixes[held:]), "gateways know"
        ask(engine)
        engine.wait_idle()
        assert cached(engine)[-1] == 0
