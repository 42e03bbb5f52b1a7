"""Fixtures on a real etcd that loses what it had."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from relume.events.etcd.factory import EtcdLog
from tests.etcd_server import EtcdServer, etcd_binary
from tests.history.stage import config_for


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    """One member of its own: the test may back it up, restore and kill it."""
    if etcd_binary() is None:
        pytest.skip("no etcd on PATH")
    with EtcdServer() as server:
        yield server


@pytest.fixture
async def log(etcd: EtcdServer) -> AsyncIterator[EtcdLog]:
    """The log on `etcd`, with short times."""
    async with EtcdLog(config_for(etcd), name="test") as opened:
        yield opened
