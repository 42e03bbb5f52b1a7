"""The agent with real vLLM, forked from the real zygote. (As stock `vllm serve`:
tests/live/test_stock_serve.py.)"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from relume.chaos.live.failpoint_server import FailpointServer
from relume.chaos.live.faults.flipped_weights import flip
from relume.engine_shim.agent.engine_process.hang_rule import FACTOR
from relume.engine_shim.agent.engine_process.process_identity import is_alive
from relume.engine_shim.canary_prompts import COUNT, TOKENS, TOP
from relume.events import vocabulary as v
from relume.events.etcd.config import EtcdConfig
from relume.events.etcd.factory import EtcdLog
from relume.events.failpoints.points import Action, Failpoint
from tests.agent.host import Host, left, until
from tests.etcd_server import EtcdServer
from tests.signals import stop

pytestmark = [pytest.mark.full, pytest.mark.etcd]

ROOT = Path(__file__).resolve().parents[3]
ARGUMENTS = (
    *("--dtype", "float32", "--enforce-eager", "--block-size", "32", "--max-num-seqs", "16"),
    *("--max-model-len", "2048", "--kv-cache-memory-bytes", str(32 << 20)),
)
FOUND_US = 3_000_000
"""Bound of the detection of a hang; a busy machine gets as much again."""
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


async def test_a_real_engine_that_hangs_idle_or_inside_a_step_is_found_and_restarted(
    tmp_path: Path, etcd: EtcdServer, model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped while it had nothing to do; and spinning inside a step, with its server's thread
    starved by the interpreter's lock, as a thread in an endless loop does."""
    async with (
        FailpointServer(tmp_path / "failpoints.sock") as failpoints,
        hosted(tmp_path, etcd, model, "zygote", hang_restart_s="1", canary_interval_s="0") as host,
    ):
        monkeypatch.setenv("RELUME_FAILPOINTS", str(failpoints.path))
        socket = str(tmp_path / "z.sock")
        zygote = "relume.engine_shim.engine.hosts.zygote"
        host.spawn("zygote", sys.executable, "-m", zygote, "--socket", socket)
        host.agent(*ARGUMENTS)
        ready = await host.nth(v.EngineReady, 1, timeout_s=90)
        await asyncio.to_thread(ask, ready)
        assert await host.events(v.EngineHung) == []
        stop(host.engine.pid)
        hung = await host.nth(v.EngineHung, 1)
        assert (hung.process_state, hung.step_age_us, hung.running) == ("T", 0, 0)
        assert 1_000_000 < hung.silent_us < 2 * FOUND_US
        assert (await host.nth(v.EngineDied, 1)).reason == "hung"
        ready = await host.nth(v.EngineReady, 2, timeout_s=90)
        async with failpoints.armed(
            Failpoint.ENGINE_PREFILL, process="engine w0", action=Action.SPIN
        ) as spins:
            asking = asyncio.create_task(asyncio.to_thread(asked, ready))
            await spins.reached()
            hung = await host.nth(v.EngineHung, 2)
            assert hung.step_age_us > FACTOR * hung.expected_us > 0
            assert hung.cpu_us > 500_000
            assert hung.silent_us < 2 * FOUND_US
            stacks = Path(hung.stacks).read_text()
            assert "failpoint_client.py" in stacks and "update_from_output" in stacks
            assert (await host.nth(v.EngineDied, 2)).reason == "hung"
            await asking
        third = await host.nth(v.EngineReady, 3, timeout_s=90)
        assert third.incarnation == 3
        assert await asyncio.to_thread(ask, third)


async def test_a_real_engine_answers_canaries_alike_idle_and_busy(
    tmp_path: Path, etcd: EtcdServer, model: str
) -> None:
    """They are no requests in the log, and each engine of these weights gives the same bits."""
    often = {"canary_interval_s": "0.2", "canary_budget_ppm": "1000000"}
    async with hosted(tmp_path, etcd, model, "zygote", **often) as host:
        socket = str(tmp_path / "z.sock")
        zygote = "relume.engine_shim.engine.hosts.zygote"
        host.spawn("zygote", sys.executable, "-m", zygote, "--socket", socket)
        host.agent(*ARGUMENTS)
        ready = await host.nth(v.EngineReady, 1, timeout_s=90)
        await host.nth(v.CanaryReported, 3 * COUNT)
        idle = await host.events(v.CanaryReported)
        assert all(report.exact and not report.error for report in idle), idle
        assert all(len(r.tokens) == TOKENS and len(r.logprobs) == TOP * TOKENS for r in idle)
        assert len({token for report in idle for token in report.tokens}) > COUNT
        assert [step for step in await host.events(v.EngineStep) if step.changes] == []
        asking = [asyncio.create_task(asyncio.to_thread(ask, ready)) for _ in range(4)]
        await asyncio.gather(*asking)
        os.kill(host.engine.pid, signal.SIGKILL)
        await host.nth(v.EngineReady, 2, timeout_s=90)
        told = len(await host.events(v.CanaryReported))
        await host.nth(v.CanaryReported, told + COUNT)
        answers = await host.events(v.CanaryReported)
        for number in range(COUNT):
            found = {(r.tokens, r.logprobs) for r in answers if r.canary == number and not r.error}
            assert len(found) == 1, (number, found)
        assert len({report.weights for report in answers}) == 1 and answers[0].weights
        changes = [c for step in await host.events(v.EngineStep) for c in step.changes]
        assert len({c.request for c in changes}) == 4, "clients' requests only"


async def test_a_bit_that_flips_in_a_real_engines_weights_is_found_within_one_round(
    tmp_path: Path, etcd: EtcdServer, model: str
) -> None:
    """The agent notices by itself, and another canary says the same at once."""
    often = {"canary_interval_s": "0.2", "canary_budget_ppm": "1000000"}
    async with hosted(tmp_path, etcd, model, "zygote", **often) as host:
        socket = str(tmp_path / "z.sock")
        zygote = "relume.engine_shim.engine.hosts.zygote"
        host.spawn("zygote", sys.executable, "-m", zygote, "--socket", socket)
        host.agent(*ARGUMENTS)
        await host.nth(v.EngineReady, 1, timeout_s=90)
        right = {}
        await host.nth(v.CanaryReported, 2 * COUNT)
        for report in await host.events(v.CanaryReported):
            right[report.canary] = report
        assert await asyncio.to_thread(flip, host.engine.pid, model) > 0
        told = len(await host.events(v.CanaryReported))
        await host.nth(v.CanaryReported, told + COUNT + 2)
        reports = await host.events(v.CanaryReported)
        wrong = [r.logprobs != right[r.canary].logprobs for r in reports]
        first = wrong.index(True)
        assert first <= told + 1 and all(wrong[first:]), "each canary finds it"
        assert not reports[first].confirms and reports[first + 1].confirms
        same = [r.canary for r in reports[first:] if r.tokens == right[r.canary].tokens]
        print(f"{len(same)} of {len(reports) - first} wrong answers had the right tokens")


def asked(ready: v.EngineReady) -> None:
    """A completion that the engine does not live to answer."""
    with suppress(OSError, http.client.HTTPException):
        ask(ready)
