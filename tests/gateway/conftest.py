"""Fixtures: uvloop as in production, and a rig of scripted engines behind a gateway."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import uvloop

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.gateway.endpoint import Gateway
from tests.gateway.peers import Engine, FakeScheduler
from tests.gateway.raw_client import RawClient


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


class Rig:
    def __init__(self, engines, scheduler, gateway):
        self.engines = engines
        self.scheduler = scheduler
        self.gateway = gateway

    def client(self) -> RawClient:
        return RawClient(self.gateway.port)

    async def ask(self, *args, **kwargs):
        async with self.client() as client:
            return await client.ask(*args, **kwargs)


@pytest.fixture
def rig():
    @asynccontextmanager
    async def make(engines: int = 2, delegates=None, **settings):
        fleet = [Engine(f"w{i}", incarnation=3) for i in range(engines)]
        for engine in fleet:
            await engine.__aenter__()
        scheduler = FakeScheduler(engines=fleet.copy())
        config = GatewayConfig(port=0, **{"sweep_interval_s": 0.05, **settings})
        gateway = Gateway(scheduler, config, delegates=delegates)
        try:
            async with gateway:
                yield Rig(fleet, scheduler, gateway)
            assert not scheduler.arrivals, "a request without its terminal event"
            assert gateway.counters.in_flight == 0
            assert gateway.service.bodies_bytes == 0
            assert not gateway._attempts
            assert all(a.open_streams == 0 for a in gateway.activity.values())
        finally:
            for engine in fleet:
                engine.stop()

    return make
