"""The admission queue by its own clock: no event comes, and each bound is met in time."""

from __future__ import annotations

import asyncio

from tests.controlplane.test_waiting import plane


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
