"""What an engine says of the time of a canary: whether it computed nothing else, and waits for a CPU."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from relume.engine_shim.engine.progress import Progress

pytestmark = pytest.mark.full


class Engine:
    """Stands for AsyncLLM: shows other requests on the page before, during or after its answer.
    `came`: prompt tokens of a request that comes and goes while it answers. `busy`: it computes for so
    many seconds. `elsewhere`: then another process says that it computed for so long, and waited."""

    def __init__(
        self,
        page: Progress,
        before: int = 0,
        came: int = 0,
        after: int = 0,
        busy: float = 0.0,
        elsewhere: tuple[int, int] = (0, 0),
    ) -> None:
        self._elsewhere = elsewhere
        self.model_config = SimpleNamespace(max_model_len=512, get_vocab_size=lambda: 1000)
        self._page, self._came, self._after, self._busy = page, came, after, busy
        self._show(before)

    def _show(self, running: int, arrived: int = 0) -> None:
        self._page.write(
            steps=1, began_ns=0, running=running, waiting=0, kv_used=0, arrived=100 + arrived
        )

    async def generate(self, prompt: Any, params: Any, name: str) -> AsyncIterator[Any]:
        assert params.temperature == 0 and params.skip_reading_prefix_cache
        self._show(2)
        end = time.thread_time() + self._busy
        while time.thread_time() < end:
            pass
        logprob = SimpleNamespace(logprob=-0.5)
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7], logprobs=[{7: logprob}])])
        self._show(self._after, self._came)
        self._page.write_computed(*self._elsewhere, 0)


@pytest.mark.parametrize(
    ("others", "alone"),
    [({}, True), ({"before": 1}, False), ({"after": 1}, False), ({"came": 5}, False)],
)
async def test_a_canary_is_alone_if_no_request_was_there_or_came(
    others: dict[str, int], alone: bool
) -> None:
    from relume.engine_shim.engine.canary import answer  # importing it takes seconds

    page = Progress()
    found = await answer(Engine(page, **others), 0, page)
    assert (found.tokens, found.logprobs, found.alone) == ((7,), (-0.5,), alone)


def _spin(core: int, begun: Any) -> None:
    os.sched_setaffinity(0, {core})
    begun.set()
    while True:
        pass


async def test_waits_for_a_cpu_are_known() -> None:
    """Another process has half of the only core that the engine may use."""
    from relume.engine_shim.engine.canary import answer

    page = Progress()
    calm = await answer(Engine(page, busy=0.2), 0, page)
    cores = os.sched_getaffinity(0)
    core = min(cores)
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    other = context.Process(target=_spin, args=(core, begun), daemon=True)
    other.start()
    try:
        assert begun.wait(60)
        os.sched_setaffinity(0, {core})
        busy = await answer(Engine(page, busy=0.5), 0, page)
    finally:
        os.sched_setaffinity(0, cores)
        other.kill()
        other.join()
    assert busy.took_us - busy.wait_us < 0.75 * busy.took_us
    assert 0 <= calm.wait_us < calm.took_us and busy.took_us - busy.wait_us > 400_000


async def test_while_another_process_computes_a_canary_its_waits_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The thread that schedules polls for it, which looks like waits for a CPU."""
    from relume.engine_shim.engine import canary

    monkeypatch.setattr(canary, "_waited_us", lambda before, after: 90_000)
    page = Progress()
    engine = Engine(page, busy=0.1, elsewhere=(80_000, 5_000))
    found = await canary.answer(engine, 0, page)
    rest_us = found.took_us - 80_000
    assert 5_000 <= found.wait_us <= max(5_000 + rest_us, found.took_us - 100_000)
    alone = await canary.answer(Engine(page, busy=0.1, elsewhere=(80_000, 5_000)), 0, page)
    assert alone.wait_us >= 90_000, "no other process computed meanwhile"
