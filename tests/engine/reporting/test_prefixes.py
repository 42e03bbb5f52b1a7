"""An engine tells its prefix cache so that a gateway knows beforehand what it will find there."""

from __future__ import annotations

import random

import pytest

from relume.events.vocabulary import RequestAdmitted
from relume.events.wire import prefix
from relume.policies.state import prefix_index
from relume.policies.state.fleet import Fleet, Worker
from relume.policies.state.fold import fold
from relume.policies.state.overlay.view import View
from tests.engine import client
from tests.engine.fleet import Engine, Zygote, engine_of

pytestmark = pytest.mark.full

BLOCK = 32
SMALL = ("--max-model-len", "1024", "--num-gpu-blocks-override", "48")
"""Room for one long request and a half."""


class Gateway:
    """Asks an engine with token ids, and folds what it tells of its cache."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.fleet = Fleet()
        self.worker = Worker(name="w0", incarnation=engine.incarnation, engine="ready")
        self.fleet.workers["w0"] = self.worker
        self.view = View("r.r0", self.fleet)
        self._read = self._asked = 0

    def ask(self, tokens: list[int], salt: str = "", make: int = 1) -> int:
        """Tokens of the prompt that the engine found cached."""
        self._asked += 1
        name = f"prefix-{self._asked}"
        body = {"model": "tiny", "prompt": tokens, "max_tokens": make, "temperature": 0}
        body |= {"ignore_eos": True} | ({"cache_salt": salt} if salt else {})
        client.ask(self.engine.port, "/v1/completions", body, request=name)
        self.engine.wait_idle()
        admitted = self.engine.agent.changes(name)[1]
        assert isinstance(admitted, RequestAdmitted)
        return admitted.cached_tokens

    def expected(self, tokens: list[int], salt: str = "") -> int:
        """What a gateway thinks it will find."""
        for event in self.engine.agent.prefixes[self._read :]:
            self._read += 1
            fold(self.fleet, "w.w0", 1, event)
        marks = prefix.of_tokens(tokens, BLOCK, salt)
        return BLOCK * prefix_index.hit_blocks(self.view, self.worker, marks)


def tokens_of(seed: int, count: int) -> list[int]:
    draw = random.Random(seed)
    return [draw.randrange(300, 1000) for _ in range(count)]


# xxhash begins its chains at random; PYTHONHASHSEED changes where the default's begin.
@pytest.mark.parametrize(
    ("arguments", "environment"),
    [((), {}), (("--prefix-caching-hash-algo", "xxhash"), {}), ((), {"PYTHONHASHSEED": "7"})],
    ids=["default", "xxhash", "seeded"],
)
def test_a_gateway_knows_what_an_engine_will_find_cached(
    zygote: Zygote, arguments: tuple[str, ...], environment: dict[str, str]
) -> None:
    with engine_of(zygote.fork(*SMALL, *arguments, **environment)) as engine:
        gateway = Gateway(engine)
        first = tokens_of(1, 300)
        assert gateway.expected(first) == 0
        assert gateway.worker.cached.block_tokens == BLOCK
        assert gateway.ask(first) == 0
        assert gateway.expected(first) == 288 == gateway.ask(first)
        longer = [*first, *tokens_of(2, 200)]
        assert gateway.expected(longer) == 288 == gateway.ask(longer)
        # another tenant's blocks are others
        assert gateway.expected(first, "tenant") == 0 == gateway.ask(first, "tenant")
        assert gateway.expected(first, "tenant") == 288 == gateway.ask(first, "tenant")

        # prompts that push one another out, trees of them, and output that is asked again
        draw, hits = random.Random(3), []
        for _ in range(24):
            tree = tokens_of(draw.randrange(10, 14), 700)
            asked = [*tree[: draw.randrange(1, 700)], *tokens_of(draw.randrange(2), 40)]
            hits.append(gateway.expected(asked))
            assert gateway.ask(asked, make=draw.choice((1, 70))) == hits[-1], hits
        assert len(set(hits)) > 4
        told = engine.agent.prefixes
        assert any(e.removed for e in told)
        assert gateway.worker.prefix_marks <= 48
        assert [e.reset for e in told] == [True] + [False] * (len(told) - 1)
