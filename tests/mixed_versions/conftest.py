"""A real etcd."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.etcd_server import EtcdServer, etcd_binary


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    """One member of its own."""
    if etcd_binary() is None:
        pytest.skip("no etcd on PATH")
    with EtcdServer() as server:
        yield server
