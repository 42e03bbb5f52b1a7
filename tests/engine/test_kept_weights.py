"""Real engines leave their weights in a pool of the host, and find them there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from relume.engine_shim.pools.pool_server import PoolServer
from relume.engine_shim.pools.pools import Pools
from tests.engine import client
from tests.engine.fleet import Engine, Zygote, engine_of, wait_until

PATH = "/v1/completions"
BODY = {"model": "tiny", "prompt": "Once upon a time", "max_tokens": 24, "temperature": 0}


class Host(Pools):
    """Pools of this process, served by a thread."""

    def __init__(self, path: str) -> None:
        super().__init__(64 << 20, 0, iter(range(1, 1000)).__next__)
        self.path = path

    def damage(self) -> None:
        """Sealed memory cannot be changed. So its digest is."""
        (pool,) = self._pools.values()
        pool.digest = bytes(32)

    def names(self) -> list[str]:
        """Of all pools."""
        return list(self._pools)

    def digest(self) -> bytes:
        """Of the one pool, once it is sealed."""
        (pool,) = self._pools.values()
        return pool.digest


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    made, loop = Host(str(tmp_path / "pools.sock")), asyncio.new_event_loop()
    server = PoolServer(made, made.path)
    server.bind()
    serving = loop.create_task(server.serve())

    def run() -> None:
        with contextlib.suppress(asyncio.CancelledError):
            loop.run_until_complete(serving)

    thread = threading.Thread(target=run)
    thread.start()
    yield made
    loop.call_soon_threadsafe(serving.cancel)
    thread.join(20)
    loop.close()
    made.close()


def start(
    zygote: Zygote, host: Host, anew: str = "", model: Path | None = None
) -> contextlib.AbstractContextManager[Engine]:
    more = {"RELUME_POOLS": host.path, "RELUME_POOLS_ANEW": anew}
    other = ("--model", str(model)) if model is not None else ()
    return engine_of(zygote.fork("--load-format", "relume", *other, **more))


def mapped(engine: Engine) -> set[str]:
    """Which of both its memory is mapped from: the pool, and the file."""
    maps = Path(f"/proc/{engine.pid}/maps").read_text()
    return {name for name in ("relume-pool", ".safetensors") if name in maps}


def test_the_next_engine_reads_no_file_and_answers_alike(zygote: Zygote, host: Host) -> None:
    with start(zygote, host) as first:
        before = client.ask(first.port, PATH, BODY).ids
        assert len(set(before)) > 5, before
        assert "relume-pool" in mapped(first), "it uses the pool that it filled"
        os.kill(first.pid, 9)
        wait_until(lambda: not first.alive(), "it is dead")
    with start(zygote, host) as second:
        assert client.ask(second.port, PATH, BODY).ids == before
        assert mapped(second) == {"relume-pool"}
        (found,) = second.agent.weights
        assert found.read_bytes == 0 and found.bytes > 1 << 20 and not found.why


@pytest.mark.full
def test_a_damaged_pool_is_noticed_and_filled_anew(zygote: Zygote, host: Host) -> None:
    """Full: two engines more; `tests/pools` has the parts."""
    with start(zygote, host) as first:
        before = client.ask(first.port, PATH, BODY).ids
    digest = host.digest()
    host.damage()
    with start(zygote, host) as second:
        assert client.ask(second.port, PATH, BODY).ids == before
        assert "does not have its digest" in second.log.read_text()
        assert host.digest() == digest


@pytest.mark.full
def test_an_engine_in_quarantine_reads_the_files_whatever_the_pool_has(
    zygote: Zygote, host: Host
) -> None:
    """Full: two engines more."""
    with start(zygote, host) as first:
        before = client.ask(first.port, PATH, BODY).ids
    digest = host.digest()
    host.damage()
    with start(zygote, host, anew="1") as second:
        assert client.ask(second.port, PATH, BODY).ids == before
        assert "does not have its digest" not in second.log.read_text(), "it does not look"
        assert host.digest() == digest


@pytest.mark.full
def test_other_files_have_another_pool(
    zygote: Zygote, host: Host, tiny_model: Path, tmp_path: Path
) -> None:
    """Full: two engines more."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model, model)
    with start(zygote, host, model=model) as first:
        before = client.ask(first.port, PATH, BODY).ids
    (file,) = model.glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"] *= -1
    save_file(tensors, file, {"format": "pt"})
    with start(zygote, host, model=model) as second:
        assert client.ask(second.port, PATH, BODY).ids != before
    assert len(host.names()) == 2


@pytest.mark.full
def test_without_pools_an_engine_reads_the_files(zygote: Zygote, tmp_path: Path) -> None:
    """Full: an engine more."""
    nowhere = str(tmp_path / "none.sock")
    with engine_of(zygote.fork("--load-format", "relume", RELUME_POOLS=nowhere)) as engine:
        assert len(client.ask(engine.port, PATH, BODY).ids) == 24
        (found,) = engine.agent.weights
        assert found.read_bytes == found.bytes > 0 and "none.sock" in found.why
