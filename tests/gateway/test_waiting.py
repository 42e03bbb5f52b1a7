"""Requests that wait for a worker, as their clients live it; and what they say of themselves."""

from __future__ import annotations

import asyncio
import json

import pytest

from relume.controlplane.stream.arrival import Rejected
from tests.gateway.peers import NoRoom

TEXT = "/v1/completions"
BODY = json.dumps({"model": "m", "prompt": "hi", "temperature": 0}).encode()


class AdmissionQueue(NoRoom):
    """Everybody waits until told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.callers = []
        self.arrivals = []
        self.came = asyncio.Event()

    def admit(self, arrival, caller, size, patience_s, nobody) -> bool:
        assert size == len(BODY)
        self.arrivals.append(arrival)
        self.callers.append(caller)
        self.came.set()
        return True


async def test_a_held_request_is_answered_when_it_is_called(rig):
    async with rig() as r:
        room = r.scheduler.waiting = AdmissionQueue()
        asked = asyncio.create_task(r.ask(TEXT, BODY))
        await asyncio.wait_for(room.came.wait(), 10)
        assert not r.engines[0].seen
        r.scheduler.serving = False
        assert room.callers[0].called() is False, "nobody could take it: it waits on"
        r.scheduler.serving = True
        assert room.callers[0].called() is True
        assert (await asked).status == 200
        assert ("assign", "wait_over", 0) in r.scheduler.log


async def test_a_refused_client_is_told_when_to_retry(rig):
    async with rig() as r:
        room = r.scheduler.waiting = AdmissionQueue()
        asked = asyncio.create_task(r.ask(TEXT, BODY))
        await asyncio.wait_for(room.came.wait(), 10)
        room.callers[0].refused(Rejected(429, "all workers are busy", 7, "overloaded"))
        answer = await asked
        assert (answer.status, answer.headers["retry-after"]) == (429, "7")
        assert answer.json()["error"]["code"] == "overloaded"
        assert answer.json()["error"]["type"] == "rate_limit_error"
        assert r.scheduler.endings() == [("rejected", 429, 0, "-")]


async def test_a_client_that_leaves_while_it_waits_ends_its_request(rig):
    async with rig() as r:
        room = r.scheduler.waiting = AdmissionQueue()
        asked = asyncio.create_task(r.ask(TEXT, BODY))
        await asyncio.wait_for(room.came.wait(), 10)
        for client in list(r.gateway.service.clients):
            client.abort()
        with pytest.raises((OSError, asyncio.IncompleteReadError)):
            await asked
        async with asyncio.timeout(10):
            while not r.scheduler.endings():
                await asyncio.sleep(0)
        assert r.scheduler.endings() == [("cancelled", 499, 0, "-")]


async def test_a_draining_gateway_closes_the_room(rig):
    async with rig() as r:
        await r.gateway.drain(0.1)
        assert r.scheduler.waiting.closed


async def held(r, headers):
    """The arrival of a request with these headers, or its refusal."""
    room = r.scheduler.waiting = AdmissionQueue()
    asked = asyncio.create_task(r.ask(TEXT, BODY, headers=headers))
    came = asyncio.create_task(room.came.wait())
    await asyncio.wait({asked, came}, timeout=10, return_when=asyncio.FIRST_COMPLETED)
    came.cancel()
    if asked.done():
        return asked.result()
    room.callers[0].called()
    await asked
    return room.arrivals[0]


async def test_tenant_tier_and_deadline_are_taken_from_headers(rig):
    async with rig() as r:
        told = await held(
            r, "x-tenant-id: team-a\r\nx-relume-tier: Batch\r\nx-slo-ttft-ms: 2500\r\n"
        )
        assert (told.share, told.tier, told.ttft_ms) == ("team-a", "batch", 2500)
        told = await held(r, "x-gateway-inference-fairness-id: u/7\r\n")
        assert (told.share, told.tier, told.ttft_ms) == ("u/7", "", 0)
        for wrong, param in (
            ("x-tenant-id: a b", "x-tenant-id"),
            ("x-tenant-id: " + "a" * 65, "x-tenant-id"),
            ("x-slo-ttft-ms: soon", "x-slo-ttft-ms"),
            ("x-slo-ttft-ms: 0", "x-slo-ttft-ms"),
            ("x-relume-tier: gold", "x-relume-tier"),
        ):
            answer = await held(r, f"{wrong}\r\n")
            assert (answer.status, answer.json()["error"]["param"]) == (400, param)


async def test_with_keys_no_client_has_anothers_share(rig):
    async with rig(api_keys=frozenset({"one", "two"})) as r:
        shares = []
        for key in ("one", "two"):
            told = await held(r, f"authorization: Bearer {key}\r\nx-tenant-id: other\r\n")
            shares.append(told.share)
        assert "other" not in shares
        assert shares[0] != shares[1]
