"""The admission queue by its own clock: no event comes, and each bound is met in time."""

from __future__ import annotations

import asyncio

from relume.controlplane.replica.admission import AT_ONCE
from relume.policies.admission.admission_settings import WaitingConfig
from tests.controlplane.test_waiting import plane
from tests.policies.story import ready


async def test_an_early_deadline_is_met_although_an_older_request_may_wait_longer() -> None:
    async with plane() as p:
        for name in ("a", "b", "patient"):
            p.ask(name)
        hasty = p.ask("hasty", ttft_ms=50)
        p.now_us = 60_000
        async with asyncio.timeout(5):
            while hasty.why is None:
                await asyncio.sleep(0.01)
        assert hasty.why.code == "deadline_exceeded"
        assert p.callers["patient"].why is None


async def test_a_queue_longer_than_one_turn_of_the_loop_is_called_to_its_end() -> None:
    async with plane(WaitingConfig(queued=100, tenant_percent=100), up=False) as p:
        names = [f"q{number}" for number in range(AT_ONCE + 8)]
        for name in names:
            p.ask(name)
        assert p.sent == []
        p.worker.append(ready())
        p.follow()  # no other event comes
        for _ in range(4):
            await p.settle()
        assert sorted(p.sent) == sorted(names)
