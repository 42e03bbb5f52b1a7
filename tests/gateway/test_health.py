"""What becomes of requests while workers answer with errors: real replicas, scripted engines."""

from __future__ import annotations

import asyncio

from relume.events import vocabulary as v
from relume.events.vocabulary.enums import HealthState
from tests.gateway.peers import Behaviour
from tests.gateway.replica_scene import Scene, scene, until


def decided(s: Scene, worker: str) -> list[HealthState]:
    """The health of the worker, decision by decision."""
    told = s.told("fleet")
    return [e.state for e in told if type(e) is v.HealthDecided and e.worker == worker]


async def test_a_worker_that_errs_is_left_by_all_replicas_and_tried_again_by_one() -> None:
    async with scene(workers=3) as s:
        await s.replica("r0")
        await s.replica("r1")
        bad = s.workers[0]
        bad.engine.default = Behaviour(status=500)
        while HealthState.UNHEALTHY not in decided(s, "w0"):
            answers = await asyncio.gather(*(s.answer(n % 2) for n in range(12)))
            assert [a.status for a in answers] == [200] * 12, "each is served elsewhere"
        await s.folded()
        seen = len(bad.engine.seen)
        assert seen <= 24
        answers = await asyncio.gather(*(s.answer(n % 2) for n in range(24)))
        assert [a.status for a in answers] == [200] * 24
        assert len(bad.engine.seen) <= seen + 1, "at most a probe"
        bad.engine.default = Behaviour()
        async with asyncio.timeout(30):
            while decided(s, "w0")[-1] != HealthState.HEALTHY:
                await asyncio.gather(*(s.answer(n % 2) for n in range(6)))
        await s.proven()


async def test_a_request_at_fault_ends_as_its_clients_error_and_the_next_one_does_not() -> None:
    async with scene(workers=3) as s:
        await s.replica()
        for worker in s.workers[:2]:
            worker.engine.default = Behaviour(status=500)
        first = await s.answer()
        assert first.status == 400 and b"2 idle workers failed on this request alike" in first.body
        await until(lambda: decided(s, "w0")[-1:] in ([], [HealthState.HEALTHY]))
        await s.folded()
        statuses = [(await s.answer()).status for _ in range(6)]
        assert statuses == [200] * 6, "the workers may be at fault after all: the third is tried"
        assert sum(len(w.engine.seen) for w in s.workers[:2]) >= 2 + 2, "each failed another one"
        await s.proven()
