"""The agent with real vLLM, forked from the real zygote. (As stock `vllm serve`:
tests/live/test_stock_serve.py.)"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from relume.engine_shim.agent.engine_process.process_identity import is_alive
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from tests.agent.host import Host, left, until
from tests.etcd_server import EtcdServer
from tests.signals import stop

pytestmark = [pytest.mark.full, pytest.mark.etcd]

ROOT = Path(__file__).resolve().parents[3]
ARGUMENTS = (
    *("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-num-seqs", "16"),
    *("--max-model-len", "2048", "--kv-cache-memory-bytes", str(32 << 20)),
)
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    if given := os.environ.get("RELUME_TEST_MODEL"):
        return given
    path = tmp_path_factory.mktemp("model") / "tiny"
    maker = ROOT / "deploy/dev/make_model.py"
    subprocess.run([sys.executable, str(maker), "--out", str(path)], check=True)
    return str(path)


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ENVIRONMENT.items():
        monkeypatch.setenv(name, value)


@pytest.fixture
def etcd() -> Iterator[EtcdServer]:
    with EtcdServer() as server:
        yield server


@asynccontextmanager
async def hosted(
    path: Path, etcd: EtcdServer, model: str, host_kind: str, **settings: str
) -> AsyncIterator[Host]:
    # A starting engine may keep the agent from a busy processor for seconds.
    settings = {"lease_ttl_s": "8", **settings}
    settings = {"model": model, "served_model_name": "tiny", "host_kind": host_kind, **settings}
    async with EtcdLog(EtcdConfig(endpoints=(etcd.url.removeprefix("http://"),))) as log:
        host = Host(path, etcd, log, **settings)
        try:
            yield host
        finally:
            await host.stop()


def ask(ready: v.EngineReady) -> str:
    """A completion straight from the engine."""
    body = {"model": "tiny", "prompt": "once upon", "max_tokens": 8, "temperature": 0}
    request = urllib.request.Request(
        f"http://{ready.host}:{ready.port}/v1/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())["choices"][0]["text"]


async def test_forked_engine_lives_dies_and_comes_back(
    tmp_path: Path, etcd: EtcdServer, model: str
) -> None:
    async with hosted(tmp_path, etcd, model, "zygote") as host:
        host.spawn(
            "zygote",
            sys.executable,
            "-m",
            "relume.engine_shim.engine.hosts.zygote",
            "--socket",
            str(tmp_path / "z.sock"),
        )
        agent = host.agent(*ARGUMENTS)
        ready = await host.nth(v.EngineReady, 1, timeout_s=90)
        assert (ready.model, ready.max_model_len, ready.block_size) == ("tiny", 2048, 32)
        text = await asyncio.to_thread(ask, ready)
        assert text
        step = await host.nth(v.EngineStep, 1)
        assert step.incarnation == 1
        engine = host.engine
        os.kill(engine.pid, signal.SIGKILL)
        await host.nth(v.EngineDied, 1)
        again = await host.nth(v.EngineReady, 2, timeout_s=90)
        assert await asyncio.to_thread(ask, again) == text
        # An orphan that is stopped cannot see that its agent died.
        orphan = host.engine
        stop(orphan.pid)
        agent.kill()
        agent.wait()
        agent = host.agent(*ARGUMENTS)
        third = await host.nth(v.EngineReady, 3, timeout_s=90)
        assert third.incarnation == 3
        assert not is_alive(orphan)
        # One that runs sees it by itself, before another agent comes.
        orphan = host.engine
        agent.kill()
        agent.wait()
        await until(lambda: not is_alive(orphan))
        agent = host.agent(*ARGUMENTS)
        await host.nth(v.EngineReady, 4, timeout_s=90)
        agent.terminate()
        assert await left(agent) == 0, host.words()
        assert host.left_over() == [] and host.state["engine"] is None
