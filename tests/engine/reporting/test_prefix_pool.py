"""vLLM's own pool of KV blocks tells what a gateway can compute, however vLLM hashes."""

from __future__ import annotations

import random
from typing import Any

import pytest

from relume.events.log import codec
from relume.events.wire import prefix
from relume.events.wire.reports import ReportReader

pytestmark = pytest.mark.full

BLOCK = 16
ALGORITHMS = (("sha256", ""), ("sha256", "7"), ("xxhash", ""), ("sha256_cbor", ""))


class Agent:
    """Reads what it is sent, unless its socket is full; keeps what the cache holds."""

    def __init__(self) -> None:
        self.held: set[int] = set()
        self.resets = 0
        self.full = False

    def send(self, frame: bytes, lost: int) -> bool:
        if self.full:
            assert lost == -1, "it is told again: nothing is lost with it"
            return False
        (payload,) = ReportReader().feed(frame)
        event = codec.decode(payload)
        if event.reset:
            assert event.block_tokens == BLOCK
            self.held.clear()
            self.resets += 1
        self.held.difference_update(prefix.unpack(event.removed))
        self.held.update(prefix.unpack(event.stored))
        return True


class Pool:
    """A pool of 64 blocks, as a scheduler uses it."""

    def __init__(self, algorithm: str, monkeypatch: pytest.MonkeyPatch, seed: str) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core import kv_cache_utils
        from vllm.v1.core.block_pool import BlockPool

        from relume.engine_shim.engine.vllm_private.prefix_marks import PrefixReport

        monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        if seed:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        self.agent = Agent()
        self.pool = BlockPool(64, True, BLOCK)
        self.report = PrefixReport(
            self.pool, 1, algorithm, lambda: kv_cache_utils.NONE_HASH, self.agent.send
        )
        hashing = get_hash_fn_by_name(algorithm)
        kv_cache_utils.init_none_hash(hashing)  # behind the scheduler, as vLLM does it
        self._hasher = kv_cache_utils.get_request_block_hasher(BLOCK, hashing)

    def request(self, tokens: list[int], salt: str) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        return Request(
            "r", tokens, SamplingParams(), None, cache_salt=salt or None, block_hasher=self._hasher
        )

    def hit(self, request: Any) -> int:
        """Blocks vLLM finds cached."""
        usable = (request.num_tokens - 1) // BLOCK
        found = (self.pool.get_cached_block(h, [0]) for h in request.block_hashes[:usable])
        return next((n for n, blocks in enumerate(found) if not blocks), usable)

    def compute(self, request: Any) -> None:
        """Its blocks are made and left in the cache."""
        full = request.num_tokens // BLOCK
        if full and full <= self.pool.get_num_free_blocks():
            blocks = self.pool.get_new_blocks(full)
            self.pool.cache_full_blocks(
                request=request,
                blocks=blocks,
                num_cached_blocks=0,
                num_full_blocks=full,
                block_size=BLOCK,
                kv_cache_group_id=0,
            )
            self.pool.free_blocks(reversed(blocks))


@pytest.mark.parametrize(("algorithm", "seed"), ALGORITHMS)
def test_what_is_told_is_what_is_found(
    algorithm: str, seed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = Pool(algorithm, monkeypatch, seed)
    agent, draw = pool.agent, random.Random(4)
    compared = hits = 0
    for turn in range(400):
        agent.full = draw.random() < 0.2
        tree = 1000 * draw.randrange(5)
        tokens = [tree + n for n in range(draw.randrange(1, 500))]
        tokens += [draw.randrange(50) for _ in range(draw.randrange(30))]
        salt = draw.choice(("", "", "tenant"))
        request = pool.request(tokens, salt)
        pool.report.flush()
        if not agent.full:
            marks = prefix.unpack(prefix.of_tokens(tokens, BLOCK, salt))
            run = next((n for n, one in enumerate(marks) if one not in agent.held), len(marks))
            found = pool.hit(request)
            assert run == prefix.marks_in(found), f"turn {turn}"
            compared += 1
            hits += found > 0
        pool.compute(request)
        pool.report.step(prefilled=draw.random() < 0.5, running=draw.randrange(2))
        if turn == 300:
            assert pool.pool.reset_prefix_cache()
    assert compared > 200 and hits > 50
    assert agent.resets == 2
    assert len(agent.held) < 64


def test_a_reader_that_stays_away_misses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """What could not be told is bounded, and told when it can be."""
    monkeypatch.setattr(prefix, "MAX_REPORTED", 40)
    pool = Pool("sha256", monkeypatch, "")
    agent, report = pool.agent, pool.report
    for turn in range(60):
        agent.full = 2 < turn < 55
        pool.compute(pool.request([1000 * turn + n for n in range(400)], ""))
        report.step(prefilled=True, running=1)
        assert len(report._stored) + len(report._removed) <= 2 * prefix.MAX_REPORTED
        assert agent.full or agent.held == set(report._reported)
    assert len(agent.held) == prefix.MAX_REPORTED
    assert agent.resets == 1
