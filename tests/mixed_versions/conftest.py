"""A real etcd, and a real older build."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.etcd_server import EtcdServer, etcd_binary
from tests.mixed_versions.processes import Build, build_older


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    """One member of its own."""
    if etcd_binary() is None:
        pytest.skip("no etcd on PATH")
    with EtcdServer() as server:
        yield server


@pytest.fixture(scope="session")
def older(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Built once."""
    return build_older(tmp_path_factory.mktemp("older"))
