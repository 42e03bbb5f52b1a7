"""Whether an engine computed nothing else while it answered a canary."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest

from relume.engine_shim.engine.progress import Progress

pytestmark = pytest.mark.full


class Engine:
    """Stands for AsyncLLM: shows other requests on the page before, during or after its answer.
    `came`: prompt tokens of a request that comes and goes while it answers."""

    def __init__(self, page: Progress, before: int = 0, came: int = 0, after: int = 0) -> None:
        self.model_config = SimpleNamespace(max_model_len=512, get_vocab_size=lambda: 1000)
        self._page, self._came, self._after = page, came, after
        self._show(before)

    def _show(self, running: int, arrived: int = 0) -> None:
        self._page.write(
            steps=1, began_ns=0, running=running, waiting=0, kv_used=0, arrived=100 + arrived
        )

    async def generate(self, prompt: Any, params: Any, name: str) -> AsyncIterator[Any]:
        assert params.temperature == 0 and params.skip_reading_prefix_cache
        self._show(2)
        logprob = SimpleNamespace(logprob=-0.5)
        yield SimpleNamespace(outputs=[SimpleNamespace(token_ids=[7], logprobs=[{7: logprob}])])
        self._show(self._after, self._came)


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
