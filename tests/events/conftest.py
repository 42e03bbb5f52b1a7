"""Fixtures on real etcd."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import msgspec
import pytest

from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from tests.etcd_server import EtcdServer, etcd_binary


def config_for(server: EtcdServer, **changes: object) -> EtcdConfig:
    """Short times for tests: calls 400 ms, leases 2 s."""
    config = EtcdConfig(
        endpoints=server.endpoints,
        call_timeout_ms=400,
        lease_ttl_s=2,
        backoff_max_ms=200,
        silence_ms=500,
        close_timeout_ms=1_000,
        open_timeout_ms=5_000,
    )
    return msgspec.structs.replace(config, **changes)


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    """One member of its own: the test may kill, stop and restart it."""
    if etcd_binary() is None:
        pytest.skip("no etcd on PATH")
    with EtcdServer() as server:
        yield server


@pytest.fixture
async def log(etcd: EtcdServer) -> AsyncIterator[EtcdLog]:
    """The log on `etcd`, with short times."""
    async with EtcdLog(config_for(etcd), name="test") as opened:
        yield opened
