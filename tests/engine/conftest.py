"""One zygote and two engines a session; more are forked where a test kills one."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.engine.fleet import Engine, StockServe, Zygote

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The seeded model of the development environment."""
    if given := os.environ.get("RELUME_TEST_MODEL"):
        return Path(given)
    path = tmp_path_factory.mktemp("model") / "tiny"
    maker = REPOSITORY / "deploy/dev/make_model.py"
    subprocess.run([sys.executable, str(maker), "--out", str(path)], check=True)
    return path


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("zygote"), tiny_model) as zygote:
        yield zygote


HOSTS = (
    "inproc",
    pytest.param("serve", marks=[pytest.mark.full, pytest.mark.timeout(300)]),
)


@pytest.fixture(scope="session", params=HOSTS)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, tiny_model: Path
) -> Iterator[tuple[Engine, Engine]]:
    """Two engines of one kind: forked, and stock `vllm serve`."""
    if request.param == "serve":
        stock = StockServe(tmp_path_factory.mktemp("serve"), tiny_model)
        engines = (stock.start(), stock.start())
    else:
        zygote = request.getfixturevalue("zygote")
        engines = (zygote.fork(), zygote.fork())
    try:
        yield engines[0].wait_ready(), engines[1].wait_ready()
    finally:
        for engine in engines:
            engine.stop()


@pytest.fixture(scope="session")
def primary(pair: tuple[Engine, Engine]) -> Engine:
    """The engine requests start on."""
    return pair[0]


@pytest.fixture(scope="session")
def standby(pair: tuple[Engine, Engine]) -> Engine:
    """The engine they are continued on."""
    return pair[1]
