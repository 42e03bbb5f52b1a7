"""Scripted engines behind a gateway whose scheduler remembers who came."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import uvloop

from relume.controlplane.gateway.config import GatewayConfig
from relume.controlplane.gateway.endpoint import Gateway
from relume.controlplane.stream.arrival import Arrival
from tests.gateway.conftest import Rig
from tests.gateway.peers import Engine, FakeScheduler


def pytest_asyncio_loop_factories(config, item):
    return {"uvloop": uvloop.new_event_loop}


class Remembering(FakeScheduler):
    """`came`: arrivals, also of requests that ended. Workers tell blocks of four tokens."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.came: list[Arrival] = []

    def arrived(self, arrival: Arrival) -> Arrival:
        self.came.append(arrival)
        return super().arrived(arrival)

    def block_tokens(self, model: str) -> int:
        return 4


@pytest.fixture
def rig():
    @asynccontextmanager
    async def make(engines: int = 1, **settings):
        async with AsyncExitStack() as stack:
            fleet = [await stack.enter_async_context(Engine(f"w{n}", 3)) for n in range(engines)]
            scheduler = Remembering(engines=fleet.copy())
            config = GatewayConfig(port=0, sweep_interval_s=0.05, **settings)
            gateway = await stack.enter_async_context(Gateway(scheduler, config))
            yield Rig(fleet, scheduler, gateway)
            await gateway.stop()
            assert not scheduler.arrivals, "a request without its terminal event"
            assert gateway.counters.in_flight == 0

    return make
